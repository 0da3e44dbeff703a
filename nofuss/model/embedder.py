"""The embedding e(x; θ): a backbone's features through a linear head, (B, C, …) → (B, D)."""

import copy
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from nofuss.distributed.device import device_of, seeded
from nofuss.errors import RunError
from nofuss.model.backbones import (
    OWN,
    PRETRAINED,
    Backbone,
    Weights,
    build_backbone,
    inference_key,
)
from nofuss.model.timm import is_timm
from nofuss.model.whitening import Affine, signed_root


class Embedder(nn.Module):
    """A backbone and a linear head; raw embeddings (B, dim), which losses and evaluation normalise.

    Norms are free. Convolutions use the channels-last layout, which is faster on CPUs in training
    and inference. `root` takes the root of the features before the head (Perronnin et al. 2010):
    pooled activations are heavy-tailed, and a few large ones would dominate the distance.
    """

    def __init__(self, backbone: Backbone, dim: int = 64, *, root: bool = False) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim is {dim}, expected 1 or more")
        self.backbone = backbone
        self.head = nn.Linear(backbone.features, dim, dtype=torch.float32)
        self.root = root
        self._backbone_frozen = False
        self._batch_norm_frozen = False
        self._fixed: list[nn.Module] = []
        # Those of a module from Python that its owner has frozen stay so.
        self._given_fixed = [p for p in backbone.parameters() if not p.requires_grad]
        self._fixed_parameters = list(self._given_fixed)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def dim(self) -> int:
        """Length of an embedding."""
        return self.head.out_features

    def forward(self, *views: Tensor) -> Tensor:
        """Return raw embeddings (B, dim) of the inputs of each part of the backbone."""
        embeddings: Tensor = self.head(self.to_head(self.backbone(*views)))
        return embeddings

    def to_head(self, features: Tensor) -> Tensor:
        """Return the head's input: the backbone's features, or their signed root."""
        return signed_root(features) if self.root else features

    @torch.no_grad()
    def set_head(self, start: Affine, *, root: bool) -> None:
        """Replace the head: its weights, its dimension, and whether it takes roots of features."""
        # On the meta device no random weights are drawn, so torch's own generator stays as it is.
        dim, width = start.weight.shape
        head = nn.Linear(width, dim, device="meta", dtype=torch.float32)
        self.head, self.root = head.to_empty(device=self.head.weight.device), root
        self.head.weight.copy_(start.weight)
        self.head.bias.copy_(start.bias)

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """Return the backbone's parameters, for a separate group of the optimizer.

        Those that are never trained are left out.
        """
        fixed = {id(p) for p in self._fixed_parameters}
        return (p for p in self.backbone.parameters() if id(p) not in fixed)

    def freeze_backbone(self, frozen: bool = True) -> None:
        """Freeze the backbone, batch-norm statistics included; False unfreezes it."""
        self._backbone_frozen = frozen
        self._refresh_freezing()

    def keep_fixed(self, modules: Iterable[nn.Module], bare: Iterable[nn.Parameter] = ()) -> None:
        """Freeze modules of the backbone for good, batch-norm statistics included.

        bare: single parameters that are frozen too.
        """
        self._fixed = list(modules)
        within = [p for module in self._fixed for p in module.parameters()]
        self._fixed_parameters = [*self._given_fixed, *within, *bare]
        self._refresh_freezing()

    def freeze_batch_norm(self) -> None:
        """Freeze batch norm's statistics, scales and shifts."""
        self._batch_norm_frozen = True
        self._refresh_freezing()

    def train(self, mode: bool = True) -> "Embedder":
        """Set training mode, except for what is frozen."""
        super().train(mode)
        self.backbone.train(mode and not self._backbone_frozen)
        if self._batch_norm_frozen:
            for norm in self._batch_norms():
                norm.eval()
        for module in self._fixed:
            module.eval()
        return self

    def _refresh_freezing(self) -> None:
        self.backbone.requires_grad_(not self._backbone_frozen)
        for norm in self._batch_norms():
            norm.requires_grad_(not (self._backbone_frozen or self._batch_norm_frozen))
        for parameter in self._fixed_parameters:
            parameter.requires_grad_(False)
        self.train(self.training)

    def _batch_norms(self) -> list[nn.Module]:
        return [m for m in self.backbone.modules() if isinstance(m, _BatchNorm)]


def build_embedder(
    backbone: str | Backbone,
    *,
    dim: int = 64,
    channels: int | None = None,
    weights: Weights = PRETRAINED,
    root: bool = False,
    mirror: bool = False,
    size: int | None = None,
    seed: int = 0,
) -> Embedder:
    """Build an embedder on a backbone, or on the name of one.

    size: of the pictures, where the network depends on it. Random parts are drawn from `seed`;
    torch's own generators are left as they are.
    """
    with seeded(torch.device("cpu")) as set_seed:
        set_seed(seed)
        network = backbone
        if isinstance(network, str):
            network = build_backbone(network, channels=channels, weights=weights, size=size)
        network.mirror = mirror
        return Embedder(network, dim, root=root)


@torch.no_grad()
def embed_features(embedder: Embedder, features: Tensor) -> Tensor:
    """Return raw embeddings (N, dim) of the backbone's features (N, F), all at once, on the CPU.

    RunError if the model gives NaN or infinity.
    """
    inputs = embedder.to_head(features).to(device_of(embedder))
    embeddings: Tensor = embedder.head(inputs).cpu()
    if num_bad := int((~embeddings.isfinite().all(1)).sum()):
        raise RunError(
            f"the model gives NaN or infinity for {num_bad:,} of {len(embeddings):,} items; "
            "its weights are damaged, or the items differ too much from the training data"
        )
    return embeddings


def for_inference(embedder: Embedder) -> Embedder:
    """Return a copy in eval mode with batch norm folded into the convolutions before it.

    Networks of timm and modules from Python are copied but not folded: the order in which their
    layers were made need not be the order in which they run.
    """
    ready = copy.deepcopy(embedder).eval().requires_grad_(False)
    for part in ready.backbone.parts:
        if part.name != OWN and not is_timm(part.name):
            fold_batch_norm(part)
    ready.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for part in ready.backbone.parts:
        part.key = inference_key(part)
    return ready


def fold_batch_norm(module: nn.Module) -> None:
    """Fold each batch norm into the convolution before it, in place."""
    children = list(module.named_children())
    for (conv_name, conv), (norm_name, norm) in pairwise(children):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
            setattr(module, norm_name, nn.Identity())
    for _, child in children:
        fold_batch_norm(child)
