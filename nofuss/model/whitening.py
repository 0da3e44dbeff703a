"""The head in closed form: a metric on given features, without training.

    x   features, or their signed roots where hardly any of them is negative
    z = (x − mean)·B            B: the features' principal directions, k = 512 of them
    M   with Mᵀ·S·M = I         S = (1 − a)·W + a·(tr W / k)·I, whitening within classes
    M ← M·chol(I + e·P)         P = (T + t·I)⁻¹·B_c·(T + t·I)⁻¹ in the space of M, t = tr T / k
    head: the leading principal directions of z·M

W, B_c and T = W + B_c are the scatter within classes, between them and of all items. Directions in
which items of one class vary hardly separate new classes, so they are divided by (W); a shrinkage a
says how far W can be trusted, since few items have to determine its k²/2 numbers. The weights of
one-against-all ridge regressions, one a class, are the paper's proxies in closed form: P is what
they would add as further coordinates, and an emphasis e stretches the space along their span
instead, in the same k numbers. P is scaled to tr P = (C − 1)·C / 100, since it tells more the more
classes it is made of. Everything behind the first step is k × k (docs/lab: what else was tried).
Whitening within classes for retrieval is also in Koo-Fu CLIP (arXiv 2602.01127).

The paper has no such step: it trains a whole network. On fixed features training starts from here.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nofuss.distributed.threads import one_core, they_sleep

DIRECTIONS = 512
"""k, unless more dimensions are asked for."""
EXACT = 1536
"""Features up to which B is exact; of wider ones it is that of about as many items."""
NEGATIVE = 0.1
"""Fraction of the features' absolute sum up to which their roots are taken."""


@dataclass(frozen=True)
class Recipe:
    """How features become an embedding in closed form."""

    root: bool = True
    """Take the features' signed roots first."""
    shrinkage: float = 0.6
    """a: 0 trusts the scatter within classes, 1 treats all directions alike."""
    emphasis: float = 0.0
    """e: how far the span of the ridge proxies is stretched."""


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

    def then(self, other: "Affine") -> "Affine":
        """Return this map followed by another, as one."""
        return Affine(other.weight @ self.weight, other(self.bias[None])[0])


@dataclass(frozen=True)
class ClassSums:
    """What the closed form needs of items z (N, k) and their classes; disjoint sets add up."""

    within: Tensor
    """(k, k) sum over items of (z − μ)(z − μ)ᵀ, μ the mean of its class: W."""
    means: Tensor
    """(C, k) class means."""
    sizes: Tensor
    """(C,) items of each class, in the type of the means."""

    @classmethod
    def of(cls, z: Tensor, labels: Tensor) -> "ClassSums":
        """Sum up the items z (N, k) with labels (N,)."""
        _, group, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        sizes = counts.to(z)
        means = z.new_zeros(len(sizes), z.shape[1]).index_add_(0, group, z) / sizes[:, None]
        deviations = z - means[group]
        return cls(deviations.T @ deviations, means, sizes)

    def __add__(self, other: "ClassSums") -> "ClassSums":
        means, sizes = ((self.means, other.means), (self.sizes, other.sizes))
        return ClassSums(self.within + other.within, torch.cat(means), torch.cat(sizes))

    def double(self) -> "ClassSums":
        """Return the same in double precision."""
        return ClassSums(self.within.double(), self.means.double(), self.sizes.double())

    @property
    def mean(self) -> Tensor:
        """Mean (k,) over all items."""
        return self.sizes @ self.means / self.sizes.sum()

    @cached_property
    def total(self) -> Tensor:
        """Scatter (k, k) of all items, T = W + B_c."""
        deviations = self.deviations()
        return self.within + deviations.T @ deviations

    def deviations(self) -> Tensor:
        """Return the class means (C, k) around that of all items, times the roots of their sizes.

        Their product with themselves is the scatter between classes, B_c.
        """
        return (self.means - self.mean) * self.sizes.sqrt()[:, None]


@dataclass(frozen=True)
class Projection:
    """The first step: features to z = (x − mean)·basis, of length 1 on average."""

    root: bool
    mean: Tensor
    """(F,)"""
    basis: Tensor
    """(F, k) orthogonal columns of equal length."""

    def __call__(self, features: Tensor) -> Tensor:
        """Map features (N, F) to z (N, k)."""
        x = signed_root(features) if self.root else features
        return torch.addmm(-(self.mean @ self.basis), x, self.basis)

    def then(self, matrix: Tensor, mean: Tensor) -> Affine:
        """Return the head (z − mean)·matrix as a map of the features, or of their roots.

        matrix: (k, D). Its columns' signs, which are arbitrary, are those that make the largest
        weight positive, so that other libraries give the same head.
        """
        weight = matrix.T @ self.basis.to(matrix).T  # (D, F)
        largest = weight.gather(1, weight.abs().argmax(1, keepdim=True))
        signs = torch.where(largest < 0, -1.0, 1.0).to(weight)
        weight, shift = weight * signs, (matrix.T @ mean.to(matrix)) * signs[:, 0]
        bias = -(weight @ self.mean.to(matrix)) - shift
        return Affine(weight.float(), bias.float())


def signed_root(x: Tensor) -> Tensor:
    """Return sign(x)·√|x|, so that a few large features don't dominate (Perronnin et al. 2010).

    1e-6 is added under the root to keep the gradient finite at 0: for features far above that.
    """
    return x.sign() * (x.abs() + 1e-6).sqrt()


def takes_roots(features: Tensor) -> bool:
    """Return whether hardly any of the features is negative, as after a ReLU: roots help then."""
    size = features.abs().sum(dtype=torch.float64)
    return bool((size - features.sum(dtype=torch.float64)) / 2 <= NEGATIVE * size)


def project(
    features: Tensor, sample: Tensor, count: int = DIRECTIONS, *, root: bool | None = None
) -> Projection:
    """Find the `count` principal directions of the features (N, F), or of their roots.

    root: whether roots are taken; None goes by the features.
    sample: rows that the directions of features wider than EXACT are computed from, equally many of
        each class: no larger problem is solved, and a class that is added moves little.
    With fewer items than directions any others complete the basis: new items vary along them too.
    """
    root = takes_roots(features) if root is None else root
    x = signed_root(features) if root else features
    mean, width = x.mean(0), x.shape[1]
    rest = (x if width <= EXACT else x[sample]) - mean
    length = float(rest.norm(dim=1).mean())
    if length <= 1e-6 * float(mean.norm()):  # all items are equal, but for rounding
        length = float(mean.norm()) or 1.0
    rest = rest / length
    if width <= count:
        basis = torch.eye(width, dtype=x.dtype)
    elif len(rest) >= width:
        basis = eigh(rest.T @ rest)[1][:, -count:].flip(1)
    else:
        values, vectors = eigh(rest @ rest.T)
        found = min(count, int((values > values[-1] * 1e-6).sum()))
        known = torch.nn.functional.normalize(
            rest.T @ vectors[:, len(values) - found :].flip(1), dim=0
        )
        fixed = torch.Generator().manual_seed(0)
        others = torch.randn(width, count - found, generator=fixed, dtype=x.dtype)
        basis = torch.linalg.qr(torch.cat([known, others], 1)).Q
    return Projection(root, mean, basis / length)


def whitening(sums: ClassSums, shrinkage: float) -> Tensor:
    """Return M (k, k) with Mᵀ·S·M = I up to a factor; the identity where no class varies."""
    eye = torch.eye(len(sums.within)).to(sums.within)
    spread = sums.within.trace() / len(eye)
    if not spread > 0:  # every class has one item, or equal ones
        return eye
    s = (1 - shrinkage) / spread * sums.within + shrinkage * eye
    found: Tensor = torch.linalg.solve_triangular(_cholesky(s).T, eye, upper=True)
    return found


def emphasised(sums: ClassSums, m: Tensor, emphasis: float) -> Tensor:
    """Return M·chol(I + e·P); M itself where there is nothing to emphasise."""
    classes, eye = len(sums.sizes), torch.eye(len(m)).to(m)
    if not emphasis or classes < 2:
        return m
    means, total = sums.deviations() @ m, m.T @ sums.total @ m  # (C, k), (k, k)
    ridge = total.trace() / len(m)
    if not means.square().sum() > 1e-9 * ridge:
        return m
    proxies = torch.cholesky_solve(means.T, _cholesky(total + ridge * eye))  # (k, C): ridge weights
    p = proxies @ proxies.T
    p *= classes / 100 * (classes - 1) / p.trace()
    return m @ _cholesky(eye + emphasis * p)


def _cholesky(s: Tensor) -> Tensor:
    """Return the lower triangular L with L·Lᵀ = S, or nearly S where rounding has spoilt it."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(s)
    ridge = 1e-5 * float(s.diagonal().mean())
    while failed:
        factor, failed = torch.linalg.cholesky_ex(s + ridge * torch.eye(len(s)).to(s))
        ridge *= 10
    return factor


def closed_form(sums: ClassSums, recipe: Recipe, dim: int | None = None) -> Tensor:
    """Return the matrix (k, dim) of a recipe, leading directions first; None: (k, k), any turn."""
    m = emphasised(sums, whitening(sums, recipe.shrinkage), recipe.emphasis)
    if dim is None:
        return m
    total = m.T @ sums.total @ m
    return m @ eigh((total + total.T) / 2)[1][:, -dim:].flip(1)


def eigh(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, rising, and eigenvectors of a symmetric matrix.

    It consists of thousands of small steps. On threads that sleep between them, 512 rows take 47
    ms, and 14 on one core.
    """
    with one_core() if they_sleep() and len(s) <= EXACT else nullcontext():
        values, vectors = torch.linalg.eigh(s)
        return values, vectors


def pca(features: Tensor, dim: int, *, center: bool = True) -> Affine:
    """Return the PCA of the features; `center=False` leaves their mean where it is.

    Beyond the rank of the features, the directions are arbitrary ones that complete the basis.
    """
    n, width = features.shape
    if dim > width:
        raise ValueError(f"features of width {width} have no {dim} components; lower dim")
    x = features.double()
    mean = x.mean(0)
    x = x - mean
    if dim <= n < width:  # a width × width problem would take a second for a handful of items
        found = torch.linalg.svd(x, full_matrices=False).Vh[:dim]
    else:
        found = eigh(x.T @ x)[1].T.flip(0)[:dim]
    largest = found.gather(1, found.abs().argmax(1, keepdim=True))
    components = (found * largest.sign()).to(features.dtype)  # an eigenvector's sign is arbitrary
    bias = -components @ mean.to(features.dtype) if center else features.new_zeros(dim)
    return Affine(components, bias)


def untrained_head(features: Tensor, dim: int) -> Affine:
    """Return the features as they are, or in fewer dimensions their PCA."""
    if dim == features.shape[1]:
        eye = torch.eye(dim, dtype=features.dtype)
        return Affine(eye, torch.zeros_like(eye[0]))
    return pca(features, dim)
