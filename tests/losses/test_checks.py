"""What every loss takes and refuses: labels of any whole type, arrays; mistakes are one line."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from nofuss import (
    Ranking,
)
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from tests.losses.test_every_loss import EVERY, LABELS, OVER_PROXIES, points


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("name", EVERY)
def test_labels_of_any_whole_type(
    batch: tuple[Tensor, Tensor], name: str, dtype: torch.dtype
) -> None:
    x, labels = batch
    criterion = EVERY[name]()
    torch.testing.assert_close(criterion(x, labels.to(dtype)), criterion(x, labels))


@pytest.mark.parametrize("name", [*PROXY_LOSSES, *INSTANCE_LOSSES])
def test_numpy_arrays_do_as_well(name: str) -> None:
    x = points().float()
    made = PROXY_LOSSES[name](3, 8, seed=0) if name in PROXY_LOSSES else INSTANCE_LOSSES[name]()
    assert made(x.numpy(), LABELS.numpy()) == made(x, LABELS)


@pytest.mark.parametrize("name", [*EVERY, "ranking"])
def test_what_is_no_batch_is_refused(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch
    criterion = EVERY[name]() if name in EVERY else Ranking()
    for dtype in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match="int64"):
            criterion(x, labels.to(dtype))
    with pytest.raises(ValueError, match="one a row"):
        criterion(x, labels[:-1])
    with pytest.raises(ValueError, match="one a row"):
        criterion(x, labels[:, None])
    with pytest.raises(ValueError, match="empty"):
        criterion(x[:0], labels[:0])
    with pytest.raises(ValueError, match=r"\(batch, dim\)"):
        criterion(x[0], labels)
    with pytest.raises(ValueError, match=r"\(batch, dim\)"):
        criterion(x.long(), labels)


@pytest.mark.parametrize("name", OVER_PROXIES)
def test_labels_beyond_the_proxies_are_refused(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch
    criterion = OVER_PROXIES[name]()
    with pytest.raises(ValueError, match="labels reach 4"):
        criterion(x, labels + 1)  # counted from one
    with pytest.raises(ValueError, match="-1"):
        criterion(x, labels - 1)
    with pytest.raises(ValueError, match=r"4 columns .*dim 5"):
        criterion(x[:, :4], labels)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("soft-triple", {"gamma": 0, "tau": -1, "scale": -1, "label_smoothing": 1, "margin": -1}),
        ("n-pairs", {"l2": -1}),
        ("nca", {"scale": 0}),
        ("proxy-nca++", {"temperature": -1, "label_smoothing": -0.1}),
        ("clustering", {"gamma": -1, "refinements": -1, "gamma_decay": 0}),
        ("proxy-triplet", {"margin": math.nan}),
        ("proxy-anchor", {"margin": -1}),
        ("triplet", {"margin": -1}),
        ("semi-hard", {"margin": math.nan}),
        ("lifted", {"margin": math.inf}),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, float]) -> None:
    make = partial(PROXY_LOSSES[name], 4, 5) if name in PROXY_LOSSES else INSTANCE_LOSSES[name]
    for option, value in options.items():
        with pytest.raises(ValueError, match=f"{option} is {value}"):
            make(**{option: value})
