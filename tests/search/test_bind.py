"""A bind that others can reach, tried with the real command."""

import subprocess
import sys
from pathlib import Path


def test_a_bind_beyond_loopback_without_a_token_is_refused(picture_run: Path) -> None:
    command = [sys.executable, "-m", "nofuss", "serve", str(picture_run), "--port", "0"]
    result = subprocess.run(
        [*command, "--host", "0.0.0.0", "--no-token"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert "so a token is needed" in result.stderr
    assert "http" not in result.stdout
    assert len(result.stderr.strip().splitlines()) == 1
