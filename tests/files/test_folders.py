"""Folders that appear whole or not at all, and nowhere else."""

import threading
from pathlib import Path

import pytest

from nofuss.errors import RunError
from nofuss.files.atomic import temporary_name
from nofuss.files.folders import (
    _exchange,
    clear_remains,
    own_folder,
    read_folder,
    remove,
    write_folder,
)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_appears_when_all_went_well(tmp_path: Path) -> None:
    with write_folder(tmp_path / "run") as new:
        (new / "a").write_text("1")
        assert not (tmp_path / "run").exists()
    assert contents(tmp_path) == {"run/a": "1"}


def test_a_folder_takes_the_old_ones_place_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with write_folder(tmp_path / "run") as new:
            (new / name).write_text(name)
    assert contents(tmp_path) == {"run/b": "b"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_failure_half_way_leaves_the_old_folder(tmp_path: Path) -> None:
    with write_folder(tmp_path / "run") as new:
        (new / "a").write_text("old")

    def fail() -> None:
        with write_folder(tmp_path / "run") as new:
            (new / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert contents(tmp_path) == {"run/a": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that can't swap two folders in one step."""
    monkeypatch.setattr("nofuss.files.folders._exchange", lambda a, b: False)


@pytest.mark.usefixtures("without_exchange")
def test_a_folder_is_replaced_without_exchange_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with write_folder(tmp_path / "run") as new:
            (new / name).write_text(name)
    assert contents(tmp_path) == {"run/b": "b"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """What such a kill leaves where folders can't be swapped: the next write puts it back first."""
    old = tmp_path / temporary_name("run", "old")
    old.mkdir()
    (old / "a").write_text("old")

    def fail() -> None:
        with write_folder(tmp_path / "run"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert contents(tmp_path) == {"run/a": "old"}


def test_a_reader_always_finds_a_folder(tmp_path: Path) -> None:
    """While another thread replaces it again and again."""
    if not _can_exchange(tmp_path):
        pytest.skip("this file system can't swap two folders")
    with write_folder(tmp_path / "run") as new:
        (new / "a").write_text("0")
    done = threading.Event()

    def replace() -> None:
        for i in range(100):
            with write_folder(tmp_path / "run") as new:
                (new / "a").write_text(str(i))
        done.set()

    writer = threading.Thread(target=replace)
    writer.start()
    while not done.is_set():
        assert (tmp_path / "run").is_dir()
    writer.join()


def _can_exchange(folder: Path) -> bool:
    for name in ("x", "y"):
        (folder / name).mkdir()
    return _exchange(folder / "x", folder / "y")


@pytest.mark.usefixtures("without_exchange")
def test_a_failure_at_the_last_step_puts_the_old_folder_back(tmp_path: Path) -> None:
    """The new folder is gone when it is to be renamed, as on a disk that fails."""
    with write_folder(tmp_path / "run") as new:
        (new / "a").write_text("old")

    class Vanishing(type(tmp_path)):  # type: ignore[misc]
        def rename(self, target: Path) -> Path:
            if self.name.endswith(".new"):
                raise OSError(5, "Input/output error")
            return Path(self).rename(target)

    def fail() -> None:
        with write_folder(Vanishing(tmp_path / "run")) as new:
            (new / "a").write_text("new")

    with pytest.raises(OSError, match="Input/output error"):
        fail()
    assert contents(tmp_path) == {"run/a": "old"}


def test_remains_of_a_kill_are_no_obstacle(tmp_path: Path) -> None:
    """They stay until the only one who writes clears them away; other names are not ours."""
    (tmp_path / "run").mkdir()
    remains = [tmp_path / temporary_name("run", end) for end in ("new", "old")]
    for folder in remains:
        folder.mkdir()
        (folder / "rest").write_text("x")
    others = [".run.new", ".run.0123.new", "run.0123456789abcdef.new", ".0123456789abcdef.new"]
    for name in others:
        (tmp_path / name).mkdir()
    with write_folder(tmp_path / "run") as new:
        assert not list(new.iterdir())
        (new / "a").write_text("1")
    assert (tmp_path / "run" / "a").read_text() == "1"
    clear_remains(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "run"])


# What a stranger may have put there


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to("elsewhere")

    def write() -> None:
        with write_folder(tmp_path / "run") as new:
            (new / "a").write_text("1")

    for attempt in (write, lambda: own_folder(tmp_path / "run")):
        with pytest.raises(RunError, match="run is a link, but a run is written only inside"):
            attempt()
    assert contents(tmp_path) == {}


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("1")
    for name in ("link", temporary_name("x"), temporary_name("run", "old")):
        (tmp_path / name).symlink_to("elsewhere")
    remove(tmp_path / "link")
    clear_remains(tmp_path)
    with write_folder(tmp_path / "run") as new:
        (new / "b").write_text("2")
    assert contents(tmp_path) == {"elsewhere/a": "1", "run/b": "2"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "run"]


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    def write(content: str) -> None:
        with write_folder(tmp_path / "model") as new:
            for name in ("a", "b"):
                (new / name).write_text(content)

    write("old")
    reads = []

    def read() -> tuple[str, str]:
        a = (tmp_path / "model" / "a").read_text()
        if not reads:
            write("new")
        reads.append(a)
        return a, (tmp_path / "model" / "b").read_text()

    assert read_folder(tmp_path / "model", read) == ("new", "new")
    assert reads == ["old", "new"]


def test_an_error_in_a_folder_that_stays_is_raised_at_once(tmp_path: Path) -> None:
    reads = []

    def read() -> None:
        reads.append(1)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        read_folder(tmp_path, read)
    assert len(reads) == 1
