"""Every loss again as a loop over numbers in double, to be read beside its formula.

Nothing here uses the library but the deal of labels to proxies, which is data.
"""

import math
from collections.abc import Callable, Sequence

from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor

Vectors = list[list[float]]
Triplet = tuple[int, int, list[int]]
"""Anchor, row of p(y), rows of p(Z)."""
OfTriplet = Callable[[list[float], int, list[int]], float]


def rows(x: Tensor) -> Vectors:
    return x.detach().double().tolist()


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(i * j for i, j in zip(a, b, strict=True))


def unit(a: Sequence[float]) -> list[float]:
    length = math.hypot(*a)
    return [i / length for i in a]


def squared(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum((i - j) ** 2 for i, j in zip(a, b, strict=True))


def log_sum_exp(values: Sequence[float]) -> float:
    top = max(values)
    return top + math.log(math.fsum(math.exp(v - top) for v in values))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# Over proxies: triplets of an assignment, then a formula.


def closest(x: list[float], p: Vectors, among: Sequence[int]) -> int:
    return min(among, key=lambda j: squared(x, p[j]))


def by_label(labels: list[int], row_of: Sequence[int], num_proxies: int) -> list[Triplet]:
    """Static and fractional: the label's row, and all others."""
    return [
        (i, row_of[c], [j for j in range(num_proxies) if j != row_of[c]])
        for i, c in enumerate(labels)
    ]


def of_several(x: Vectors, labels: list[int], p: Vectors, owner: list[int]) -> list[Triplet]:
    """The closest of the label's own rows, and the rows of other labels."""
    every = range(len(p))
    return [
        (
            i,
            closest(x[i], p, [j for j in every if owner[j] == c]),
            [j for j in every if owner[j] != c],
        )
        for i, c in enumerate(labels)
    ]


def of_dynamic(x: Vectors, labels: list[int], p: Vectors) -> list[Triplet]:
    """Every pair (x, y) with the closest proxies of y and of x's negatives."""
    row = [closest(point, p, range(len(p))) for point in x]
    found = []
    for i, a in enumerate(labels):
        for j, b in enumerate(labels):
            z = {row[k] for k, c in enumerate(labels) if c != a} - {row[j]}
            if a == b and i != j and z:
                found.append((i, row[j], sorted(z)))
    return found


def over_triplets(
    x: Vectors, p: Vectors, triplets: list[Triplet], scale: float | None, of: OfTriplet
) -> float:
    """The mean of a formula of logits over triplets; x and p are already placed."""
    losses = []
    for i, y, z in triplets:
        logits = [-squared(x[i], q) if scale is None else scale * dot(x[i], q) for q in p]
        losses.append(of(logits, y, z))
    return mean(losses)


def nca_of(logits: list[float], y: int, z: list[int]) -> float:
    return log_sum_exp([logits[j] for j in z]) - logits[y]


def softmax_of(logits: list[float], y: int, z: list[int]) -> float:
    return log_sum_exp([logits[j] for j in {y, *z}]) - logits[y]


def smoothed_of(logits: list[float], y: int, z: list[int], share: float = 0.1) -> float:
    """Cross entropy with the target 1 − share at y, and the share spread over y and Z."""
    every = sorted({y, *z})
    total = log_sum_exp([logits[j] for j in every])
    target = {j: share / len(every) + (1 - share) * (j == y) for j in every}
    return math.fsum(target[j] * (total - logits[j]) for j in every)


def margin_of(logits: list[float], y: int, z: list[int], margin: float = 0.1) -> float:
    return mean([max(0.0, logits[j] + margin - logits[y]) for j in z])


def proxy_anchor(
    x: Vectors, p: Vectors, triplets: list[Triplet], scale: float, margin: float
) -> float:
    pull, push = [], []
    for j, q in enumerate(p):
        own = [dot(x[i], q) for i, y, _ in triplets if y == j]
        others = [dot(x[i], q) for i, _, z in triplets if j in z]
        if own:
            pull.append(log_sum_exp([0.0, *(-scale * (s - margin) for s in own)]))
        push.append(log_sum_exp([0.0, *(scale * (s + margin) for s in others)]))
    return mean(pull) + mean(push)


def soft_triple(
    x: Vectors, labels: list[int], p: Vectors, k: int, tau: float, gamma: float = 0.1
) -> float:
    """λ 20, δ 0.01; class c has rows c·k to c·k + k − 1."""
    losses = []
    for point, label in zip(x, labels, strict=True):
        logits = []
        for c in range(len(p) // k):
            s = [dot(point, q) for q in p[c * k : (c + 1) * k]]
            total = log_sum_exp([v / gamma for v in s])
            relaxed = math.fsum(math.exp(v / gamma - total) * v for v in s)
            logits.append(20 * (relaxed - 0.01 * (c == label)))
        losses.append(log_sum_exp(logits) - logits[label])
    apart = [
        math.sqrt(squared(p[i], p[j]))
        for c in range(len(p) // k)
        for i in range(c * k, c * k + k)
        for j in range(i + 1, c * k + k)
    ]
    return mean(losses) + tau * mean(apart) / 2


# Over instances.


def pairs(labels: list[int]) -> list[Triplet]:
    """Every positive pair with the negatives of its anchor, where there are any."""
    found = []
    for i, a in enumerate(labels):
        z = [k for k, c in enumerate(labels) if c != a]
        found += [(i, j, z) for j, b in enumerate(labels) if a == b and i != j and z]
    return found


def nca(x: Vectors, labels: list[int], scale: float) -> float:
    return mean(
        [
            log_sum_exp([scale * dot(x[i], x[k]) for k in z]) - scale * dot(x[i], x[j])
            for i, j, z in pairs(labels)
        ]
    )


def triplet(x: Vectors, labels: list[int], margin: float) -> float:
    return mean(
        [
            max(0.0, squared(x[i], x[j]) + margin - squared(x[i], x[k]))
            for i, j, z in pairs(labels)
            for k in z
        ]
    )


def semi_hard(x: Vectors, labels: list[int], margin: float) -> float:
    losses = []
    for i, j, z in pairs(labels):
        own, others = squared(x[i], x[j]), [squared(x[i], x[k]) for k in z]
        farther = [d for d in others if d > own]
        losses.append(max(0.0, own + margin - (min(farther) if farther else max(others))))
    return mean(losses)


def lifted(x: Vectors, labels: list[int], margin: float) -> float:
    def apart(i: int, j: int) -> float:
        return math.sqrt(squared(x[i], x[j]))

    losses = []
    for i, j, z in pairs(labels):
        push = log_sum_exp([margin - apart(a, k) for a in (i, j) for k in z])
        losses.append(max(0.0, push + apart(i, j)) ** 2 / 2)
    return mean(losses)


def n_pairs(x: Vectors, labels: list[int], l2: float) -> float:
    """tf.contrib's npairs_loss: softmax, and a quarter of l2 times both mean squared norms."""
    items = [[i for i, b in enumerate(labels) if b == c] for c in sorted(set(labels))]
    a, y = zip(*((own[0], own[1]) for own in items if len(own) > 1), strict=True)
    losses = [
        log_sum_exp([dot(x[i], x[k]) for k in y]) - dot(x[i], x[j])
        for i, j in zip(a, y, strict=True)
    ]
    norms = [mean([dot(x[i], x[i]) for i in group]) for group in (a, y)]
    return mean(losses) + 0.25 * l2 * sum(norms)


def ranking(x: Vectors, labels: list[int]) -> float:
    return mean([squared(x[i], x[j]) > squared(x[i], x[k]) for i, j, z in pairs(labels) for k in z])


def clustering(x: Vectors, labels: list[int], gamma: float) -> float:
    """tf.contrib's cluster_loss: greedy medoids, then five passes of its local search."""
    n, k = len(x), len(set(labels))
    d = [[math.sqrt(squared(a, b)) for b in x] for a in x]

    def assign(medoids: list[int]) -> list[int]:
        own = {m: c for c, m in enumerate(medoids)}
        nearest = [min(range(len(medoids)), key=lambda c: d[i][medoids[c]]) for i in range(n)]
        return [own.get(i, nearest[i]) for i in range(n)]

    def unlike(medoids: list[int]) -> float:
        return 1 - normalized_mutual_info_score(labels, assign(medoids))

    def cost(medoids: list[int]) -> float:
        return math.fsum(min(d[i][m] for m in medoids) for i in range(n))

    def swapped(medoids: list[int], c: int, m: int) -> list[int]:
        return [*medoids[:c], m, *medoids[c + 1 :]]

    chosen: list[int] = []
    for _ in range(k):
        others = [i for i in range(n) if i not in chosen]
        chosen.append(max(others, key=lambda i: gamma * unlike([*chosen, i]) - cost([*chosen, i])))
    for _ in range(5):
        assigned = assign(chosen)
        for c in range(k):
            members = [i for i in range(n) if assigned[i] == c]
            scores = [
                gamma * unlike(swapped(chosen, c, m)) - math.fsum(d[i][m] for i in members)
                for m in members
            ]
            chosen = swapped(chosen, c, members[scores.index(max(scores))])
    classes = [[i for i in range(n) if labels[i] == c] for c in set(labels)]
    truth = math.fsum(min(math.fsum(d[i][m] for i in own) for m in own) for own in classes)
    return max(0.0, gamma * unlike(chosen) - cost(chosen) + truth)
