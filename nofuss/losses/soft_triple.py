"""SoftTriple (Qian, Shang, Sun, Hu, Li, Jin 2019), Eq. 7 and 9 there: several centers a class.

Later than the paper, and here for comparison.
"""

from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from nofuss.geometry import distances, normalize
from nofuss.losses.checks import check_number
from nofuss.losses.proxy_loss import ProxyLoss, ProxyOptions
from nofuss.losses.proxy_nca import check_smoothing, nca_of_logits
from nofuss.proxies.assignment import ProxyTriplets


def soft_triple(
    embeddings: Tensor,
    labels: Tensor,
    centers: Tensor,
    *,
    scale: float = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    tau: float = 0.2,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Softmax over classes of λ(S_c − δ[c=y]), S_c = Σ_k softmax_k(s_k/γ)·s_k, centers (C, K, D).

    τ weighs half the mean distance between centers of a class, which merges centers that are not
    needed. It is part of the loss of each embedding, (B,).
    """
    c, k, _ = centers.shape
    relaxed = relaxed_similarity(embeddings, centers, gamma=gamma)  # (B, C)
    one_hot = (labels[:, None] == torch.arange(c, device=labels.device)).to(relaxed)
    logits = scale * (relaxed - margin * one_hot)
    losses = nca_of_logits(
        logits, ProxyTriplets(labels), include_positive=True, label_smoothing=label_smoothing
    )
    if tau and k > 1:
        w = normalize(centers)
        upper = torch.triu(distances(w, w), diagonal=1)  # (C, K, K)
        losses = losses + tau * upper.sum() / (c * k * (k - 1))
    return losses


def relaxed_similarity(embeddings: Tensor, centers: Tensor, *, gamma: float) -> Tensor:
    """Return S_c = Σ_k softmax_k(s_k/γ)·s_k of the cosines s to centers (C, K, D): (B, C)."""
    s = torch.einsum("bd,ckd->bck", normalize(embeddings), normalize(centers))
    return (F.softmax(s / gamma, dim=2) * s).sum(2)


class SoftTriple(ProxyLoss):
    """SoftTriple (Qian et al. 2019); scale is their λ, margin their δ, proxies their centers.

    Example::

        >>> criterion = nofuss.SoftTriple(num_classes=100, dim=64, proxies_per_class=5)
        >>> embeddings, labels = torch.randn(32, 64), torch.randint(100, (32,))
        >>> criterion(embeddings, labels).backward()

    scale: their λ, the scale of the similarities in the softmax over classes.
    gamma: their γ, the temperature of the softmax over the centers of a class.
    margin: their δ, subtracted from the similarity to the own class.
    tau: their τ, the weight of the term that merges centers; 0 leaves it out.
    label_smoothing: fraction of the target that is spread evenly over all classes.

    There are 10 centers of each class by default, `proxies_per_class`, a whole number; those of a
    class are neighbouring rows. There is no fused and no sharded form.
    """

    takes: ClassVar[tuple[str, ...]] = ("static", "several")
    free_norms: ClassVar[bool] = False
    needs_whole: ClassVar[bool] = True
    usual_proxies: ClassVar[float] = 10.0

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float = 20.0,
        gamma: float = 0.1,
        margin: float = 0.01,
        tau: float = 0.2,
        label_smoothing: float = 0.0,
        **options: Unpack[ProxyOptions],
    ) -> None:
        check_number("gamma", gamma, positive=True)
        check_number("margin", margin)
        check_number("tau", tau)
        check_smoothing(label_smoothing)
        options.setdefault("proxies_per_class", self.usual_proxies)
        super().__init__(num_classes, dim, scale=scale, **options)
        self.gamma = gamma
        self.margin = margin
        self.tau = tau
        self.label_smoothing = label_smoothing

    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        assert self.scale is not None
        return soft_triple(
            x,
            triplets.positive // (len(p) // self.num_classes),
            self._centers(p),
            scale=self.scale,
            gamma=self.gamma,
            margin=self.margin,
            tau=self.tau,
            label_smoothing=self.label_smoothing,
        )

    def _logits(self, x: Tensor, p: Tensor) -> Tensor:
        """Return λ·S_c of every class, (B, C), without the margin."""
        assert self.scale is not None
        return self.scale * relaxed_similarity(x, self._centers(p), gamma=self.gamma)

    def _centers(self, p: Tensor) -> Tensor:
        return p.view(self.num_classes, -1, self.dim)  # a class owns neighbouring rows
