"""What can't be used, and copies: equal digests, and pictures that look the same."""

import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import ImageEnhance, ImageFilter

from nofuss.data import scan
from nofuss.data.collection import compact_labels
from nofuss.data.decode import decode
from nofuss.data.open import open_data
from nofuss.data.scan import (
    CONFLICT,
    DUPLICATE,
    exact_copies,
    group_alike,
    look_at,
    near_duplicates,
    scan_pictures,
)
from tests.tiny_run import scene


@pytest.fixture
def untidy(photos: Path) -> Path:
    (photos / "tit" / "empty.jpg").touch()
    (photos / "tit" / "text.png").write_text("hello")
    whole = (photos / "wren" / "0.png").read_bytes()
    (photos / "tit" / "half.png").write_bytes(whole[: len(whole) // 2])
    shutil.copy(photos / "robin" / "0.png", photos / "robin" / "copy.png")
    shutil.copy(photos / "robin" / "1.png", photos / "wren" / "stray.png")
    return photos


def test_every_bad_file_is_found_and_named(untidy: Path) -> None:
    report = scan_pictures(open_data(untidy))
    assert {(p.name, p.reason, p.detail) for p in report.problems} == {
        ("tit/empty.jpg", "empty file", ""),
        ("tit/half.png", "truncated", "image file is truncated"),
        ("tit/text.png", "not a picture", ""),
        ("robin/copy.png", DUPLICATE, "of robin/0.png"),
        ("robin/1.png", CONFLICT, "labelled robin, wren"),
        ("wren/stray.png", CONFLICT, "labelled robin, wren"),
    }
    assert report.summary().startswith("14 images checked: 2 duplicate with another label, ")


def test_a_copy_without_a_label_contradicts_none(photos: Path) -> None:
    """Also where its number, −1, would be the last class."""
    shutil.copy(photos / "robin" / "0.png", photos / "loose.png")
    report = scan_pictures(open_data(photos, unlabelled=True))
    assert [(p.name, p.reason, p.detail) for p in report.problems] == [
        ("robin/0.png", DUPLICATE, "of loose.png")
    ]


def test_what_is_left_can_be_used(untidy: Path) -> None:
    data = open_data(untidy)
    report = scan_pictures(data)
    readable = data.subset(report.readable)
    assert len(readable) == 11
    assert {p.reason for p in scan_pictures(readable).problems} == {DUPLICATE, CONFLICT}


def test_a_second_scan_decodes_only_what_is_new(
    untidy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, looked = open_data(untidy), list[str]()

    def counting(path: Path, **options: int) -> object:
        looked.append(path.name)
        return decode(path, **options)

    monkeypatch.setattr("nofuss.data.scan.decode", counting)
    first, bad = scan_pictures(data), ["empty.jpg", "half.png", "text.png"]
    assert len(looked) == 14
    looked.clear()
    seen: list[tuple[str, int, int]] = []
    assert scan_pictures(data, progress=lambda *told: seen.append(told)) == first
    assert sorted(looked) == bad  # a reason may have gone
    assert seen[0] == ("checking files", 0, 14)
    assert seen[-1] == ("checking files", 14, 14)
    assert seen == sorted(seen)
    moved = untidy.rename(untidy.with_name("moved"))
    looked.clear()
    assert scan_pictures(open_data(moved)).summary() == first.summary()
    assert sorted(looked) == bad

    # another content of the same size and time is noticed
    file = moved / "wren" / "2.png"
    status = file.stat()
    file.write_bytes(bytes(status.st_size))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "wren/2.png" in {p.name for p in scan_pictures(open_data(moved)).problems}


def test_a_file_that_goes_away_is_missing(photos: Path) -> None:
    data = open_data(photos)
    (photos / "tit" / "0.png").unlink()
    (problem,) = scan_pictures(data).problems
    assert (problem.name, problem.reason) == ("tit/0.png", "missing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(photos: Path) -> None:
    (photos / "tit" / "0.png").chmod(0)
    (problem,) = scan_pictures(open_data(photos)).problems
    assert (problem.reason, problem.detail) == ("unreadable", "Permission denied")


def test_the_table_holds_every_problem(untidy: Path, tmp_path: Path) -> None:
    report = scan_pictures(open_data(untidy))
    (tmp_path / "scan.csv").write_text(report.as_csv(), encoding="utf-8", newline="")
    with (tmp_path / "scan.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["file"], r["reason"]) for r in rows] == [(p.name, p.reason) for p in report.problems]


def test_names_that_are_not_utf8_are_remembered_too(photos: Path) -> None:
    odd = os.fsencode(photos) + b"/tit/\xff\n.png"
    shutil.copy(photos / "tit" / "0.png", odd)
    data = open_data(photos)
    assert scan_pictures(data) == scan_pictures(data)
    assert [p.name for p in scan_pictures(data).problems] == ["tit/\\xff\\n.png"]
    assert len(compact_labels(data.labels)[1]) == 3


# Copies


def test_exact_copies_by_hand() -> None:
    keys = [b"a", b"b", b"", b"a", b"", b"c", b"b", b"a"]
    assert exact_copies(keys) == [[0, 3, 7], [1, 6]]
    assert exact_copies([]) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image,
        lambda image: image.resize((70, 80)),
        lambda image: image.filter(ImageFilter.GaussianBlur(1)),
        lambda image: ImageEnhance.Brightness(image).enhance(1.2),
        lambda image: image.convert("L"),
    ],
)
def test_changed_pictures_are_near_duplicates(change: object) -> None:
    pictures = [scene(1), scene(2), change(scene(1)), scene(3)]  # type: ignore[operator]
    looks = [b"", *map(look_at, pictures)]
    assert near_duplicates(looks) == [[1, 3]]


def test_scenes_are_no_duplicates_of_each_other() -> None:
    assert near_duplicates([look_at(scene(i, 64)) for i in range(300)]) == []
    assert near_duplicates([]) == []


def test_small_pictures_are_compared_by_content_alone() -> None:
    assert look_at(scene(1, 63)) == b""
    assert near_duplicates([look_at(scene(1, 63))] * 2) == []


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 1000), st.integers(2, 40), st.sampled_from([1, 3, 16, 512]))
def test_groups_are_those_of_a_slow_search(
    monkeypatch: pytest.MonkeyPatch, seed: int, n: int, block: int
) -> None:
    """Hashes a few bits apart with equal thumbnails: chains join by every pair that is close."""
    monkeypatch.setattr(scan, "BLOCK", block)
    random = np.random.default_rng(seed)
    bits = np.repeat(random.random((n // 4 + 1, 64)) < 0.5, 4, axis=0)[:n]
    bits ^= random.random(bits.shape) < 0.06
    thumbnails = np.ones((n, 4), dtype=np.float32) / 2
    group = list(range(n))
    for i in range(n):
        for j in range(i):
            if (bits[i] != bits[j]).sum() <= 8:
                old, new = group[i], group[j]
                group = [new if g == old else g for g in group]
    expected = {frozenset(i for i in range(n) if group[i] == g) for g in group}
    found = {frozenset(rows) for rows in group_alike(bits, thumbnails)}
    assert found == {rows for rows in expected if len(rows) > 1}
