"""The initial head on given features: a metric in closed form, before any training.

Features vary within a class along some directions more than along others, and directions that vary
within the training classes hardly separate new ones. `whitened_head` therefore divides by the
scatter within classes, shrunk towards a multiple of the identity,

    S = (1 − α)·S_within + α·(tr S_within / F)·I,

and keeps the principal components of the result. α = 1 is the PCA of the features alone; strong
shrinkage is best in practice, because few training items have to determine the F²/2 numbers of
S_within. The paper has no such step: it trains a whole network. On fixed features, Proxy-NCA starts
from this head, and the head is kept as it is where training does not improve it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 1e-5
"""What is added to the diagonal where S has no inverse without (few items, no shrinkage): this, or
ten times as much until it has one."""
BLOCK = 8192
"""Rows whose products are summed in single precision before they are added in double."""


@dataclass(frozen=True)
class ClassScatter:
    """Statistics of a set of classes for the closed form; disjoint sets can be joined."""

    within: Tensor
    """(F, F) sum over items of (x − μ_class)(x − μ_class)ᵀ, double."""
    means: Tensor
    """(C, F) class means, double."""
    sizes: Tensor
    """(C,) items of each class."""

    @property
    def mean(self) -> Tensor:
        """Mean (F,) over all items."""
        weights = self.sizes / self.sizes.sum()
        return weights.to(self.means) @ self.means

    def shrunk_within(self, shrinkage: float) -> Tensor:
        """Return S as above, (F, F), up to a factor; the identity where no class varies."""
        width = len(self.within)
        spread = self.within.trace() / width
        if not spread > 0:  # every class has one item, or equal ones
            return torch.eye(width, dtype=self.within.dtype)
        s = self.within * ((1 - shrinkage) / spread)
        s.diagonal().add_(shrinkage)
        return s

    def total(self) -> Tensor:
        """Return the scatter (F, F) of all items around their mean: within plus between classes."""
        between = (self.means - self.mean) * self.sizes.to(self.means).sqrt()[:, None]
        return torch.addmm(self.within, between.T, between)


def signed_root(x: Tensor) -> Tensor:
    """Return sign(x)·√|x|, so that a few large features don't dominate (Perronnin et al. 2010).

    1e-6 is added under the root to keep the gradient finite at 0: for features far above that.
    """
    return x.sign() * (x.abs() + 1e-6).sqrt()


def class_scatter(features: Tensor, labels: Tensor) -> ClassScatter:
    """Return the scatter of features (N, F) within and between the classes of `labels` (N,)."""
    classes, group, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(classes), features.shape[1], dtype=torch.float64)
    sums.index_add_(0, group, features.double())
    means = sums / sizes[:, None]
    within = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    blocks = zip(torch.split(features, BLOCK), torch.split(group, BLOCK), strict=True)
    for rows, row_classes in blocks:
        # Single precision is enough for deviations: only subtracting the mean cancels digits.
        deviations = (rows - means[row_classes]).float()
        within += deviations.T @ deviations
    return ClassScatter(within, means, sizes)


def joined_scatter(parts: Sequence[ClassScatter]) -> ClassScatter:
    """Return the scatter of all classes of several sets that have no class in common."""
    within = torch.stack([part.within for part in parts]).sum(0)
    return ClassScatter(
        within, torch.cat([part.means for part in parts]), torch.cat([p.sizes for p in parts])
    )


@dataclass(frozen=True)
class Affine:
    """The map x ↦ weight·x + bias that a linear head computes."""

    weight: Tensor
    """(D, F)"""
    bias: Tensor
    """(D,)"""

    def __call__(self, features: Tensor) -> Tensor:
        """Map (N, F) to (N, D)."""
        return torch.addmm(self.bias, features, self.weight.T)

    def times(self, factor: float) -> "Affine":
        """Return the map with its output multiplied by a factor."""
        return Affine(self.weight * factor, self.bias * factor)


def whitened_head(
    scatter: ClassScatter, *, shrinkage: float, dim: int | None = None, center: bool = True
) -> Affine:
    """Return the closed form in `dim` dimensions (None: all F), in single precision.

    center: subtract the mean of the training items first, so that directions on the unit sphere
    are those of deviations from it.
    """
    unmix = _inverse_root(scatter.shrunk_within(shrinkage))  # (F, F), unmix·S·unmixᵀ = I
    components = _leading(unmix @ scatter.total() @ unmix.T, dim or len(unmix))
    weight = components @ unmix
    bias = -(weight @ scatter.mean) if center else torch.zeros(len(weight), dtype=weight.dtype)
    return Affine(weight.float(), bias.float())


def whitened(
    scatter: ClassScatter, features: Tensor, *, shrinkage: float, dim: int | None = None
) -> Tensor:
    """Return features (N, F) as `whitened_head` maps them without centring, up to a rotation.

    For comparing shrinkages: a triangular factor gives the same distances as a root, and in fewer
    dimensions an approximate subspace is close to the eigenvectors, at a fraction of the cost.
    dim: None for all F.
    """
    factor = _triangle(scatter.shrunk_within(shrinkage)).to(features.dtype)
    result: Tensor = torch.linalg.solve_triangular(factor.T, features, upper=True, left=False)
    if dim is None or dim >= len(factor):
        return result
    return result @ _leading_subspace(scatter.total().to(features.dtype), factor, dim)


def pca_head(features: Tensor, dim: int, *, center: bool = True) -> Affine:
    """Return the PCA of the features; `center=False` leaves their mean where it is."""
    mean, components = principal_components(features, dim)
    return Affine(components, -components @ mean if center else torch.zeros_like(mean[:dim]))


def untrained_head(features: Tensor, dim: int) -> Affine:
    """Return the features as they are, or in fewer dimensions their PCA."""
    width = features.shape[1]
    if dim == width:
        eye = torch.eye(width, dtype=features.dtype)
        return Affine(eye, torch.zeros_like(eye[0]))
    return pca_head(features, dim)


def principal_components(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean (F,) and the `count` orthonormal directions of largest variance (count, F).

    Beyond the rank of the features, the directions are arbitrary ones that complete the basis.
    """
    n, width = features.shape
    if count > width:
        raise ValueError(f"features of width {width} have no {count} components; lower dim")
    x = features.double()
    mean = x.mean(0)
    x = x - mean
    if count <= n < width:  # a width × width problem would take a second for a handful of items
        components = _signed(torch.linalg.svd(x, full_matrices=False).Vh[:count])
    else:
        components = _leading(x.T @ x, count)
    return mean.to(features.dtype), components.to(features.dtype)


def _inverse_root(s: Tensor) -> Tensor:
    """Return a lower triangular matrix R with R·S·Rᵀ = I."""
    factor = _triangle(s)
    eye = torch.eye(len(s), dtype=s.dtype)
    result: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
    return result


def _triangle(s: Tensor) -> Tensor:
    """Return the lower triangular L with L·Lᵀ = S, of a mean diagonal of 1; or nearly S."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(s)
    ridge = LEAST
    while failed:
        factor, failed = torch.linalg.cholesky_ex(s + ridge * torch.eye(len(s), dtype=s.dtype))
        ridge *= 10
    return factor


def _leading_subspace(total: Tensor, factor: Tensor, dim: int, *, rounds: int = 4) -> Tensor:
    """Approximate the leading eigenvectors of L⁻¹·T·L⁻ᵀ, (F, dim), by power iteration.

    With some more directions than needed, a few rounds suffice (Halko, Martinsson & Tropp 2011).
    """
    width = len(factor)
    spare = min(width, dim + max(8, dim // 4))  # more directions than needed converge sooner
    basis = torch.eye(width, spare, dtype=total.dtype)
    for _ in range(rounds):  # multiply by L⁻¹·T·L⁻ᵀ, then make the columns orthonormal again
        x = total @ torch.linalg.solve_triangular(factor.T, basis, upper=True)
        x = torch.linalg.solve_triangular(factor, x, upper=False)
        basis = torch.linalg.qr(x).Q
    x = total @ torch.linalg.solve_triangular(factor.T, basis, upper=True)
    # Within the subspace the problem is small enough for exact eigenvectors (Rayleigh-Ritz).
    small = basis.T @ torch.linalg.solve_triangular(factor, x, upper=False)
    return basis @ _leading((small + small.T) / 2, dim).T


def _leading(scatter: Tensor, count: int) -> Tensor:
    """Return the `count` eigenvectors of largest eigenvalue, as rows."""
    _, vectors = torch.linalg.eigh(scatter)  # by ascending eigenvalue
    return _signed(vectors.T.flip(0)[:count])


def _signed(components: Tensor) -> Tensor:
    """Flip rows so that their largest entry is positive, as scikit-learn does."""
    # An eigenvector's sign is arbitrary: fix it, so that other libraries give the same head.
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    return components * largest.sign()
