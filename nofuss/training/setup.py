"""From a resolved configuration to criterion, optimizer and initial proxies."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nofuss.config import TrainConfig
from nofuss.distributed.device import device_of
from nofuss.distributed.processes import world
from nofuss.errors import UsageError, unknown_name
from nofuss.evaluate import kmeans
from nofuss.files import memory
from nofuss.geometry import normalize
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from nofuss.losses.clustering import StructuredClustering
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.embedder import Embedder
from nofuss.model.stages import Top
from nofuss.proxies.assignment import Several
from nofuss.proxies.balanced import Balanced
from nofuss.proxies.by_name import kind_of
from nofuss.training.loop import Training
from nofuss.training.optim import build_optimizer

GAMMA_DECAY = 0.94
"""Of structured clustering's γ, the margin multiplier (Section 5 of the paper), per epoch."""
SHARD_FROM = 2**20
"""Numbers in all proxies from which on they are distributed over processes instead of replicated,
where the loss can do that: 16,384 proxies of 64 dimensions."""


def check_loss(config: TrainConfig, num_classes: int) -> None:
    """Raise UsageError if the loss does not exist or can't have these options; build nothing."""
    if config.loss in INSTANCE_LOSSES:
        for option in ("assignment", "proxies_per_class", "scale", "free_norms"):
            usual = 1.0 if option == "proxies_per_class" else getattr(TrainConfig(), option)
            if getattr(config, option) not in (None, usual):
                flag = option.replace("_", "-")
                raise UsageError(f"--{flag} is for losses over proxies; {config.loss} has none")
        return
    if config.loss not in PROXY_LOSSES:
        raise unknown_name("loss", config.loss, [*PROXY_LOSSES, *INSTANCE_LOSSES])
    loss, each = PROXY_LOSSES[config.loss], float(config.proxies_per_class or 0)
    assert config.dim is not None
    if config.assignment == "balanced" and each > 1:
        raise UsageError(
            f"--proxies-per-class is {each:g}; --assignment balanced has at most one for a "
            "label or group of linked items: lower it to 1"
        )
    if config.free_norms and not loss.free_norms:
        raise UsageError(
            f"--loss {config.loss} uses cosines and has no free norms; drop --free-norms"
        )
    options = {} if config.scale is None else {"scale": config.scale}
    try:
        loss.check_options(
            num_classes,
            config.dim,
            proxies_per_class=each,
            assignment=config.assignment,
            **options,
        )
    except ValueError as error:
        words = str(error).replace("proxies_per_class", "--proxies-per-class")
        raise UsageError(f"--loss {config.loss}: {words}") from None
    _check_memory(each * num_classes, config.dim)


def build_criterion(config: TrainConfig, num_classes: int) -> nn.Module:
    """Build the loss by its name, with the options of the configuration that it takes."""
    check_loss(config, num_classes)
    if config.loss == "clustering":
        return StructuredClustering(gamma_decay=GAMMA_DECAY)
    if config.loss in INSTANCE_LOSSES:
        return INSTANCE_LOSSES[config.loss]()
    loss, each = PROXY_LOSSES[config.loss], float(config.proxies_per_class or 0)
    assert config.dim is not None
    options: dict[str, Any] = {"seed": config.seed, "proxies_per_class": each}
    if config.assignment != "static":
        options["assignment"] = config.assignment
    if config.free_norms:
        options["scale"] = None
    elif config.scale is not None and config.loss == "proxy-nca++":
        options["temperature"] = 2 / config.scale
    elif config.scale is not None:
        options["scale"] = config.scale
    kind, scale = kind_of(config.assignment, num_classes, each), options.get("scale", 1.0)
    is_large = num_classes * each * config.dim >= SHARD_FROM
    if world() > 1 and is_large and loss.shards(kind.name, scale):
        options["sharded"] = True
    return loss(num_classes, config.dim, **options)


def items_per_class(config: TrainConfig) -> int:
    """Return how many items of a class a batch needs: some for losses over pairs, else 0."""
    if config.loss == "n-pairs":
        return 2
    chosen = config.assignment in ("dynamic", "matched")  # by the items of the batch
    return 4 if chosen or config.loss in INSTANCE_LOSSES else 0


def batch_of(config: TrainConfig, items: int, classes: int) -> int:
    """Return the batch size: as configured, at most the number of items, in whole classes."""
    batch, each = min(int(config.batch_size or 1), items), int(config.per_class or 0)
    return each * max(2, min(batch // each, classes)) if each else batch


def _check_memory(proxies: float, dim: int) -> None:
    """Refuse more proxies than fit into the machine, each with its gradient and two moments."""
    needed = 4 * 4 * proxies * dim / world()  # which may be machines of their own
    available = memory()
    if math.isfinite(needed) and needed > available:
        raise UsageError(
            f"{proxies:,.0f} proxies of {dim} dimensions take {needed / 2**30:,.0f} GB to train, "
            f"and this machine has {available / 2**30:.0f}; lower --proxies-per-class or --dim"
        )


def build_training(config: TrainConfig, model: nn.Module, criterion: nn.Module) -> Training:
    """Return model, criterion and optimizer at step 0, on the model's device.

    An `Embedder` is trained whole, or its head alone where the backbone stays fixed; any other
    module is a head.
    """
    criterion.to(device_of(model))
    head: nn.Module = model
    backbone: Iterable[nn.Parameter] = ()
    embedder = model.embedder if isinstance(model, Top) else model
    if isinstance(embedder, Embedder):
        head = embedder.head
        if config.preset in ("frozen", "vectors"):
            model = head
        else:
            backbone = embedder.backbone_parameters()
    assert config.epochs is not None
    assert config.schedule is not None
    return Training(
        model=model,
        criterion=criterion,
        optimizer=build_optimizer(
            str(config.optimizer),
            backbone=backbone,
            head=head.parameters(),
            proxies=criterion.parameters(),
            lr=float(config.lr or 0),
            head_lr=float(config.head_lr or 0),
            proxy_lr=float(config.proxy_lr or 0),
            weight_decay=float(config.weight_decay or 0),
        ),
        schedule=config.schedule,
        epochs=config.epochs,
        seed=config.seed,
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
