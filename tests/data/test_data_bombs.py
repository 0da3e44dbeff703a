"""Data files of strangers, those of `make torture`: refused, or opened in little memory."""

import re
import sys
from pathlib import Path

import pytest

from nofuss.data import open_data
from nofuss.data.arrow_messages import is_compressed
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
