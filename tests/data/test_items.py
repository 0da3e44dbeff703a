"""Items by their address, FILE#ROW: what it leads to, and what it does not."""

from pathlib import Path

import pytest
from pyarrow import parquet

from nofuss.data import items
from nofuss.data.decode import PictureError, decode
from nofuss.data.items import read_item
from nofuss.data.open import open_data
from nofuss.data.scan import scan_pictures
from tests.data.readers.test_shards import images, picture, sample, shards, write_shard

__all__ = ["shards"]  # a fixture


def test_what_an_address_does_not_lead_to(shards: Path) -> None:
    path, file = open_data(shards).paths[-1], shards / "photos-002.tar"
    for row in (8, 10**17):
        with pytest.raises(OSError, match="index"):
            read_item(Path(f"{file}#{row}"))
    with pytest.raises(OSError, match="limit of 10"):
        read_item(path, limit=10)
    write_shard(file, sample(7, "9") | sample(8, "9") | sample(9, "9") | sample(10, "9"))
    assert read_item(path) == picture(10)  # of the file as it is now
    file.write_bytes(b"short")
    with pytest.raises(OSError, match="truncated"):
        read_item(path)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        read_item(path)
    with pytest.raises(PictureError, match="missing"):
        decode(path)


def test_a_group_of_rows_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet.write_table(images(4), tmp_path / "d.parquet")
    monkeypatch.setattr(items, "LARGEST_GROUP", 1000)
    problems = scan_pictures(open_data(tmp_path / "d.parquet")).problems
    assert len(problems) == 4
    assert "1,000" in problems[0].detail
