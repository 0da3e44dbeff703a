"""Data files of strangers, those of `make torture`: refused, or opened in little memory."""

import base64
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from nofuss.data.arrow_messages import is_compressed
from nofuss.data.detect import open_data
from nofuss.errors import DataError
from nofuss.files.atomic import read_regular
from torture.data_bombs import OF_ARROW, data_bombs, shards

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux does")
MEGABYTES = 200


def peak() -> float:
    """The largest resident set of this process so far, in megabytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) / 1024


@pytest.mark.parametrize("name", [*shards(), *OF_ARROW])
def test_a_bomb_takes_little(name: str, tmp_path: Path) -> None:
    if name in OF_ARROW:
        pytest.importorskip("pyarrow", reason="pip install 'nofuss[parquet]'")
    target = data_bombs()[name](tmp_path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak()
    try:
        data = open_data(target)
        for path in data.paths[:3]:
            assert path.is_relative_to(tmp_path)  # whatever its name in the shard
            read_regular(path)
    except DataError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert not refusal or refusal.isprintable()
    assert peak() - before < MEGABYTES


def test_what_is_no_message_of_arrow() -> None:
    for content in (b"", b"\xff" * 64, bytes(range(64))):
        with pytest.raises(ValueError, match="can't be read"):
            is_compressed(content)


FORGED_STATISTICS = (
    "eNqNlM+L2kAUx2cmMYh4cGVnSECKCDv04Nr9wUop7mEiqyy11BX6Y4+piAqumyZpVdhDDz31UEpPe+qhh577N/Rceir9"
    "e/pmYjSalO0wmTe+ee8z75uZ2BW9Q6rTIi12KKGoiFAGIeTU3OmQIumuUoMW4DFKdXQ/oxbM0OzsQCSBx8DYQADZpbsd"
    "MBKCwT2XwyKFghcmnsezNR3SKrQSZcsSAs8ZT3U5GfhBWikqwNTl8gaL3CGH3CWHYEyknBzNRZANJWRTySKRWKCFKHFb"
    "QCxXVb5V/5JgdU6Qafj90eDKofBq83sVU3edYLSHOiUIAwcxMxPn1WCy4fHdyTjAoYdlrarV4KhE89YJMgpWSKCIGewD"
    "hs7rPJv2EqyqPAUKdSAolqAGu2cZFkcGQOO4cH/Fu2E3/Afmn3H8dJMcI52jqlacWwyd/yT8I0k54iSwtAKyLxozeBYM"
    "ShdNlqJ/a/yb9n+yc4pO/iWbMI95/I/Ov+vxq5DkkHROJJuw9xg6/5XhXzPJi5HkZVc89k5jBPSARVbJzIte7+mLR+G9"
    "MW/JA9keDgW0CxG2x0LMhD0ULSGGoqmWhG0L8UROmkKcK8fainDJ9qNZiGrOJFrl9pTzch2vWksO/WPbd16q+KGMP+rC"
    "MJOIZ6qetoiXBvly2p6PLq+eq/0WMn6uYOdyC3sWlnC2Tor272/tf6ac7daBs/p9sVw/PUVm2XW8128GwX7fdfcdz7ue"
    "ld8OPH98PS0f1WsHtUOrAd9Q2NEnDaEu/E3+BR3k3fA="
)
"""Parquet, found by fuzzing: pyarrow aborts when it looks at the metadata of a column."""


def test_forged_statistics_do_not_end_the_process(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'nofuss[parquet]'")
    file = tmp_path / "x.parquet"
    file.write_bytes(zlib.decompress(base64.b64decode(FORGED_STATISTICS)))
    program = "import sys; from nofuss.data.detect import open_data; open_data(sys.argv[1])"
    words = [sys.executable, "-c", program, str(file)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "DataError" in ended.stderr
