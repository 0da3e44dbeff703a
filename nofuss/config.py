"""Frozen dataclasses that describe a run, and how they become JSON and are read back.

`Options` is what a user may ask of training: the keywords of `nofuss.train` and, each field a flag
and its docstring the help, the command line of `nofuss train`. `training/settings.py` makes
`Settings` of it, once, by the preset, the data and the backbone.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from nofuss.errors import RunError, UsageError, unknown_name


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the tensor a backbone wants; saved with every model.

    A picture is converted to `mode`, resized, cropped to `size` × `size`, and mapped
    channel by channel to (value − mean) / std with value in 0…255.
    """

    size: int
    """Side of the square crop that the backbone sees."""
    resize: int
    """Side that the picture is resized to before the crop."""
    squash: bool = False
    """True: resize to a resize × resize square as the paper does. False: the short side."""
    mode: str = "RGB"
    """Pillow mode: "RGB" or "L"."""
    mean: tuple[float, ...] = (127.0, 127.0, 127.0)
    std: tuple[float, ...] = (128.0, 128.0, 128.0)
    flip: bool = True
    """Mirror at random in training; off where left and right differ in meaning (characters)."""
    affine: float = 0.0
    """Strength of small random affine changes in training (0 = none): rotation, scale, shift."""
    zoom: float = field(default=1.0, repr=False)  # no repr: features of centre crops are the same
    """Least fraction of a picture's area that a random crop in training shows; 1 does not zoom."""
    light: float = field(default=0.0, repr=False)
    """Strength of random changes of brightness and contrast in training (0 = none)."""
    train_size: int | None = field(default=None, repr=False)
    """Side of the random crops in training, where it is not `size` (Touvron et al. 2019)."""

    def in_training(self) -> "Preprocessing":
        """Return the same with the size of the crops in training."""
        return replace(self, size=self.train_size or self.size)


T = TypeVar("T")
Precision = Literal["fp32", "bf16"]
NAMED_DATA = ("han",)  # a word instead of a path


def is_named_data(path: Path) -> bool:
    """Return whether the word is a data set's name; a file or folder of that name comes first."""
    return str(path) in NAMED_DATA and not path.exists()


_COMMON = Group("Common options", sort_key=1)
_FURTHER = Group("Further options", sort_key=2)
_PAPER = Group("Options of the paper and its experiments", sort_key=3)
_BY_PRESET = "by the preset"
Preset = Literal["frozen", "finetune", "small", "vectors", "paper"]
Head = Literal["auto", "untrained", "closed-form", "trained"]
Assignment = Literal["static", "dynamic", "matched", "balanced"]
Start = Literal["random", "pca", "whitened"]
OptimizerName = Literal["adam", "adamw", "rmsprop"]
Schedule = Literal["cosine", "ramp", "constant"]


def _flag(group: Group, metavar: str | None = None, default: str | None = None) -> Parameter:
    """Describe a flag in the help page; default: in words, where None does not say it."""
    shown: dict[str, Any] = {} if default is None else {"show_default": default}
    return Parameter(group=group, metavar=metavar, **shown)


_SWITCH = Parameter(negative_bool="no-")


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """What a user may ask of training; None, or False of a switch, is not asked."""

    data: Annotated[Path | None, Parameter(parse=False)] = None
    """The data; on the command line the argument DATA."""
    out: Annotated[Path | None, _flag(_COMMON, "RUN", "a new folder under runs/")] = None
    """The run directory; never overwritten."""
    epochs: Annotated[int | None, _flag(_COMMON, "N", _BY_PRESET)] = None
    """Passes over the training set; 0 keeps the head at its start."""
    preset: Annotated[
        Literal["auto", "frozen", "finetune", "small", "vectors", "paper"] | None,
        _flag(_COMMON, default="auto"),
    ] = None
    """Settings that go together. auto chooses by the data: frozen for photographs (the backbone is
    fixed, its features are computed once), small for small pictures, vectors for vectors. finetune
    also trains the last stages of the network; paper trains all of it as the paper does."""
    dim: Annotated[
        int | None, _flag(_COMMON, "N", "by folds of the classes, 512 at most; small, paper: 64")
    ] = None
    """Size of the embedding; an item in the index takes four bytes a dimension."""
    test_fraction: Annotated[
        float | None, _flag(_COMMON, "X", "the data's own split, else folds or 0.5")
    ] = None
    """Fraction of the classes kept out of training, for the scores at the end; 0 trains on all. On
    fixed features the default trains on all classes and scores by folds."""
    seed: Annotated[int | None, _flag(_COMMON, "N", "0")] = None
    """Seed for the split, the order, the augmentation and the initial weights."""
    device: Annotated[str | None, _flag(_COMMON, "NAME", "auto")] = None
    """Where to compute: cpu, cuda, cuda:1 or another of torch's; auto: a GPU if there is one."""
    resume: Annotated[bool, _flag(_COMMON)] = False
    """Resume the run in --out where it was interrupted."""
    class_level: Annotated[int | None, _flag(_COMMON, "N", "the innermost folder")] = None
    """Folders in folders: which of them is the class, 1 for the outermost."""
    label_pattern: Annotated[str | None, _flag(_COMMON, "REGEX", "the folder")] = None
    """The class is in the name: a regular expression, searched in the path below DATA, whose first
    group is the class, as '^(.+)_' for robin_17.jpg."""

    corrections: Annotated[Path | None, _flag(_FURTHER, "FILE")] = None
    """Corrected labels: a run's feedback.jsonl, or a CSV (item,label,corrected)."""
    backbone: Annotated[str | None, _flag(_FURTHER, "NAME", _BY_PRESET)] = None
    """A network by name (nofuss backbones lists them) or timm:NAME; NAME@SIDE shows it pictures of
    another side. With fixed features several: NAME+NAME are side by side, among NAME,NAME folds of
    the classes choose. auto: among all whose weights are on this machine."""
    budget_minutes: Annotated[float | None, _flag(_FURTHER, "X", "30")] = None
    """With --backbone auto: how long computing the features may take."""
    weights: Annotated[Path | None, _flag(_FURTHER, "FILE")] = None
    """A local checkpoint of the backbone (inception-bn: a public BN-Inception file)."""
    size: Annotated[int | None, _flag(_FURTHER, "N", "its own, 288 for Lite's last stages")] = None
    """Side of the pictures that the network sees."""
    train_size: Annotated[int | None, _flag(_FURTHER, "N", "as --size")] = None
    """Side of the random crops that training sees. Smaller ones are faster."""
    mirror: Annotated[bool | None, _flag(_FURTHER, default=_BY_PRESET), _SWITCH] = None
    """Average the features of each picture that is searched or scored with those of its mirror
    image: better neighbours for twice the time per picture. Not for characters."""
    head: Annotated[Head | None, _flag(_FURTHER, default="auto")] = None
    """Fixed features: what becomes of them. auto: the closed form, or the untrained features where
    folds of the classes find it worse. trained: the closed form, then trained with the loss; that
    is also what --loss, --epochs and other options of training mean."""
    unfreeze: Annotated[str | None, _flag(_FURTHER, "N|all", _BY_PRESET)] = None
    """With --preset finetune: how many of the network's last stages are trained, on cached
    activations. all: the whole network, without cached activations."""
    lora: Annotated[int | None, _flag(_FURTHER, "RANK")] = None
    """With --preset finetune on a transformer: train low-rank changes of this rank to its attention
    and MLP layers instead of their weights (Hu et al. 2021); merged when the model is saved."""
    views: Annotated[int | None, _flag(_FURTHER, "N", _BY_PRESET)] = None
    """With --unfreeze N: random views of each picture; an epoch uses one of them."""
    batch_size: Annotated[int | None, _flag(_FURTHER, "N", _BY_PRESET)] = None
    """Items per step."""
    lr: Annotated[float | None, _flag(_FURTHER, "X", _BY_PRESET)] = None
    """Learning rate of the backbone."""
    head_lr: Annotated[float | None, _flag(_FURTHER, "X", _BY_PRESET)] = None
    """Learning rate of the head."""
    weight_decay: Annotated[float | None, _flag(_FURTHER, "X", _BY_PRESET)] = None
    """Weight decay of backbone and head; proxies have none."""
    val_fraction: Annotated[float | None, _flag(_FURTHER, "X", _BY_PRESET)] = None
    """Trainable backbones: fraction of the training classes held out to watch training; 0: none."""
    allow_shared: Annotated[bool, _flag(_FURTHER)] = False
    """Accept data whose own split has the same classes in training and test."""
    rerank: Annotated[Literal["auto", "none"] | None, _flag(_FURTHER, default="auto")] = None
    """auto: search re-ranks what it finds by the neighbours of its neighbours, if held-out classes
    gain by it. none: search by distance alone."""
    precision: Annotated[Precision | None, _flag(_FURTHER, default="fp32")] = None
    """What the network computes in; bf16 is for GPUs. Weights and losses stay in fp32."""
    num_workers: Annotated[int | None, _flag(_FURTHER, "N", "0")] = None
    """Threads that prepare batches in advance."""
    tensorboard: Annotated[Path | None, _flag(_FURTHER, "PATH")] = None
    """Also write losses and scores to PATH/NAME of the run, for TensorBoard."""

    loss: Annotated[str | None, _flag(_PAPER, "NAME", "proxy-nca")] = None
    """The loss that training minimizes: proxy-nca (the paper's), proxy-triplet, proxy-nca++,
    proxy-anchor, soft-triple; or over pairs of items, without proxies: nca, triplet, semi-hard,
    lifted, n-pairs, clustering."""
    assignment: Annotated[Assignment | None, _flag(_PAPER, default="static")] = None
    """How an item finds its proxy, the learned point that stands for its class. static: by its
    label. dynamic: the closest one, so that no labels are needed. matched: the same, but the
    labels of a batch take different ones. balanced: each label, or group of items that triplets or
    pairs link, takes the closest one of those least used, and keeps it."""
    proxies_per_class: Annotated[float | None, _flag(_PAPER, "X", "1; soft-triple: 10")] = None
    """Proxies that stand for a class; below 1, classes share them."""
    scale: Annotated[float | None, _flag(_PAPER, "X", "by the loss")] = None
    """How sharply the loss tells near from far: with a larger value only the closest proxies
    count, with a smaller one all of them do (the factor of the cosine; 2·N_x·N_p in the paper)."""
    free_norms: Annotated[bool, _flag(_PAPER)] = False
    """Let the lengths of embeddings and proxies be learned too, as the paper does, in place of
    --scale; vectors are scaled to length 1 afterwards. --preset paper does so unless --scale is
    given."""
    proxy_lr: Annotated[float | None, _flag(_PAPER, "X", _BY_PRESET)] = None
    """Learning rate of the proxies."""
    per_class: Annotated[int | None, _flag(_PAPER, "N", "by the loss")] = None
    """Items of a class in a batch, for losses over pairs; 0 shuffles."""
    start: Annotated[Start | None, Parameter(parse=False)] = None
    """Where the head starts, for the paper's experiments: whitened is the closed form."""
    optimizer: Annotated[OptimizerName | None, _flag(_PAPER, default=_BY_PRESET)] = None
    """The optimizer of all parameters."""
    schedule: Annotated[Schedule | None, _flag(_PAPER, default=_BY_PRESET)] = None
    """Of all learning rates. cosine: down to zero. ramp: the same, after a rise within the first
    epoch."""
    warmup: Annotated[int | None, _flag(_PAPER, "N", _BY_PRESET)] = None
    """Epochs in which only head and proxies are trained."""
    freeze_batch_norm: Annotated[bool | None, _flag(_PAPER, default=_BY_PRESET), _SWITCH] = None
    """Keep the batch-norm statistics of the backbone fixed."""

    def asked(self) -> dict[str, Any]:
        """Return what was asked, by name; auto leaves it open."""
        values = ((f.name, f.default, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {
            name: value
            for name, default, value in values
            if value is not default and value is not None and value != "auto"
        }


@dataclass(frozen=True)
class Settings:
    """What a run is made with, resolved from `Options` (which says what each field means).

    None of `dim`, `epochs`, `head_lr` and `proxy_lr` of a head on fixed features: by folds, or by
    the number of steps. None of `scale`: the loss's own. None of `test_fraction`: the data's split.
    """

    preset: Preset
    backbone: str
    start: Start
    head: Head
    loss: str
    assignment: Assignment
    proxies_per_class: float
    optimizer: OptimizerName
    schedule: Schedule
    batch_size: int
    lr: float
    per_class: int
    data: Path | None = None
    out: Path | None = None
    class_level: int | None = None
    label_pattern: str | None = None
    corrections: Path | None = None
    weights: Path | None = None
    dim: int | None = None
    size: int | None = None
    train_size: int | None = None
    mirror: bool = False
    unfreeze: str | None = None
    lora: int | None = None
    views: int = 1
    scale: float | None = None
    free_norms: bool = False
    epochs: int | None = None
    head_lr: float | None = None
    proxy_lr: float | None = None
    weight_decay: float = 0.0
    warmup: int = 0
    freeze_batch_norm: bool = False
    test_fraction: float | None = None
    val_fraction: float = 0.0
    allow_shared: bool = False
    seed: int = 0
    device: str = "auto"
    precision: Precision = "fp32"
    num_workers: int = 0
    rerank: Literal["auto", "none"] = "auto"
    tensorboard: Path | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether only a head is fitted, on features that stay as they are."""
        return self.preset in ("frozen", "vectors")


def to_json(obj: Any) -> dict[str, Any]:
    """Return a dataclass as a dict that JSON can hold; paths become strings."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(obj).items()}


def from_json(cls: type[T], stored: Any, *, where: object) -> T:
    """Return the dataclass that `to_json` wrote; RunError names a field that can't be it."""
    try:
        return read_as(cls, stored)
    except ValueError as error:
        raise RunError(f"{where} {error}; restore it, or use the nofuss that wrote it") from None


def read_as(cls: type[T], stored: Any) -> T:
    """Return a dataclass, or a named tuple with types, read from JSON; ValueError says why not."""
    if not isinstance(stored, dict):
        raise ValueError(f"is {stored!r:.60}, expected names and values")
    hints = get_type_hints(cls)
    if surplus := sorted(stored.keys() - hints.keys()):
        names = ", ".join(repr(name)[1:-1] for name in surplus[:5])
        raise ValueError(f"has settings of another version: {names}")
    found = {}
    for name, value in stored.items():
        try:
            found[name] = typed(value, hints[name])
        except TypeError:
            raise ValueError(f"is damaged: {name} is {value!r:.60}") from None
    parameters = inspect.signature(cls).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in found]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    return cls(**found)


def typed(value: Any, hint: Any) -> Any:
    """Return a value read from JSON as a field's type; TypeError if it is of another."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Any or (kind is Literal and value in parts):
        return value
    if kind in (Union, UnionType):
        for part in parts:
            with suppress(TypeError):
                return typed(value, part)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind in (list, tuple, Sequence) and isinstance(value, list | tuple):
        items = [typed(item, parts[0]) for item in value]
        return tuple(items) if kind is tuple else items
    if kind in (dict, Mapping) and isinstance(value, dict):
        return {name: typed(item, parts[1]) for name, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return read_as(kind, value)
    if fits(value, kind) and not (type(value) is float and not math.isfinite(value)):
        return value
    raise TypeError(f"{value!r:.60} is no {hint}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a plain type; a whole number is a float too."""
    return type(value) in ((int, float) if kind is float else (kind,))


# Name → (least, below): what makes sense whatever the data are.
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("dim", "batch_size", "views"), (1, 2**31)),
    "lora": (1, 1025),
    **dict.fromkeys(("epochs", "warmup", "per_class", "seed"), (0, 2**31)),
    "num_workers": (0, 1025),
    **dict.fromkeys(("lr", "head_lr", "proxy_lr", "weight_decay"), (0, float("inf"))),
    "budget_minutes": (0, float("inf")),
    **dict.fromkeys(("test_fraction", "val_fraction"), (0, 1)),
    "size": (16, 4096),
    "train_size": (16, 4096),
    "class_level": (1, 65),
}


def check_limits(asked: Options | Settings) -> None:
    """Refuse words and numbers that make no sense; the loss checks its scale and its proxies."""
    for name, hint in get_type_hints(type(asked)).items():
        kinds = (part for part in (hint, *get_args(hint)) if get_origin(part) is Literal)
        choices = [word for kind in kinds for word in get_args(kind)]
        value = getattr(asked, name)
        if choices and value not in (None, *choices):
            raise unknown_name(name, str(value), choices)
    for name, (least, below) in _LIMITS.items():
        value = getattr(asked, name, None)
        if value is not None and not least <= value < below:
            upper = f" and below {below:.10g}" if below < float("inf") else ""
            words = f"--{name.replace('_', '-')} is {value}; expected a number from {least:g} up"
            raise UsageError(f"{words}{upper}")
