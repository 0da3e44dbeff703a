"""Frozen dataclasses that describe a run; each is saved as JSON and read back.

`TrainConfig` is also the command line of `nofuss train`: a field is a flag, its docstring the
help. A field left at None is filled by the preset, which is chosen by the data.
"""

import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

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
    """Least share of a picture's area that a random crop in training shows; 1 does not zoom."""
    light: float = field(default=0.0, repr=False)
    """Strength of random changes of brightness and contrast in training (0 = none)."""
    train_size: int | None = field(default=None, repr=False)
    """Side of the random crops in training, where it is not `size` (Touvron et al. 2019)."""

    def in_training(self) -> "Preprocessing":
        """Return the same with the size of the crops in training."""
        return replace(self, size=self.train_size or self.size)


Precision = Literal["fp32", "bf16"]
NAMED_DATA = ("han",)  # a word instead of a path


def is_named_data(path: Path) -> bool:
    """Return whether the word is a data set's name; a file or folder of that name comes first."""
    return str(path) in NAMED_DATA and not path.exists()


_COMMON = Group("Common options", sort_key=1)
_FURTHER = Group("Further options", sort_key=2)
_PAPER = Group("Options of the paper and its experiments", sort_key=3)
_BY_PRESET = "by the preset"


def _flag(group: Group, metavar: str | None = None, default: str | None = None) -> Parameter:
    """Describe a flag in the help page; default: in words, where None does not say it."""
    shown: dict[str, Any] = {} if default is None else {"show_default": default}
    return Parameter(group=group, metavar=metavar, **shown)


_SWITCH = Parameter(negative_bool="no-")


@Parameter(name="*")
@dataclass(frozen=True)
class TrainConfig:
    """Learn a distance from labelled data and try it on classes never seen."""

    data: Annotated[Path | None, Parameter(parse=False)] = None
    """The data; on the command line the argument DATA."""
    out: Annotated[Path | None, _flag(_COMMON, "RUN", "a new folder under runs/")] = None
    """The run directory; never overwritten."""
    epochs: Annotated[int | None, _flag(_COMMON, "N", _BY_PRESET)] = None
    """Passes over the training set; 0 keeps the head at its start."""
    preset: Annotated[
        Literal["auto", "frozen", "finetune", "small", "vectors", "paper"], _flag(_COMMON)
    ] = "auto"
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
    seed: Annotated[int, _flag(_COMMON, "N")] = 0
    """Seed for the split, the order, the augmentation and the initial weights."""
    device: Annotated[str, _flag(_COMMON, "NAME")] = "auto"
    """Where to compute: cpu, cuda, cuda:1 or another of torch's; auto: a GPU if there is one."""
    resume: Annotated[bool, _flag(_COMMON)] = False
    """Resume the run in --out where it was interrupted."""
    class_level: Annotated[int | None, _flag(_COMMON, "N", "the innermost folder")] = None
    """Folders in folders: which of them is the class, 1 for the outermost."""
    label_pattern: Annotated[str | None, _flag(_COMMON, "REGEX", "the folder")] = None
    """The class is in the name: a regular expression, searched in the path below DATA, whose first
    group is the class, as '^(.+)_' for robin_17.jpg."""

    corrections: Annotated[Path | None, _flag(_FURTHER, "CSV")] = None
    """A CSV of corrected labels (item,label,corrected), written by the page of `nofuss serve`."""
    backbone: Annotated[str | None, _flag(_FURTHER, "NAME", _BY_PRESET)] = None
    """convnet, inception-bn, efficientnet-lite0, -lite1, -lite2, timm:NAME."""
    weights: Annotated[Path | None, _flag(_FURTHER, "FILE")] = None
    """A local checkpoint of the backbone (inception-bn: a public BN-Inception file)."""
    size: Annotated[int | None, _flag(_FURTHER, "N", "its own, 288 for Lite's last stages")] = None
    """Side of the pictures that the network sees."""
    train_size: Annotated[int | None, _flag(_FURTHER, "N", "as --size")] = None
    """Side of the random crops that training sees. Smaller ones are faster."""
    mirror: Annotated[bool | None, _flag(_FURTHER, default=_BY_PRESET), _SWITCH] = None
    """Average the features of each picture that is searched or scored with those of its mirror
    image: better neighbours for twice the time per picture. Not for characters."""
    folds: Annotated[int | None, _flag(_FURTHER, "N", _BY_PRESET)] = None
    """Fixed features: folds of the training classes on which the start is chosen and training has
    to prove its gain; 0 skips both and always trains."""
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
    rerank: Annotated[Literal["auto", "none"], _flag(_FURTHER)] = "auto"
    """auto: search re-ranks what it finds by the neighbours of its neighbours, if held-out classes
    gain by it. none: search by distance alone."""
    precision: Annotated[Precision, _flag(_FURTHER)] = "fp32"
    """What the network computes in; bf16 is for GPUs. Weights and losses stay in fp32."""
    num_workers: Annotated[int, _flag(_FURTHER, "N")] = 0
    """Threads that prepare batches in advance."""
    tensorboard: Annotated[Path | None, _flag(_FURTHER, "PATH")] = None
    """Also write losses and scores to PATH/NAME of the run, for TensorBoard."""

    loss: Annotated[str, _flag(_PAPER, "NAME")] = "proxy-nca"
    """The loss that training minimizes: proxy-nca (the paper's), proxy-triplet, proxy-nca++,
    proxy-anchor, soft-triple; or over pairs of items, without proxies: nca, triplet, semi-hard,
    lifted, n-pairs, clustering."""
    assignment: Annotated[Literal["static", "dynamic", "matched", "balanced"], _flag(_PAPER)] = (
        "static"
    )
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
    start: Annotated[
        Literal["random", "pca", "whitened"] | None, _flag(_PAPER, default=_BY_PRESET)
    ] = None
    """Where the head starts. whitened: directions in which items of a class differ count less,
    then the principal components, with proxies at the class means. pca: the principal components
    alone."""
    untrained: Annotated[bool, _flag(_PAPER)] = False
    """Keep the backbone's features as they are, or with --dim their principal components."""
    shrinkage: Annotated[float | None, _flag(_PAPER, "X", "chosen on folds")] = None
    """With --start whitened: 0 trusts the measured differences within classes, 1 ignores them and
    treats all directions alike (α)."""
    center: Annotated[bool | None, _flag(_PAPER, default="chosen on folds"), _SWITCH] = None
    """Subtract what all pictures have in common, the average of their features, before anything
    else."""
    root: Annotated[bool | None, _flag(_PAPER, default="chosen on folds"), _SWITCH] = None
    """Take the square root of each feature, so that a few very large ones do not dominate
    (sign(x)·√|x|, Perronnin et al. 2010)."""
    optimizer: Annotated[
        Literal["adam", "adamw", "rmsprop"] | None, _flag(_PAPER, default=_BY_PRESET)
    ] = None
    """The optimizer of all parameters."""
    schedule: Annotated[
        Literal["cosine", "ramp", "constant"] | None, _flag(_PAPER, default=_BY_PRESET)
    ] = None
    """Of all learning rates. cosine: down to zero. ramp: the same, after a rise within the first
    epoch."""
    warmup: Annotated[int | None, _flag(_PAPER, "N", _BY_PRESET)] = None
    """Epochs in which only head and proxies are trained."""
    freeze_batch_norm: Annotated[bool | None, _flag(_PAPER, default=_BY_PRESET), _SWITCH] = None
    """Keep the batch-norm statistics of the backbone fixed."""


def to_json(config: Any) -> dict[str, Any]:
    """A dataclass as a dict that JSON can hold; paths become strings."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items()}


def read_config(values: dict[str, Any], *, where: Path) -> TrainConfig:
    """The configuration that `to_json` wrote; a name or a type it does not know is refused."""
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    known = {key: value for key, value in values.items() if key in fields}
    surplus = sorted(values.keys() - fields - {"fingerprint"})
    if surplus:
        names = ", ".join(repr(name)[1:-1] for name in surplus[:5])
        raise RunError(f"{where} has settings of another version: {names}")
    hints = get_type_hints(TrainConfig)
    for name, value in known.items():
        if Path in get_args(hints[name]) and isinstance(value, str):
            known[name] = Path(value)
        elif not fits(value, hints[name]):
            raise RunError(f"{where}: {name} is {value!r:.60}, which it can't be; restore the file")
    return TrainConfig(**known)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of a field's type; a whole number is a float too."""
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) in ((int, float) if hint is float else (hint,))


# Name → (least, below): what makes sense whatever the data are.
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("dim", "batch_size", "views"), (1, 2**31)),
    "lora": (1, 1025),
    **dict.fromkeys(("epochs", "warmup", "per_class", "seed"), (0, 2**31)),
    "num_workers": (0, 1025),
    **dict.fromkeys(("lr", "head_lr", "proxy_lr", "weight_decay"), (0, float("inf"))),
    **dict.fromkeys(("test_fraction", "val_fraction"), (0, 1)),
    "shrinkage": (0, 1.0000001),
    "folds": (0, 65),
    "size": (16, 4096),
    "train_size": (16, 4096),
    "class_level": (1, 65),
}


def check_limits(config: TrainConfig) -> None:
    """Refuse words and numbers that make no sense; the loss checks its scale and its proxies."""
    for name, hint in get_type_hints(TrainConfig).items():
        kinds = (part for part in (hint, *get_args(hint)) if get_origin(part) is Literal)
        choices = [word for kind in kinds for word in get_args(kind)]
        value = getattr(config, name)
        if choices and value not in (None, *choices):
            raise unknown_name(name, str(value), choices)
    for name, (least, below) in _LIMITS.items():
        value = getattr(config, name)
        if value is not None and not least <= value < below:
            upper = f" and below {below:.10g}" if below < float("inf") else ""
            words = f"--{name.replace('_', '-')} is {value}; expected a number from {least:g} up"
            raise UsageError(f"{words}{upper}")
