"""Low-rank adapters for transformers (LoRA, Hu et al. 2021): W + B·A with few rows in A.

The weights of attention and MLP layers stay as they are, and a product of two thin matrices is
added to each. It starts at zero, so training starts from the pretrained network; there is little to
over-fit and little to keep in a checkpoint. After training the products are added to the weights:
the saved model is an ordinary one.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nofuss.errors import UsageError
from nofuss.model.embedder import Embedder
from nofuss.model.stages import Trunk, fixed_count

_ADAPTED = re.compile(r"(^|\.)(attn|mlp)\w*\.")


class LowRank(nn.Module):
    """The map W ↦ W + up·down for weights (out, in), with `rank` rows in `down`."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        out, width = weight.shape
        down = torch.randn(rank, width, generator=generator) / width**0.5
        self.down = nn.Parameter(down.to(weight.device))
        self.up = nn.Parameter(torch.zeros(out, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight."""
        return weight + self.up @ self.down


def add_adapters(embedder: Embedder, rank: int, *, unfreeze: str | None, seed: int = 0) -> None:
    """Add adapters to the attention and MLP layers of the stages that are trained.

    All other parameters of the backbone are frozen for good.
    """
    backbone = embedder.backbone
    trunk = Trunk(backbone, fixed_count(backbone, unfreeze))
    generator = torch.Generator().manual_seed(seed)
    layers = [
        layer
        for name, layer in backbone.network.named_modules()
        if isinstance(layer, nn.Linear)
        and _ADAPTED.search(name)
        and not any(layer is fixed for fixed in trunk.owned.modules())
    ]
    if not layers:
        raise UsageError(
            f"--lora is for transformers, and {backbone.name} has no attention layers in the "
            "stages that are trained; drop it"
        )
    fixed = list(backbone.parameters())
    for layer in layers:
        change = LowRank(layer.weight, rank, generator)
        parametrize.register_parametrization(layer, "weight", change, unsafe=True)
    embedder.keep_fixed(trunk.owned, fixed)


@torch.no_grad()
def merge_adapters(embedder: Embedder) -> None:
    """Replace adapted layers by plain ones with what they have learned in their weights.

    Not `remove_parametrizations`, which changes a class that copies of the embedder share.
    """
    for name, layer in list(embedder.backbone.named_modules()):
        if isinstance(layer, nn.Linear) and parametrize.is_parametrized(layer, "weight"):
            merged = nn.Linear(layer.in_features, layer.out_features, bias=False)
            merged.weight = nn.Parameter(layer.weight.detach())
            merged.bias = layer.bias
            embedder.backbone.set_submodule(name, merged.train(layer.training))
