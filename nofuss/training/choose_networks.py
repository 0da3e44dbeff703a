"""Which networks suit the classes: one of several, or some of them side by side, chosen by folds.

No network is the best for all pictures, and two side by side are mostly better than either, for the
time of both. Folds of the training classes score the closed form of the features of each network
alone, then those of the best beside each other one, and so on. What is kept is the cheapest that
is nearly as good as the best; and the cheapest of all, unless the others gain significantly (95%).

The closed form has the same recipe for all of them: what is compared is the networks.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.distributed.threads import map_in_threads
from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.protocol import QueryScores, pooled
from nofuss.model.backbones import (
    BESIDE,
    SEVERAL,
    Backbone,
    joined,
    side_by_side,
)
from nofuss.model.embedder import Embedder, build_embedder, for_inference
from nofuss.model.features import measured_speed, multiplications
from nofuss.model.whitening import DIRECTIONS, EXACT, Recipe, closed_form, project
from nofuss.progress import Progress, working
from nofuss.run.choice import Networks
from nofuss.training.finetune import Task
from nofuss.training.folds import Fold, Recipes, class_folds, query_scores, sample_rows

log = logging.getLogger("nofuss")
SCORED_ITEMS = 3000
"""Items of a fold that networks are compared on."""
WORTH = 0.0025
"""What more networks must gain on folds, of the mean of Recall@1 and MAP@R, to be worth their time.
To ask for a significant gain instead lost up to two points on new classes (docs/lab)."""
Chosen = tuple[int, ...]
"""Numbers of networks, ascending."""


def choose_networks(
    task: Task, embedder: Embedder, features: Sequence[Tensor], progress: Progress
) -> tuple[Embedder, Tensor | None, Networks | None]:
    """Return an embedder of the networks that are kept, their features (N, F), and the choice.

    features: (N, F) of each network; none where training starts at random. Where nothing is to be
    chosen, or there are no classes to choose by, all networks are kept.
    """
    parts, is_choice = embedder.backbone.parts, SEVERAL in task.settings.backbone
    folds = class_folds(task.labels) if is_choice and task.whole.is_labelled else []
    if is_choice and not folds:
        log.info("too few classes to choose networks by: all are kept, side by side")
        embedder.backbone.name = BESIDE.join(part.name for part in parts)
    if not folds:
        return embedder, joined(features) if features else None, None
    work = [multiplications(part) for part in parts]
    order = sorted(range(len(parts)), key=work.__getitem__)
    by_cost = [parts[i] for i in order]
    seen = [features[i][task.split.train] for i in order]

    def decide() -> str:
        with working(progress, "comparing networks on folds"):
            tried = try_networks(seen, task.labels, folds)
        best, ready = pick(tried, sorted(work)), for_inference(embedder).backbone.parts
        return json.dumps(asdict(_described(tried, best, [ready[i] for i in order])))

    # Rounding may differ between machines: of several processes the first decides.
    made = Networks(**json.loads(processes.from_first(decide)))
    log.info(made.describe())
    names = made.kept.split(BESIDE)
    kept = side_by_side([part for part in by_cost if part.name in names])
    chosen = build_embedder(
        kept, dim=embedder.dim, root=embedder.root, mirror=kept.mirror, seed=task.settings.seed
    ).to(device_of(embedder))
    return chosen, joined([features[i] for i in order if parts[i].name in names]), made


def try_networks(
    features: Sequence[Tensor], labels: Tensor, folds: Sequence[Fold]
) -> dict[Chosen, QueryScores]:
    """Score each network on the folds, the best beside each other one, and so on while it gains.

    features: (N, F) of each network.
    """
    tried: dict[Chosen, QueryScores] = {}
    best, missing = Chosen(), {*range(len(features))}
    while missing:
        larger = [tuple(sorted((*best, i))) for i in sorted(missing)]
        for chosen in larger:
            x = joined([features[i] for i in chosen])
            tried[chosen] = fold_scores(x, labels, folds)
        most = max(larger, key=lambda chosen: _mean(tried[chosen]))
        if best and _mean(tried[most]) <= _mean(tried[best]):
            break
        best, missing = most, missing - {*most}
    return tried


def pick(tried: Mapping[Chosen, QueryScores], work: Sequence[float]) -> Chosen:
    """Return the cheapest networks that score within WORTH of the best.

    Only the first, which is the cheapest of all, and those that gain significantly over it count.
    work: what a picture costs each network, the same on every machine.
    """
    first = tried[0,]
    good = {
        chosen: _mean(scores)
        for chosen, scores in tried.items()
        if scores is first
        or paired_difference(scores.objective, first.objective, first.labels).low > 0
    }
    enough = max(good.values()) - WORTH
    return min(
        (chosen for chosen, score in good.items() if score >= enough),
        key=lambda chosen: sum(work[i] for i in chosen),
    )


def _mean(scores: QueryScores) -> float:
    return float(scores.objective.mean())


def _described(
    tried: Mapping[Chosen, QueryScores], best: Chosen, networks: Sequence[Backbone]
) -> Networks:
    """Return what is kept, all scores, and what a picture costs on this machine, by name.

    networks: of a copy `for_inference`.
    """
    called = {chosen: BESIDE.join(networks[i].name for i in chosen) for chosen in tried}
    spent = [1000 * network.views / measured_speed(network) for network in networks]
    ours, first = tried[best], tried[0,]
    return Networks(
        kept=called[best],
        cheapest=networks[0].name,
        scores={
            called[chosen]: {
                "recall@1": float(scores.recall.mean()),
                "map@r": float(scores.map_at_r.mean()),
            }
            for chosen, scores in tried.items()
        },
        gains={
            "Recall@1": paired_difference(ours.recall, first.recall, first.labels),
            "MAP@R": paired_difference(ours.map_at_r, first.map_at_r, first.labels),
        },
        milliseconds={called[chosen]: sum(spent[i] for i in chosen) for chosen in tried},
    )


def fold_scores(x: Tensor, labels: Tensor, folds: Sequence[Fold]) -> QueryScores:
    """Return the scores of the closed form of features x (N, F) on classes that it has not seen."""
    projection = project(x, sample_rows(labels, torch.arange(len(x)), EXACT), DIRECTIONS)
    recipes = Recipes(projection(x), labels, folds, projection.root, None)

    def score(k: int) -> QueryScores:
        sums, rows = recipes.sums(without=k), sample_rows(labels, folds[k].held_out, SCORED_ITEMS)
        z = (recipes.z[rows] - sums.mean) @ closed_form(sums, Recipe(projection.root))
        return query_scores(z, labels[rows])

    return pooled(map_in_threads(score, range(len(folds))))
