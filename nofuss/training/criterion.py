"""The loss of a run by its name, with the options that it takes, and where its proxies start."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from nofuss.config import Settings
from nofuss.distributed.processes import world
from nofuss.errors import UsageError, unknown_name
from nofuss.evaluate import kmeans
from nofuss.files import memory
from nofuss.geometry import normalize
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from nofuss.losses.clustering import StructuredClustering
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.proxies.assignment import Balanced, Several, kind_of

GAMMA_DECAY = 0.94
"""Of structured clustering's γ, the margin multiplier (Section 5 of the paper), per epoch."""
SHARD_FROM = 2**20
"""Numbers in all proxies from which on they are distributed over processes instead of replicated,
where the loss can do that: 16,384 proxies of 64 dimensions."""


def check_loss(settings: Settings, num_classes: int, dim: int) -> None:
    """Raise UsageError if the loss does not exist or can't have these options; build nothing."""
    if settings.loss in INSTANCE_LOSSES:
        return
    if settings.loss not in PROXY_LOSSES:
        raise unknown_name("loss", settings.loss, [*PROXY_LOSSES, *INSTANCE_LOSSES])
    loss, each = PROXY_LOSSES[settings.loss], settings.proxies_per_class
    if settings.assignment == "balanced" and each > 1:
        raise UsageError(
            f"--proxies-per-class is {each:g}; --assignment balanced has at most one for a "
            "label or group of linked items: lower it to 1"
        )
    if settings.free_norms and not loss.free_norms:
        raise UsageError(
            f"--loss {settings.loss} uses cosines and has no free norms; drop --free-norms"
        )
    options = {} if settings.scale is None else {"scale": settings.scale}
    try:
        loss.check_options(
            num_classes, dim, proxies_per_class=each, assignment=settings.assignment, **options
        )
    except ValueError as error:
        words = str(error).replace("proxies_per_class", "--proxies-per-class")
        raise UsageError(f"--loss {settings.loss}: {words}") from None
    _check_memory(each * num_classes, dim)


def build_criterion(settings: Settings, num_classes: int, dim: int) -> nn.Module:
    """Build the loss by its name, with the options of the settings that it takes."""
    check_loss(settings, num_classes, dim)
    if settings.loss == "clustering":
        return StructuredClustering(gamma_decay=GAMMA_DECAY)
    if settings.loss in INSTANCE_LOSSES:
        return INSTANCE_LOSSES[settings.loss]()
    loss, each = PROXY_LOSSES[settings.loss], settings.proxies_per_class
    options: dict[str, Any] = {"seed": settings.seed, "proxies_per_class": each}
    if settings.assignment != "static":
        options["assignment"] = settings.assignment
    if settings.free_norms:
        options["scale"] = None
    elif settings.scale is not None:
        options |= loss.of_scale(settings.scale)
    kind, scale = kind_of(settings.assignment, num_classes, each), options.get("scale", 1.0)
    is_large = num_classes * each * dim >= SHARD_FROM
    if world() > 1 and is_large and loss.shards(kind.name, scale):
        options["sharded"] = True
    return loss(num_classes, dim, **options)


def _check_memory(proxies: float, dim: int) -> None:
    """Refuse more proxies than fit into the machine, each with its gradient and two moments."""
    needed = 4 * 4 * proxies * dim / world()  # which may be machines of their own
    available = memory()
    if math.isfinite(needed) and needed > available:
        raise UsageError(
            f"{proxies:,.0f} proxies of {dim} dimensions take {needed / 2**30:,.0f} GB to train, "
            f"and this machine has {available / 2**30:.0f}; lower --proxies-per-class or --dim"
        )


@torch.no_grad()
def place_proxies(
    criterion: nn.Module, directions: Tensor, labels: Tensor | None, *, seed: int = 0
) -> None:
    """Set proxies to the mean of the unit vectors (N, D) that they stand for.

    A proxy that does not stand for whole labels starts at a point drawn by `seed`, of its own label
    if it has one: elsewhere it might be the closest proxy of no point and never move. A loss over
    instances has no proxies. Directions, labels and criterion are on the CPU.
    """
    if not isinstance(criterion, ProxyLoss):
        return
    assignment, shard = criterion.assignment, criterion.shard
    if isinstance(assignment, Balanced) and labels is not None:
        _settle_all(criterion, assignment, directions, labels, seed=seed)
    if assignment.by_label and labels is not None:
        own = assignment.of(directions, labels, criterion.proxies)
        if shard is not None:
            held = shard.holds(own)
            directions, own = directions[held], own[held] - shard.start
        sums = torch.zeros_like(criterion.proxies).index_add_(0, own, directions)
        criterion.proxies.copy_(normalize(sums))
        return
    # A random order of the points, then by label: each label's first are its proxies' starts.
    order = torch.randperm(len(directions), generator=torch.Generator().manual_seed(seed))
    if isinstance(assignment, Several) and labels is not None:
        order = order[labels[order].argsort(stable=True)]
        sizes = torch.bincount(labels, minlength=criterion.num_classes)
        owner = assignment.label_of_proxy
        turn = torch.arange(len(owner)) - torch.searchsorted(owner, owner)
        first = (sizes.cumsum(0) - sizes)[owner]
        order = order[first + turn % sizes[owner].clamp_min(1)]
    rows = torch.arange(assignment.num_proxies)
    criterion.proxies.copy_(directions[order[rows % len(order)]])


def _settle_all(
    criterion: ProxyLoss, assignment: Balanced, directions: Tensor, labels: Tensor, *, seed: int
) -> None:
    """Let all labels choose at once: with fewer proxies, among the k-means centers of their means.

    With as many proxies as labels any choice is as good, since proxies then move to their labels.
    """
    rows = torch.arange(assignment.num_proxies)
    if assignment.num_proxies == assignment.num_classes:
        assignment.proxy_of_label.copy_(rows)
        return
    around = directions - directions.mean(0)
    sums = around.new_zeros(criterion.num_classes, around.shape[1]).index_add_(0, labels, around)
    centers = torch.as_tensor(kmeans(normalize(sums), len(rows), seed=seed)[0]).to(directions)
    assignment.settle(directions, labels, centers)
