"""A head on fixed features, trained from its closed form.

The closed form gives inputs of D dimensions and average length 1; what is trained is a D × D
matrix that starts at the identity, with the proxies at their class means. Adam moves every entry by
about its rate a step, so that rate × steps × √D says how far an output of length 1 can move: that
product is what is fixed here, and the rates follow from the number of steps. 800 items or 80,000,
64 dimensions or 1,024 then need no other settings.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nofuss.config import TrainConfig
from nofuss.data.collection import Collection
from nofuss.geometry import normalize
from nofuss.model.start import Affine
from nofuss.training.feed import CollectionFeed
from nofuss.training.loop import Training
from nofuss.training.prepare import wire
from nofuss.training.setup import batch_of

MOVE = 2.0
"""Rate × steps × √D of the head; of the proxies PROXY_FACTOR times as much."""
PROXY_FACTOR = 10.0
EPOCHS = 20
FEWEST_STEPS, MOST_STEPS, MOST_EPOCHS = 300, 3000, 60


def head_schedule(config: TrainConfig, items: int, classes: int) -> TrainConfig:
    """Fill in epochs and rates that the user has not set, by the number of steps."""
    steps = max(1, items // batch_of(config, items, classes))
    epochs = config.epochs
    if epochs is None:
        wanted = min(max(EPOCHS * steps, FEWEST_STEPS), MOST_STEPS)
        epochs = min(max(1, round(wanted / steps)), MOST_EPOCHS)
    lr = config.head_lr
    if lr is None:
        assert config.dim is not None
        lr = MOVE / (max(1, epochs) * steps * config.dim**0.5)
    proxy_lr = PROXY_FACTOR * lr if config.proxy_lr is None else config.proxy_lr
    return replace(config, epochs=epochs, head_lr=lr, proxy_lr=proxy_lr)


def prepare_head(
    config: TrainConfig, inputs: Tensor, labels: Tensor, *, device: torch.device
) -> tuple[Training, CollectionFeed]:
    """Prepare the training of a head on `inputs` (N, D) of the closed form.

    labels: (N,) of 0…C−1 without gaps. `Training.model` is the D × D map.
    """
    classes = int(labels.max()) + 1
    config = replace(config, dim=inputs.shape[1])
    config = head_schedule(config, len(inputs), classes)
    dim = inputs.shape[1]
    turn = nn.Linear(dim, dim, device="meta", dtype=inputs.dtype).to_empty(device=device)
    with torch.no_grad():
        turn.weight.copy_(torch.eye(inputs.shape[1]))
        turn.bias.zero_()
    data = _collection(inputs.numpy(), labels.numpy(), classes)
    return wire(config, turn, data, None, normalize(inputs))


@torch.no_grad()
def composed(turn: nn.Module, start: Affine) -> Affine:
    """Return the closed form followed by the trained map, as one map."""
    assert isinstance(turn, nn.Linear)
    weight, bias = turn.weight.detach().cpu(), turn.bias.detach().cpu()
    return Affine(weight @ start.weight, weight @ start.bias + bias)


def _collection(
    vectors: NDArray[np.float32], labels: NDArray[np.int64], classes: int
) -> Collection:
    return Collection(
        name="features",
        layout="array",
        kind="vectors",
        array=vectors,
        labels=labels,
        class_names=tuple(map(str, range(classes))),
    )
