"""SoftTriple (Qian, Shang, Sun, Hu, Li, Jin 2019), Eq. 7 and 9 there: several centers a class.

Later than the paper, and here for comparison.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from nofuss.geometry import distances, normalize
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.proxies.assignment import ProxyTriplets


def soft_triple(
    embeddings: Tensor,
    labels: Tensor,
    centers: Tensor,
    *,
    scale: float | Tensor = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    tau: float = 0.2,
) -> Tensor:
    """Softmax over classes of λ(S_c − δ[c=y]), S_c = Σ_k softmax_k(s_k/γ)·s_k, centers (C, K, D).

    τ weighs half the mean distance between centers of a class, which merges those not needed.
    """
    c, k, _ = centers.shape
    w = normalize(centers)
    s = torch.einsum("bd,ckd->bck", normalize(embeddings), w)
    relaxed = (F.softmax(s / gamma, dim=2) * s).sum(2)  # (B, C)
    relaxed = relaxed - margin * F.one_hot(labels, c)
    loss = F.cross_entropy(scale * relaxed, labels)
    if tau and k > 1:
        upper = torch.triu(distances(w, w), diagonal=1)  # (C, K, K)
        loss = loss + tau * upper.sum() / (c * k * (k - 1))
    return loss


class SoftTriple(ProxyLoss):
    """SoftTriple (Qian et al. 2019); scale is their λ, margin their δ, proxies their centers."""

    takes: ClassVar[tuple[str, ...]] = ("static", "several")
    fusible: ClassVar[bool] = False
    can_shard: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        proxies_per_class: int = 10,
        scale: float = 20.0,
        gamma: float = 0.1,
        margin: float = 0.01,
        tau: float = 0.2,
        seed: int | None = None,
    ) -> None:
        if scale is None:
            raise ValueError("scale is None; SoftTriple is made of cosines, so it needs a number")
        if proxies_per_class != int(proxies_per_class) or proxies_per_class < 1:
            raise ValueError(
                f"proxies_per_class is {proxies_per_class}; SoftTriple wants a whole number, as "
                "every class has the same number of centers"
            )
        super().__init__(
            num_classes, dim, proxies_per_class=proxies_per_class, scale=scale, seed=seed
        )
        self.gamma = gamma
        self.margin = margin
        self.tau = tau

    def _loss(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        k = len(p) // self.num_classes  # a class owns k neighbouring rows
        assert self.scale is not None
        return soft_triple(
            x,
            triplets.positive // k,
            p.view(self.num_classes, k, self.dim),
            scale=self.scale,
            gamma=self.gamma,
            margin=self.margin,
            tau=self.tau,
        )
