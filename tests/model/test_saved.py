"""A model folder: the same bits back, and one clear line when something is wrong with it."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from nofuss.config import Preprocessing
from nofuss.errors import NofussError, RunError
from nofuss.files import read_json, write_by_content, write_json
from nofuss.model import saved
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.encoder import load
from nofuss.model.saved import (
    load_model,
    model_digest,
    model_files,
    save_model,
)

CASES = {
    "convnet": (1, 28, 28),
    "efficientnet-lite0": (3, 64, 64),
    "identity": (6,),
    "inception-bn": (3, 64, 64),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    embedder = build_embedder("convnet", dim=8)
    save_model(tmp_path / "model", embedder, class_names=["a"])
    return tmp_path / "model"


def edit(folder: Path, **changes: Any) -> None:
    write_json(folder / "model.json", read_json(folder / "model.json") | changes)


def forge(folder: Path, weights: bytes) -> None:
    """Replace the weights, and vouch for them."""
    model_files(folder)[1].unlink()
    edit(folder, weights=write_by_content(folder, "weights", "safetensors", weights))


def trained(name: str) -> tuple[Embedder, torch.Tensor]:
    """An embedder whose statistics are no longer those of the start."""
    shape = CASES[name]
    embedder = build_embedder(name, channels=shape[0], dim=8, weights=None, seed=3).train()
    inputs = torch.randn(4, *shape)
    embedder(inputs).square().mean().backward()
    torch.optim.SGD(embedder.parameters(), lr=0.1).step()
    return embedder.eval(), inputs


@pytest.mark.parametrize("name", CASES)
def test_save_then_load_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    embedder, inputs = trained(name)
    names, extra = ["Пингвин", "auk"], {"rerank": None, "trained": {"epochs": 3}}
    save_model(tmp_path / "model", embedder, class_names=names, extra=extra)
    loaded, *others, digest = load_model(tmp_path / "model")
    assert digest == model_digest(tmp_path / "model")
    assert not loaded.training
    assert torch.equal(loaded(inputs), embedder(inputs))
    for key, tensor in embedder.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[key]), key
    assert loaded.backbone.preprocessing == embedder.backbone.preprocessing
    assert others == [names, extra]


def test_preprocessing_is_saved_as_given_not_as_the_backbones_default(tmp_path: Path) -> None:
    chosen = Preprocessing(size=40, resize=44, mode="L", mean=(1.5,), std=(2.5,), flip=False)
    embedder = build_embedder("convnet")
    embedder.backbone.preprocessing = chosen
    save_model(tmp_path / "model", embedder)
    assert load_model(tmp_path / "model")[0].backbone.preprocessing == chosen


def test_saving_again_replaces_and_leaves_nothing_behind(folder: Path) -> None:
    other = build_embedder("convnet", dim=9, seed=5)
    save_model(folder, other)
    assert load_model(folder)[0].dim == 9
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert {*folder.iterdir()} == {*model_files(folder)}


def test_what_cannot_be_written_leaves_the_former_model(folder: Path) -> None:
    other = build_embedder("convnet", dim=9)
    with pytest.raises(TypeError):
        save_model(folder, other, extra={"no json": object()})
    assert load_model(folder)[0].dim == 8


def test_the_description_switches_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before it is replaced leaves weights that nobody uses, until the next save."""
    with monkeypatch.context() as patch:
        patch.setattr("nofuss.model.saved.write_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_model(folder, build_embedder("convnet", dim=9))
    assert len([*folder.glob("weights-*")]) == 2
    assert load_model(folder)[0].dim == 8
    (folder / "weights-mine.safetensors").touch()  # no name of ours
    save_model(folder, build_embedder("convnet", dim=7))
    assert load_model(folder)[0].dim == 7
    left = {*model_files(folder), folder / "weights-mine.safetensors"}
    assert {*folder.iterdir()} == left


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_model_that_is_replaced_while_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are gone when they are looked for: those of the new one are read."""
    checksum, replaced = saved.sha256, list[bool]()

    def first_replace(file: Path) -> str:
        if not replaced:
            replaced.append(True)
            save_model(folder, build_embedder("convnet", dim=9))
        return checksum(file)

    monkeypatch.setattr(saved, "sha256", first_replace)
    assert load_model(folder)[0].dim == 9


@pytest.mark.parametrize("number", [0, 1], ids=["model.json", "weights"])
def test_a_flipped_bit_is_noticed(folder: Path, number: int) -> None:
    file = model_files(folder)[number]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(RunError, match="is damaged"):
        load_model(folder)


def test_missing_or_broken_files_are_named(folder: Path) -> None:
    description, weights = model_files(folder)
    tensors = load_file(weights)
    del tensors["head.bias"]
    forge(folder, save({**tensors, "tail.bias": torch.zeros(1)}))
    with pytest.raises(RunError, match=r"'head\.bias'"):
        load_model(folder)
    forge(folder, model_files(folder)[1].read_bytes()[:100])
    with pytest.raises(RunError, match=r"weights-.*\.safetensors is damaged"):
        load_model(folder)
    model_files(folder)[1].unlink()
    with pytest.raises(RunError, match=r"weights-[0-9a-f]{16}\.safetensors"):
        load_model(folder)
    edit(folder, weights="../../../etc/passwd")
    with pytest.raises(RunError, match="weights"):
        load_model(folder)
    description.write_text('{"format": 1')
    with pytest.raises(RunError, match=r"model\.json is damaged"):
        load_model(folder)
    description.write_text("[]")
    with pytest.raises(RunError, match="not an object"):
        load_model(folder)
    with pytest.raises(RunError, match=r"no model\.json in"):
        load_model(folder.parent / "elsewhere")


# Forged: whole and vouched for, but nothing that training writes


def look(**changes: Any) -> dict[str, Any]:
    """The preprocessing of the model in `folder`, with changes."""
    embedder = build_embedder("convnet", dim=8)
    assert embedder.backbone.preprocessing is not None
    return {"preprocessing": [dataclasses.asdict(embedder.backbone.preprocessing) | changes]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 99}, "format 99"),
        ({"format": 3}, "format 3"),
        ({"backbone": "convnot"}, "'convnot'.*'convnet'"),
        ({"backbone": ["convnet"]}, "backbone is"),
        ({"dim": 10**8}, r"100000000"),
        ({"dim": True}, "dim is True"),
        ({"dim": 0}, "dim is 0"),
        ({"channels": 3}, "preprocessing"),
        ({"class_names": [1]}, "class_names is"),
        ({"class_names": "ab"}, "class_names is"),
        ({"extra": []}, "extra is"),
        ({"preprocessing": []}, "preprocessing"),
        ({"preprocessing": [{"size": 3}]}, "lacks resize"),
        (look(size=0), "preprocessing"),
        (look(size=28.0), "size is 28.0"),
        (look(mode="RGB"), "preprocessing"),
        (look(mean=["x"]), "mean is"),
        (look(std=[0.0]), "preprocessing"),
        (look(std=[]), "preprocessing"),
        (look(colour=1), "colour"),
    ],
)
def test_a_forged_description_is_one_line(
    folder: Path, changes: dict[str, Any], complaint: str
) -> None:
    """And takes no memory: a head of 10⁸ dimensions would be 100 GB."""
    edit(folder, **changes)
    with pytest.raises(NofussError, match=complaint) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_named(folder: Path, value: float) -> None:
    tensors = {k: t.clone() for k, t in load_file(model_files(folder)[1]).items()}
    tensors["head.weight"][3, 5] = value
    forge(folder, save(tensors))
    with pytest.raises(RunError, match=r"NaN or infinity in head\.weight"):
        load_model(folder)


def test_a_model_that_overflows_is_one_line(tmp_path: Path) -> None:
    embedder = build_embedder("identity", dim=4, channels=6)
    embedder.head.weight.data.fill_(3e38)
    save_model(tmp_path / "model", embedder)
    with pytest.raises(RunError, match="2 of 2 items"):
        load(tmp_path / "model").embed(torch.ones(2, 6))
