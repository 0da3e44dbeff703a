"""New classes also teach: `nofuss index RUN DIR --learn`, and `--undo`, which takes it back.

The head is fitted to the training items and to the labelled ones that were indexed since, by the
recipe that the run's folds chose; items and classes that the run is scored on stay out, and labels
count as people corrected them. What the new classes gain by it is measured on halves: each is
searched by a head that learned from the other half, and by that of the model as it was trained. The
model and the index of all items switch together; the model as it was trained is kept in RUN/former.
"""

import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nofuss.config import read_as
from nofuss.data.open import open_data
from nofuss.data.readers.folder import labelling_of
from nofuss.errors import DataError, RunError, UsageError, command
from nofuss.evaluate.intervals import in_points, paired_difference
from nofuss.evaluate.protocol import QueryScores, per_query, pooled, scorable
from nofuss.files import read_json
from nofuss.geometry import normalize
from nofuss.model.embedder import Embedder, embed_features
from nofuss.model.encoder import Encoder, load
from nofuss.model.features import features_of
from nofuss.model.manifest import Manifest, clear, read_manifest
from nofuss.model.saved import Loaded, load_model, model_digest, new_model, save_model
from nofuss.progress import Progress, silent, working
from nofuss.report import read_optional_json
from nofuss.run.choice import BEFORE, NOTHING, Choice
from nofuss.run.directory import Run
from nofuss.search.feedback import corrected, learned, read_feedback
from nofuss.search.folder import FolderIndex
from nofuss.search.index import BUILT_IN, Item
from nofuss.search.update import items_of
from nofuss.search.verdict import calibrated, with_features
from nofuss.training.finetune import after_training
from nofuss.training.head import fit_head

log = logging.getLogger("nofuss")

FORMER = "former"
"""The folder of a run that holds the model as it was trained, if `extra` of the present one has
this key; nothing replaces it while that is so."""
HALVES = 2


class Described(NamedTuple):
    """The items of an index and their features (N, F), in one order."""

    items: list[Item]
    features: Tensor


def learn(path: Path, *, device: str = "auto", progress: Progress = silent) -> None:
    """Fit the head of a run again with the labelled items that were added to its index."""
    with Run.open(path, write=True) as run:
        present, index = load_model(run.model), _own_index(run)
        has_learned = FORMER in present.extra
        trained = load_model(run.path / FORMER) if has_learned else present
        choice = _recipe(run)
        found = _features(run, device, index, progress)
        shown = corrected(index, read_feedback(path)).get([item.name for item in found.items])
        labels = np.array([item.label or "" for item in shown])
        splits = np.array([item.split or "" for item in shown])
        is_taught = (labels != "") & ~np.isin(labels, _scored_classes(run))
        is_added = is_taught & (splits == "")
        if not is_added.any():
            raise UsageError(
                f"the index of {path} holds no labelled items but those of the training and of the "
                f"classes it is scored on; give class folders: {command('nofuss', 'index', path)} "
                "DIR --learn"
            )
        rows = np.flatnonzero(is_added | (is_taught & (splits == "train")))
        classes, codes = np.unique(labels[rows], return_inverse=True)
        x, y, added = (
            found.features[rows],
            torch.from_numpy(codes),
            torch.from_numpy(is_added[rows]),
        )
        with working(progress, "measuring what the new classes gain"):
            scores = _halves(x, y, added, trained.embedder, choice, run)
        if scores and not _is_gain(*scores):
            return
        fitted = fit_head(x, y, run.config, decided=choice)
        embedder, names, extra, _ = trained
        if not has_learned:
            save_model(run.path / FORMER, embedder, class_names=names, extra=extra)
        embedder.set_head(fitted.head, root=choice.recipe.root)
        names = [*names, *(c for c in classes.tolist() if c not in names)]
        model = Loaded(embedder, names, {**extra, FORMER: trained.digest}, "")
        _switch(run, model, index, found, progress)
        count = len(np.unique(labels[is_added]))
        log.info(
            f"learned from {int(is_added.sum()):,} items of {count:,} added classes; "
            f"undo: {command('nofuss', 'index', path, '--undo')}"
        )
        _say_old_scores(run)


def undo(path: Path, *, device: str = "auto", progress: Progress = silent) -> None:
    """Return to the model as it was trained; what was indexed since stays."""
    with Run.open(path, write=True) as run:
        if FORMER not in load_model(run.model).extra:
            raise UsageError(f"{path} has not learned from added classes; there is nothing to undo")
        index, trained = _own_index(run), load_model(run.path / FORMER)
        _switch(run, trained, index, _features(run, device, index, progress), progress)
        shutil.rmtree(run.path / FORMER)
        log.info(f"{path} has the model from before it learned from added classes")
        _say_old_scores(run)


def _say_old_scores(run: Run) -> None:
    scores = read_optional_json(run.path / "scores.json")
    again = f"; score it anew: {command('nofuss', 'evaluate', run.path)}"
    if scores:  # those of folds are of models without their classes
        log.info(f"the report is still of the model before{'' if 'folds' in scores else again}")


def _own_index(run: Run) -> FolderIndex:
    return FolderIndex.open(run.index, model_digest(run.model))


def _recipe(run: Run) -> Choice:
    """Return how the run's folds want the head; RunError where it has no head of a closed form."""
    kept = None
    try:
        stored = read_json(run.path / "choice.json")
        kept, choice = stored["kept"], read_as(Choice, stored["choice"])
    except FileNotFoundError:
        raise RunError(f"{run.path} has no choice.json; finish the training first") from None
    except (OSError, KeyError, ValueError):
        choice = None
    if choice is None or choice.kept == NOTHING:
        raise RunError(
            f"{run.path} has no head that new classes could teach: it keeps "
            f"{'untrained features' if choice else 'a whole network'}; train it again with them"
        )
    is_trained = not run.config.is_fixed and kept != BEFORE
    return after_training(choice) if is_trained else choice


def _scored_classes(run: Run) -> list[str]:
    """Return the classes that the run is scored on and was not trained with."""
    classes = read_optional_json(run.path / "data.json").get("classes", {})
    held_out = {*classes.get("val", ()), *classes.get("test", ())}
    return sorted(held_out.difference(classes.get("train", ())))


def _features(run: Run, device: str, index: FolderIndex, progress: Progress) -> Described:
    """Return all items of an index with their features, which the cache mostly has."""
    backbone = load(run.path, device=device, feedback=False).embedder.backbone
    items, parts = list[Item](), list[Tensor]()
    for source in index.about.sources:
        known = {item.name: item for item in index.items(source)}
        if not known:
            continue
        path = None if source == BUILT_IN else Path(source)
        collection = open_data(path, labelling=labelling_of(run.config), unlabelled=True)
        rows = {item.name: row for row, item in enumerate(items_of(collection, path))}
        if gone := len(known.keys() - rows.keys()):
            raise DataError(
                f"{gone:,} items of {source} are no longer there; update the index: "
                f"{command('nofuss', 'index', run.path, source)}"
            )
        some = collection.subset(np.array([rows[name] for name in known]))
        items += known.values()
        parts.append(features_of(backbone, some, progress=progress).values)
    return Described(items, torch.cat(parts))


def _halves(
    x: Tensor, y: Tensor, added: Tensor, embedder: Embedder, choice: Choice, run: Run
) -> tuple[QueryScores, QueryScores] | None:
    """Return the scores of the added items by the head as trained, and by one that learned.

    x (N, F), y (N,): what is to be learned from; added (N,) bool. Each half is searched among
    itself by a head that has not seen it. None where no half can be scored.
    """
    half = torch.full_like(y, -1)
    for c in torch.unique(y[added]):
        own = torch.nonzero(added & (y == c))[:, 0]
        half[own] = torch.arange(len(own)) % HALVES
    before, after = list[QueryScores](), list[QueryScores]()
    for k in range(HALVES):
        held, kept = half == k, half != k
        if not scorable(y[held].numpy()):
            continue
        labels = torch.unique(y[kept], return_inverse=True)[1]
        fitted = fit_head(x[kept], labels, run.config, decided=choice)
        now = normalize(embed_features(embedder, x[held]))
        before.append(per_query(now, y[held]).scores)
        after.append(per_query(fitted.embed(x[held]), y[held]).scores)
    return (pooled(before), pooled(after)) if before else None


def _is_gain(old: QueryScores, new: QueryScores) -> bool:
    """Say what the added classes gain; return whether they do not lose significantly."""
    is_kept = True
    for name, a, b in (
        ("MAP@R", old.map_at_r, new.map_at_r),
        ("Recall@1", old.recall, new.recall),
    ):
        gain = paired_difference(b, a, old.labels)
        log.info(
            f"the added classes' {name}: {100 * a.mean():.2f} before, {100 * b.mean():.2f} after, "
            f"{in_points(gain)}"
        )
        is_kept &= gain.high >= 0
    if not is_kept:
        log.warning("learning from them makes them harder to find, so the model stays as it is")
    return is_kept


def _switch(
    run: Run, model: Loaded, index: FolderIndex, found: Described, progress: Progress
) -> None:
    """Put a model in force, with all items of the index embedded by it and the same feedback."""
    embedder, names, extra, _ = model
    with (
        new_model(run.model, embedder, class_names=names, extra=extra) as digest,
        working(progress, "writing the index"),
    ):
        encoder = Encoder(embedder, class_names=names, extra=extra, digest=digest)
        made = FolderIndex(index.about._replace(model=digest, dim=embedder.dim), run.index)
        made.manifest = read_manifest(run.index, digest) or Manifest(digest)
        vectors = normalize(embed_features(embedder, found.features))
        pairs = zip(found.items, vectors, strict=True)
        embedded = [item._replace(vector=vector) for item, vector in pairs]
        made.put(with_features(embedded, normalize(found.features), len(embedded)))
        if count := index.manifest.feedback:
            given = read_feedback(run.path).first(count)
            made = learned(made, given, history=index.manifest.history)
        made.commit(calibrated(corrected(made, read_feedback(run.path)), encoder))
    clear(run.index, digest)
