"""JSON for the page, whatever names and labels hold."""

import json
from typing import Any

from starlette.responses import Response


class Json(Response):
    """JSON in ASCII: half a pair of surrogates, which JSON may hold, has no UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content; ValueError for NaN or infinity, which no browser reads."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
