"""The embedding e(x; θ): a backbone's features through a linear head, (B, C, …) → (B, D)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nofuss.distributed.device import own_random_numbers
from nofuss.model.backbones import PRETRAINED, Backbone, Weights, build_backbone
from nofuss.model.start import Affine, signed_root


class Embedder(nn.Module):
    """Raw embeddings (B, dim); their norms are free, the loss and the evaluation normalise.

    Convolutions are kept in channels-last layout, the faster one on CPUs in training and
    in inference alike. `root` takes the root of the features before the head (Perronnin et al.
    2010): pooled activations are heavy-tailed, and a few large ones would rule the distance.
    """

    def __init__(self, backbone: Backbone, dim: int = 64, *, root: bool = False) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim is {dim}, expected 1 or more")
        self.backbone = backbone
        self.head = nn.Linear(backbone.features, dim)
        self.root = root
        self._backbone_frozen = False
        self._batch_norm_frozen = False
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def dim(self) -> int:
        """Length of an embedding."""
        return self.head.out_features

    def forward(self, inputs: Tensor) -> Tensor:
        """Raw embeddings (B, dim)."""
        embeddings: Tensor = self.head(self.to_head(self.backbone(inputs)))
        return embeddings

    def to_head(self, features: Tensor) -> Tensor:
        """The backbone's features as the head takes them: their signed root, or as they are."""
        return signed_root(features) if self.root else features

    @torch.no_grad()
    def set_head(self, start: Affine, *, root: bool) -> None:
        """Replace the head: its weights, its dimension, and whether it takes roots."""
        head = nn.Linear(start.weight.shape[1], start.weight.shape[0])
        head.weight.copy_(start.weight)
        head.bias.copy_(start.bias)
        self.head, self.root = head.to(self.head.weight.device), root

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """For the optimizer's group of their own; frozen ones get no gradient and stay put."""
        return self.backbone.parameters()

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """For the optimizer's group of their own."""
        return self.head.parameters()

    def freeze_backbone(self, frozen: bool = True) -> None:
        """Hold the backbone still, batch-norm statistics included; False lets it move again."""
        self._backbone_frozen = frozen
        self._refresh_freezing()

    def freeze_batch_norm(self, frozen: bool = True) -> None:
        """Hold batch norm's statistics, scales and shifts still; False lets them move again."""
        self._batch_norm_frozen = frozen
        self._refresh_freezing()

    def train(self, mode: bool = True) -> "Embedder":
        """Training mode, except for what is frozen."""
        super().train(mode)
        self.backbone.train(mode and not self._backbone_frozen)
        if self._batch_norm_frozen:
            for norm in self._batch_norms():
                norm.eval()
        return self

    def _refresh_freezing(self) -> None:
        self.backbone.requires_grad_(not self._backbone_frozen)
        for norm in self._batch_norms():
            norm.requires_grad_(not (self._backbone_frozen or self._batch_norm_frozen))
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
    seed: int = 0,
) -> Embedder:
    """Build an embedder on a backbone, or on the name of one.

    Random parts are drawn from `seed`; torch's own generators are left as they are.
    """
    with own_random_numbers(torch.device("cpu")) as set_seed:
        set_seed(seed)
        network = backbone
        if isinstance(network, str):
            network = build_backbone(network, channels=channels, weights=weights)
        network.mirror = mirror
        return Embedder(network, dim, root=root)
