"""How tightly proxies bound the loss over instances: ε, the ranking bound, Propositions 4.1, 4.2.

All on the unit sphere, where the paper states them, with ε over the assignment in use (static
assignment is not the argmin of Eq. 5). d = |x − y|² as in Section 3.1 and in the losses here, but
for the ranking bound. Two printed constants are false for it; they are corrected by default,
`printed=True` gives the printed ones:

                 d           printed   corrected   why
    ranking      |x − y|     2ε        2ε          triangle inequality: not for squares
    Prop. 4.1    |x − y|²    2√(2ε)    4√ε         −d = 2 x·y − 2: both products move by up to 2√ε
    Prop. 4.2    |x − y|²    2√ε       4√ε         the proof doubles two bounds of √ε

√ε is max |x̂ − p̂(x)|, so ε = max |x̂ − p̂(x)|² as in Eq. 6. The appendix proves 4.1 for ½|x − y|²:
there 2√ε holds, and 2√(2ε) if ε is measured in that half too. Both propositions need N_x·N_p ≥ 1,
the exponent 1/α of Hölder's inequality; at 1 they compare loss with loss directly. A violation is
counted beyond the rounding error.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nofuss.geometry import Array, as_tensor, normalize
from nofuss.proxies.counting import count_triplets

ROUNDING = 1e-7  # coinciding points are √(2 − 2 x·y) ≈ 2e-8 apart in double, not 0


@dataclass(frozen=True)
class Bound:
    """One inequality left ≤ right over many triplets; as wide as `largest`, it says nothing."""

    left: float
    """Mean of the left side."""
    right: float
    """Mean of the right side."""
    slack: float
    """Mean of right − left: how loose the bound is."""
    least_slack: float
    """Smallest right − left; below zero where the inequality fails."""
    violations: float
    """Share of triplets with left > right."""
    triplets: int
    """How many triplets (x, y, z), or (x, y, Z) for Proposition 4.1, were evaluated."""
    largest: float
    """What the left side can't exceed, wherever points and proxies lie."""

    @property
    def says_nothing(self) -> bool:
        """Whether the right side is no less than what holds without any proxy."""
        return self.right >= self.largest - ROUNDING


@dataclass(frozen=True)
class Bounds:
    """ε = |x̂ − p̂(x)|² and the paper's five inequalities."""

    epsilon_mean: float
    epsilon_95: float
    epsilon: float
    """The maximum over the points, Eq. 6."""
    ranking: Bound
    """|{d(x,y) − d(x,z)} − {d(x,p(y)) − d(x,p(z))}| ≤ 2 max d(x,p(x)), d = |x − y|."""
    expected_ranking: Bound
    """E[H over instances] ≤ E[H over proxies] + Pr[|d(x,p(y)) − d(x,p(z))| ≤ 2 max d]."""
    nca: Bound
    """Proposition 4.1: NCA on the unit sphere by α·Proxy-NCA, summed over z ∈ Z, the sampled
    negatives of x: a proxy counts as often as it stands for one of them."""
    triplet: Bound
    """Proposition 4.2."""
    total: Bound
    """Eq. 7 with it: L(D), the mean over all triplets, by counts n(x, p_y, p_z). Its right side is
    exact; its left is the mean over the triplets evaluated. One inequality: `violations` 0 or 1."""


def proxy_bounds(
    embeddings: Array,
    labels: Array,
    proxies: Array,
    assignment: Array,
    *,
    norm_x: float = 3.0,
    norm_p: float = 3.0,
    margin: float = 0.1,
    printed: bool = False,
    max_triplets: int = 1_000_000,
    seed: int = 0,
) -> Bounds:
    """Return ε and both sides of each bound; assignment (N,) is the row of p(x) for each point.

    Points and proxies are put on spheres of radius norm_x and norm_p (scale = 2·norm_x·norm_p
    of the losses). All triplets are used if they (padded to the same number of negatives a pair)
    are at most `max_triplets`; otherwise a sample drawn from `seed`, each triplet equally likely.
    """
    if not 1 <= norm_x * norm_p < math.inf:
        raise ValueError(
            f"norm_x × norm_p is {norm_x * norm_p:g}; expected 1 or more, as in Propositions 4.1 "
            "and 4.2: raise the norms"
        )
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin is {margin}; expected from 0 up")
    alpha = 1 / (norm_x * norm_p)
    x, p, c, own = (as_tensor(given).cpu() for given in (embeddings, proxies, labels, assignment))
    _check(x, p, c, own)
    x, p = normalize(x.double()), normalize(p.double())
    px = p[own]  # (N, D): each point's proxy
    epsilon = (x - px).square().sum(1)
    root = epsilon.max().sqrt()  # √ε = max |x̂ − p̂(x)|

    anchor, y, z = _triplets(c, max_triplets, seed)  # (A,), (A,), (A, K) padded with −1
    counted = z >= 0
    s_y, s_z = (x[anchor] * x[y]).sum(1), _dots(x[anchor], x, z)
    t_y, t_z = (x[anchor] * px[y]).sum(1), _dots(x[anchor], px, z)

    # |a − b|² = 2 − 2 a·b on the sphere.
    d_y, d_z, e_y, e_z = ((2 - 2 * s).clamp_min(0) for s in (s_y, s_z, t_y, t_z))
    # The ranking bound is about distances: the triangle inequality does not hold for squares.
    gap = (d_y.sqrt()[:, None] - d_z.sqrt())[counted]
    gap_p = (e_y.sqrt()[:, None] - e_z.sqrt())[counted]
    # H over instances may differ from H over proxies only where the latter's gap is within 2√ε.
    unsure = gap_p.abs() <= 2 * root + ROUNDING
    expected = (gap > 0).double(), (gap_p > 0).double() + unsure

    # −d and scale·cos differ by a constant, which cancels between numerator and denominator.
    weigh = torch.where(counted, 0.0, -math.inf)  # exp(−∞) = 0: padding does not count
    size = counted.sum(1).double().log()  # log |Z|
    scaled = 1 / alpha
    nca_left = (2 * s_z + weigh).logsumexp(1) - 2 * s_y
    nca_proxy = (2 * scaled * t_z + weigh).logsumexp(1) - 2 * scaled * t_y
    loose_41 = 2 * math.sqrt(2) * root if printed else 4 * root
    loose_42 = 2 * root if printed else 4 * root
    # A difference of distances over proxies of norms N_x, N_p is N_x·N_p = 1/α times the unit one:
    # the norms themselves cancel.
    triplet_left = (d_y[:, None] - d_z + margin).clamp_min(0)[counted]
    triplet_proxy = (scaled * (e_y[:, None] - e_z) + margin).clamp_min(0)[counted]
    delta = (1 - alpha) * margin + loose_42
    count = count_triplets(c)
    total_proxy = total_over_proxies(x, c, p, own, scaled=scaled, margin=margin) / count
    largest = 4 + margin  # of a hinge: y opposite x, z at x

    return Bounds(
        epsilon_mean=float(epsilon.mean()),
        epsilon_95=float(epsilon.quantile(0.95)),
        epsilon=float(epsilon.max()),
        ranking=_bound((gap - gap_p).abs(), (2 * root).expand_as(gap), 4),
        expected_ranking=_bound(expected[0].mean()[None], expected[1].mean()[None], 1, len(gap)),
        nca=_bound(
            nca_left, alpha * nca_proxy + (1 - alpha) * size + loose_41, 4 + float(size.mean())
        ),
        triplet=_bound(triplet_left, alpha * triplet_proxy + delta, largest),
        total=_bound(
            triplet_left.mean()[None], (alpha * total_proxy + delta)[None], largest, count
        ),
    )


def total_over_proxies(
    x: Tensor, labels: Tensor, p: Tensor, own: Tensor, *, scaled: float, margin: float
) -> Tensor:
    """Return the sum of Eq. 7: Eq. 3 over all (x, p_y, p_z), each times n(x, p_y, p_z).

    x (N, D) and p (P, D) are unit vectors, own (N,) the rows of p(x). The negatives of x do not
    depend on y, so n(x, p_y, p_z) = n(x, p_y) · n(x, p_z).
    """
    everywhere = torch.bincount(own, minlength=len(p))  # (P,)
    total = x.new_zeros(())
    for label in torch.unique(labels):
        rows = (labels == label).nonzero()[:, 0]
        inside = torch.bincount(own[rows], minlength=len(p))
        outside = (everywhere - inside).to(x.dtype)  # n(x, p_z), the same for the whole class
        e = -2 * scaled * (x[rows] @ p.T)  # (m, P): |x − p|² up to a constant, which cancels
        for p_y in inside.nonzero()[:, 0]:
            n_y = inside[p_y] - (own[rows] == p_y).long()  # (m,): x is no positive of itself
            total += n_y.to(x.dtype) @ (e[:, p_y, None] - e + margin).clamp_min(0) @ outside
    return total


def _check(x: Tensor, p: Tensor, labels: Tensor, assignment: Tensor) -> None:
    """Refuse input for which a bound would mean nothing: NaN violates none."""
    if not len(x) == len(labels) == len(assignment):
        raise ValueError(
            f"got {len(x)} embeddings, {len(labels)} labels, {len(assignment)} assignments; "
            "expected as many of each"
        )
    for name, values in (("embeddings", x), ("proxies", p)):
        if not values.isfinite().all():
            raise ValueError(f"{name} hold NaN or infinity; bounds are about finite vectors")
    if len(x) and not (assignment.min() >= 0 and assignment.max() < len(p)):
        raise ValueError(
            f"assignment spans {int(assignment.min())} … {int(assignment.max())} but there are "
            f"{len(p)} proxies; expected rows of them"
        )


def _bound(left: Tensor, right: Tensor, largest: float, triplets: int | None = None) -> Bound:
    slack = right - left
    return Bound(
        left=float(left.mean()),
        right=float(right.mean()),
        slack=float(slack.mean()),
        least_slack=float(slack.min()),
        violations=float((slack < -ROUNDING).double().mean()),
        triplets=len(left) if triplets is None else triplets,
        largest=largest,
    )


def _dots(x: Tensor, points: Tensor, rows: Tensor) -> Tensor:
    """Return xₐ · points[rows[a, k]], (A, K); gathers the points of a few anchors at a time."""
    rows = rows.clamp_min(0)  # padding: any row, as it is masked later
    parts = (slice(i, i + 64) for i in range(0, len(x), 64))
    return torch.cat([torch.einsum("ad,akd->ak", x[s], points[rows[s]]) for s in parts])


def _triplets(labels: Tensor, most: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs (x, y) of a class, (A,) each, and their negatives Z (A, K), padded with −1."""
    n = len(labels)
    _, label, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    triplets = int((sizes * (sizes - 1) * (n - sizes)).sum())
    if triplets == 0:
        raise ValueError("no triplet: expected two classes or more, one of them with two items")
    width = n - int(sizes[sizes > 1].min())  # the most negatives that any pair has
    if int((sizes * (sizes - 1)).sum()) * width <= most:
        rows = (sizes > 1)[label].nonzero()  # (R, 1): the points that have a positive
        same = label[rows] == label  # (R, N)
        row, y = (same & (rows != torch.arange(n))).nonzero(as_tuple=True)
        anchor = rows[row, 0]
        # A stable sort of False before True puts negatives first, in order; the rest is padding.
        order = same.to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        z = torch.where(same.gather(1, order), -1, order)[row]
        useful = (z >= 0).any(1)
        return anchor[useful], y[useful], z[useful]
    generator = torch.Generator().manual_seed(seed)
    # Pairs with many negatives each: Proposition 4.1 is about a set Z. As many as every pair has.
    width = min(1000, n - int(sizes.max()))
    pairs = max(1, most // width)
    by_class = label.argsort(stable=True)
    start = sizes.cumsum(0) - sizes
    # An anchor is drawn in proportion to the number of its triplets, by their cumulative sum.
    ends = ((sizes - 1) * (n - sizes))[label].cumsum(0)
    anchor = torch.searchsorted(
        ends, torch.randint(triplets, (pairs,), generator=generator), right=True
    )
    size = sizes[label[anchor]]
    place = torch.empty_like(by_class).scatter_(0, by_class, torch.arange(n)) - start[label]
    step = 1 + (torch.rand(pairs, generator=generator) * (size - 1)).long().clamp_max(size - 2)
    # y: a step from 1 to size − 1 around the class reaches each of its points but x itself.
    y = by_class[start[label[anchor]] + (place[anchor] + step) % size]
    # z: in the order by class, x's class is one run; draw from the ring outside of it.
    outside = torch.rand(pairs, width, generator=generator) * (n - size)[:, None]
    z = (start[label[anchor]] + size)[:, None] + outside.long().clamp_max((n - size)[:, None] - 1)
    return anchor, y, by_class[z % n]
