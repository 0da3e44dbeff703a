"""The optimizer's groups and the schedule of their rates.

Backbone, head and proxies have separate rates: proxies start far from their final places, each
receives few gradients, and they need a rate that would destroy a pretrained backbone.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from nofuss.errors import unknown_name

RAMP = 1 / 3
"""Epochs in which the rates of the schedule "ramp" rise: Adam's first steps are its least certain,
and would be as large as all others."""


def _cosine(epoch: float, epochs: int) -> float:
    return (1 + math.cos(math.pi * min(1.0, epoch / epochs))) / 2


SCHEDULES: dict[str, Callable[[float, int], float]] = {
    "cosine": _cosine,
    "ramp": lambda epoch, epochs: min(1.0, 0.03 + epoch / RAMP) * _cosine(epoch, epochs),
    "constant": lambda epoch, epochs: 1.0,
}


def build_optimizer(
    name: str,
    *,
    backbone: Iterable[nn.Parameter],
    head: Iterable[nn.Parameter],
    proxies: Iterable[nn.Parameter],
    lr: float,
    head_lr: float,
    proxy_lr: float,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Build an optimizer of three groups, each with its `base_lr`; proxies do not decay."""
    groups = [
        {"params": list(params), "lr": lr, "base_lr": lr, "name": group, "weight_decay": decay}
        for group, params, lr, decay in (
            ("backbone", backbone, lr, weight_decay),
            ("head", head, head_lr, weight_decay),
            ("proxies", proxies, proxy_lr, 0.0),
        )
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adam":
        return torch.optim.Adam(groups, fused=True)
    if name == "adamw":
        return torch.optim.AdamW(groups, fused=True)
    if name == "rmsprop":
        return torch.optim.RMSprop(groups, alpha=0.9, foreach=True)
    raise unknown_name("optimizer", name, ("adam", "adamw", "rmsprop"))


def set_rates(optimizer: Optimizer, schedule: str, epoch: float, epochs: int) -> None:
    """Set the rates, a pure function of the epoch: a resumed run needs no scheduler state."""
    factor = SCHEDULES[schedule](epoch, epochs)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
