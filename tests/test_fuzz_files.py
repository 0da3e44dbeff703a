"""Foreign bytes outside runs: locks, the cache, tables and arrays."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from nofuss.data.open import open_data
from nofuss.errors import NofussError
from nofuss.files import LOCK, OWNER, _owner, locked
from tests.test_fuzz import anything, changed, other_tensor, relaxed
from tests.tiny_run import draw

pytestmark = pytest.mark.fuzz


def complaint(work: Callable[[], object]) -> str:
    """What an error of ours says, in one line; empty where there is none."""
    try:
        work()
    except NofussError as error:
        said = str(error)
    else:
        return ""
    assert "\n" not in said
    return said


def take(run: Path) -> None:
    with locked(run):
        pass


@relaxed
@given(content=st.binary(max_size=80) | anything.map(lambda x: json.dumps(x).encode()))
def test_locks(tmp_path: Path, content: bytes) -> None:
    """What says who holds the lock may be anything; the lock is taken, or refused in one line."""
    (tmp_path / LOCK).write_bytes(b"")
    (tmp_path / OWNER).write_bytes(content)
    assert "\n" not in _owner(tmp_path)
    take(tmp_path)
    assert not (tmp_path / OWNER).exists()


@pytest.mark.filterwarnings("ignore:.*is damaged")
# Tables and arrays


@relaxed
@given(data=st.data())
def test_tables(tmp_path: Path, data: st.DataObject) -> None:
    cells = st.sampled_from(["a.png", "pipe", "", "x" * 300, "\0", "..", "/dev/zero", '"', "\x1b["])
    row = st.lists(cells | st.text(max_size=5), max_size=5).map(",".join)
    kinds = ["path,label", "anchor,positive,negative", "a,b,same", "path;label;split"]
    header = st.sampled_from(kinds) | row
    text = "\n".join([data.draw(header), *data.draw(st.lists(row, max_size=5))])
    draw(1, 1).save(tmp_path / "a.png")
    if not (tmp_path / "pipe").exists():
        os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    complaint(lambda: open_data(tmp_path / "x.csv"))


@relaxed
@given(data=st.data())
def test_arrays(tmp_path: Path, data: st.DataObject) -> None:
    """Sound bytes of every type and shape, and changed ones."""
    whole = {"vectors": torch.randn(6, 4), "labels": torch.arange(6) // 2}
    whole["triplets"] = torch.tensor([[0, 1, 2], [2, 3, 4]])
    named = {name: data.draw(st.just(t) | other_tensor(t)) for name, t in whole.items()}
    suffix = data.draw(st.sampled_from(["npz", "safetensors"]))
    file = tmp_path / f"x.{suffix}"
    if suffix == "npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in named.items()})
    else:
        save_file({name: tensor.clone().contiguous() for name, tensor in named.items()}, file)
    if data.draw(st.booleans()):
        file.write_bytes(data.draw(changed(file.read_bytes())))
    complaint(lambda: np.isfinite(np.asarray(open_data(file).array)).all() or 1 / 0)
