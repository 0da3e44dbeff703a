"""Random vectors in double precision."""

import torch
from torch import Tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)
