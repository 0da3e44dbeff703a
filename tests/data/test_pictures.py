"""Decoded pictures in the cache: kept, checked, made again, and only ours deleted."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from nofuss.config import Preprocessing
from nofuss.data.decode import PictureError
from nofuss.data.detect import open_data
from nofuss.data.loader import Batch
from nofuss.data.pictures import FILES, decode_ahead
from tests.data.test_loader import SMALL, load, same


def sets(cache: Path) -> set[str]:
    return {path.name for path in (cache / "pictures").iterdir()} - {"CACHEDIR.TAG"}


def test_decoded_pictures_are_kept_and_made_again_when_a_file_changes(
    photos: Path, cache: Path
) -> None:
    data = open_data(photos)
    seen: list[tuple[str, int, int]] = []
    decode_ahead(data, SMALL, progress=lambda *told: seen.append(told))
    assert seen == [("decoding pictures once", done, 9) for done in range(10)]
    seen.clear()
    decode_ahead(data, SMALL, progress=lambda *told: seen.append(told))
    assert not seen
    shutil.copy(photos / "wren" / "0.png", photos / "tit" / "0.png")
    assert same(load(decode_ahead(data, SMALL)), load(data))
    assert len(sets(cache)) == 2


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("name", FILES)
def test_damaged_decoded_pictures_are_made_again(photos: Path, cache: Path, name: str) -> None:
    data = open_data(photos)
    decode_ahead(data, SMALL)
    (file,) = (cache / "pictures").rglob(name)
    file.write_bytes(file.read_bytes()[:-7])
    assert same(load(decode_ahead(data, SMALL)), load(data))
    file.unlink()
    assert same(load(decode_ahead(data, SMALL)), load(data))


def test_too_many_pictures_are_not_kept(photos: Path, cache: Path) -> None:
    data = open_data(photos)
    first = decode_ahead(data, SMALL).decoded
    assert first is not None
    room = len(first.pixels)
    assert decode_ahead(data.subset([0]), SMALL, limit=100).decoded is None
    assert decode_ahead(data, Preprocessing(size=10, resize=13), limit=room).decoded is None
    assert len(sets(cache)) == 1


def test_the_longest_unused_pictures_make_room(photos: Path, cache: Path) -> None:
    data = open_data(photos)
    kept = []
    for resize in (12, 13, 14):
        decode_ahead(data, Preprocessing(size=10, resize=resize), limit=15_000)
        kept.append(sets(cache))
    assert [len(sets) for sets in kept] == [1, 2, 2]
    assert kept[0].isdisjoint(kept[2])


def test_remains_of_a_dead_build_are_cleared_and_a_failed_one_leaves_none(
    photos: Path, cache: Path
) -> None:
    dead = cache / "pictures" / ".partial-999999999-x"
    dead.mkdir(parents=True)
    data = open_data(photos)
    (photos / "tit" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(PictureError, match=r"1\.png: not a picture"):
        decode_ahead(data, SMALL)
    assert sets(cache) == set()


def test_a_cache_that_can_not_be_written_means_decoding_as_needed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "file"))
    data = decode_ahead(open_data(photos), SMALL)
    assert data.decoded is None
    assert len(load(data)) == 3


def test_a_picture_that_went_away_is_named(photos: Path) -> None:
    data = open_data(photos)
    (photos / "tit" / "1.png").unlink()
    with pytest.raises(PictureError, match=r"tit/1\.png: missing"):
        decode_ahead(data, SMALL)


@pytest.mark.parametrize("name", FILES)
def test_one_changed_bit_is_noticed(photos: Path, cache: Path, name: str) -> None:
    """The picture is decoded from its file, in a subset too; the next time all are."""
    data = open_data(photos)
    expected = load(data)
    decode_ahead(data, SMALL)
    (file,) = (cache / "pictures").rglob(name)
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    order = np.random.default_rng(0).permutation(len(data))

    def load_kept() -> list[Batch]:
        return load(decode_ahead(data, SMALL).subset(order).subset(np.argsort(order)))

    with pytest.warns(UserWarning, match=r"pictures/\w+ is damaged \(.*\) and made again") as said:
        found = load_kept()
    assert same(found, expected)
    assert len(said) == 1
    seen: list[tuple[str, int, int]] = []
    whole = decode_ahead(data, SMALL, progress=lambda *told: seen.append(told))
    assert same(load(whole), expected)
    assert bool(seen) == (name != "shapes.npy")  # of which the damage was noticed at once


# Only what is ours is deleted


def test_folders_of_others_are_neither_used_nor_deleted(photos: Path, cache: Path) -> None:
    """A NOFUSS_CACHE in which somebody's own pictures lie."""
    holiday = cache / "pictures" / "holiday"
    holiday.mkdir(parents=True)
    (holiday / "1.jpg").write_bytes(bytes(50_000))
    with pytest.warns(UserWarning, match="pictures holds what nofuss did not make"):
        data = decode_ahead(open_data(photos), SMALL, limit=15_000)
    assert data.decoded is None
    assert [str(p.relative_to(cache)) for p in cache.rglob("*")] == [
        "pictures",
        "pictures/holiday",
        "pictures/holiday/1.jpg",
    ]


def test_what_came_later_into_our_folder_stays(photos: Path, cache: Path) -> None:
    """Names like ours with other files inside, files, links, and remains that name no process."""
    data = open_data(photos)
    decode_ahead(data, SMALL, limit=15_000)
    (ours,) = sets(cache)
    home = cache / "pictures"
    (home / ("f" * 32)).mkdir()
    (home / ("f" * 32) / "thesis.txt").write_text("years")
    (home / ("a" * 32)).write_text("a file")
    (home / ("e" * 32)).symlink_to(photos, target_is_directory=True)
    (home / ".partial-old").mkdir()
    (home / ".partial-999999999-x").mkdir()
    (home / ".partial-999999999-x" / "mine").write_text("years")
    before = {str(p) for p in cache.rglob("*") if ours not in p.parts}
    for resize in (13, 14, 15):
        ahead = decode_ahead(data, Preprocessing(size=10, resize=resize), limit=15_000)
        assert ahead.decoded is not None
    assert before <= {str(p) for p in cache.rglob("*")}
    assert ours not in sets(cache)  # room was made
    assert len(list(photos.rglob("*.png"))) == 9


def test_a_cache_of_a_former_version_is_taken_over(photos: Path, cache: Path) -> None:
    """Without a marker, but with nothing else inside than we make."""
    data = open_data(photos)
    decode_ahead(data, SMALL)
    (cache / "pictures" / "CACHEDIR.TAG").unlink()
    assert decode_ahead(data, Preprocessing(size=10, resize=13)).decoded is not None
    assert (cache / "pictures" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28")


def test_a_set_that_another_process_finished_first_is_used(
    photos: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both decode the same pictures; the second can't rename its set over that of the first."""
    data = open_data(photos)
    others = tmp_path / "other process"

    def other_process_is_faster(what: str, done: int, total: int) -> None:
        if done < len(data):
            return
        monkeypatch.setenv("NOFUSS_CACHE", str(others))
        decode_ahead(data, SMALL)
        monkeypatch.setenv("NOFUSS_CACHE", str(cache))
        (theirs,) = (p for p in (others / "pictures").iterdir() if p.is_dir())
        shutil.copytree(theirs, cache / "pictures" / theirs.name)

    decoded = decode_ahead(data, SMALL, progress=other_process_is_faster).decoded
    assert decoded is not None
    assert len(sets(cache)) == 1  # and nothing is left of ours
    assert same(load(decode_ahead(data, SMALL)), load(data))
