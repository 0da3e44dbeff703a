"""Run directories: never overwritten, resumed only with what they were made with."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nofuss.config import Options, Settings
from nofuss.errors import RunError
from nofuss.files import LOCK, OWNER, TEMPORARY, locked
from nofuss.run.directory import (
    Run,
    check_same_data,
    continue_run,
    create_run,
    note_fingerprint,
)
from nofuss.training.settings import agree
from tests.asked import settings_of


def create(path: Path | None, **options: Any) -> Path:
    run = create_run(settings_of(out=path, **options), name="set")
    note_fingerprint(run, "f" * 32)
    return run.path


def resume(path: Path, **options: Any) -> Settings:
    """As `run_training` does it: the run's settings, and what may change of them."""
    return agree(Run.open(path).config, Options(out=path, resume=True, **options))


def go_on(settings: Settings, *, fingerprint: str = "f" * 32) -> None:
    continue_run(settings, fingerprint=lambda: fingerprint)


def tree(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_describes_itself(tmp_path: Path) -> None:
    path = create(tmp_path / "deep" / "run", seed=5, data=Path("x.npz"))
    run = Run.open(path)
    assert run.config == settings_of(out=path, seed=5, data=Path.cwd() / "x.npz")
    environment = json.loads((path / "environment.json").read_text())
    assert environment["versions"]["torch"]
    assert environment["command"].startswith("nofuss")


def test_the_folder_of_a_new_run_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = list[int](), os.fsync

    def noting(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    create_run(settings_of(out=tmp_path / "runs" / "a"), name="a")
    assert (tmp_path / "runs").stat().st_ino in flushed


def test_never_overwritten(tmp_path: Path) -> None:
    path = create(tmp_path / "run")
    before = tree(path)
    with pytest.raises(RunError, match=r"not empty .*--resume"):
        create(path)
    assert tree(path) == before


def test_somebodys_folder_is_never_used(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(RunError, match="not empty"):
        create(tmp_path)
    with pytest.raises(RunError, match="is a file"):
        create(tmp_path / "thesis.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_place_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/run"):
        create(tmp_path / "file" / "run")


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    for name in (f"{TEMPORARY}0", LOCK, OWNER):  # a kill in the very first moment
        (tmp_path / name).write_text("{")
    assert Run.open(create(tmp_path)).config.out == tmp_path


@pytest.mark.parametrize("name", ["set", "..", ".hidden"])
def test_the_next_free_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = {create_run(settings_of(), name=name).path for _ in range(3)}
    assert len(made) == 3
    assert all(path.parent == Path("runs") for path in made)
    assert all((tmp_path / path / "config.json").is_file() for path in made)


def test_damage_of_the_configuration_is_noticed(tmp_path: Path) -> None:
    file = create(tmp_path / "run", seed=5) / "config.json"
    file.write_text(file.read_text().replace('"seed": 5', '"seed": 7'))
    with pytest.raises(RunError, match="checksum differs"):
        Run.open(file.parent)


def test_what_is_no_setting_may_differ(tmp_path: Path) -> None:
    path = create(tmp_path / "run")
    config = resume(path, num_workers=3, device="cpu")
    go_on(config)
    assert (config.num_workers, config.device) == (3, "cpu")


def test_other_data_is_refused(tmp_path: Path) -> None:
    path = create(tmp_path / "run")
    check_same_data(path, "f" * 32, cure="")
    with pytest.raises(RunError, match=r"00000000, was ffffffff"):
        check_same_data(path, "0" * 32, cure="")
    with pytest.raises(RunError, match="ffffffff"):
        go_on(resume(path), fingerprint="0" * 32)


def test_any_data_are_right_until_all_were_looked_at(tmp_path: Path) -> None:
    """Nothing was learned: a run that was killed before has no fingerprint, and then one only."""
    run = create_run(settings_of(out=tmp_path / "run"), name="set")
    continue_run(run.config, fingerprint=lambda: pytest.fail("it has none"))
    note_fingerprint(run, "a" * 32)
    note_fingerprint(run, "b" * 32)
    check_same_data(run.path, "a" * 32, cure="")


def test_data_that_moved_are_found_from_then_on(tmp_path: Path) -> None:
    path = create(tmp_path / "run", seed=5, data=Path("x.npz"))
    go_on(resume(path, data=Path("y.npz")))
    saved = Run.open(path).config
    assert (saved.data, saved.seed) == (Path.cwd() / "y.npz", 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "can't read"),
        (b"{", "can't read"),
        (b"\xff\xfe\x00", "can't read"),
        (b"[]", "not an object"),
        (b'{"epochs": "x"}', "epochs is 'x'"),
        (b'{"from_the_future": 1}', "another version"),
    ],
)
def test_a_damaged_config_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run directory"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RunError, match=message) as raised:
        Run.open(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "place", ["scores.json", "feedback.jsonl", ".lock", "model", "index/0.json"]
)
def test_links_in_a_run_are_refused(place: str, tmp_path: Path) -> None:
    run, outside = create(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    (run / place).symlink_to(outside)
    with pytest.raises(RunError, match="is a link, but") as raised:
        Run.open(run)
    assert str(run / place) in str(raised.value)
    assert not list(outside.iterdir())


def test_a_run_that_is_itself_reached_by_a_link_is_opened(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    (tmp_path / "latest").symlink_to(run)
    assert Run.open(tmp_path / "latest").config == Run.open(run).config


def test_one_command_writes_a_run_at_a_time(tmp_path: Path) -> None:
    path = create(tmp_path / "run")
    with Run.open(path, write=True) as run:
        assert Run.open(path).config == run.config  # reading takes no lock
        with pytest.raises(RunError, match=f"is being written by process {os.getpid()} "):
            Run.open(path, write=True)
    with Run.open(path, write=True):
        pass
    (path / "config.json").write_text("{")
    with pytest.raises(RunError, match="can't read"):
        Run.open(path, write=True)
    with locked(path):  # what could not be opened is not held
        pass


def test_metrics_are_a_line_an_epoch(tmp_path: Path) -> None:
    run = Run.open(create(tmp_path / "run"))
    rows = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25}]
    for row in (rows[0], {"epoch": 2, "loss": 0.5}, {"epoch": 3, "loss": 0.5}, rows[1]):
        run.note_epoch(row)  # the second epoch again: training was resumed before it
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_the_command_to_go_on_can_be_pasted(tmp_path: Path) -> None:
    run = Run.open(create(tmp_path / "a run"))
    assert run.resume_command == f"nofuss train --out '{tmp_path}/a run' --resume"
