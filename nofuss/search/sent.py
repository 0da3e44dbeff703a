"""An uploaded picture in an address: its vector as text, since the picture itself is not kept.

MODEL.NAME.VECTOR: the first digits of the model's checksum, a name for the picture that stays the
same when the model is taught, and the vector in half precision.
"""

import base64
import re
from typing import NamedTuple

import torch
from torch import Tensor

from nofuss.files import digest
from nofuss.geometry import normalize

FORM = re.compile(r"([0-9a-f]{8})\.([0-9a-f]{16})\.([A-Za-z0-9_-]+)")


class Sent(NamedTuple):
    """A picture that somebody sent: what it is called, and its embedding (D,)."""

    name: str
    vector: Tensor

    @classmethod
    def new(cls, vector: Tensor) -> "Sent":
        """Return a picture just sent."""
        return cls(digest(vector.numpy().tobytes())[:16], vector)

    def as_text(self, model: str) -> str:
        """Return the text for an address."""
        vector = base64.urlsafe_b64encode(self.vector.half().numpy().tobytes()).decode()
        return f"{model[:8]}.{self.name}.{vector.rstrip('=')}"

    @classmethod
    def from_text(cls, text: str, *, model: str, dim: int) -> "Sent":
        """Read an address that anybody may have written; ValueError if it does not fit."""
        found = FORM.fullmatch(text)
        if found is None or found[1] != model[:8]:
            raise ValueError("of another model")
        content = base64.urlsafe_b64decode(found[3] + "=" * (-len(found[3]) % 4))
        if len(content) != 2 * dim:
            raise ValueError("of another length")
        vector = torch.frombuffer(bytearray(content), dtype=torch.float16).float()
        if not vector.isfinite().all() or not vector.norm() > 0:
            raise ValueError("not a direction")
        return cls(found[2], normalize(vector[None])[0])
