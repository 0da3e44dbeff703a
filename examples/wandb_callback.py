"""Log a training to Weights & Biases: python examples/wandb_callback.py photos/

Needs `pip install wandb`, and `wandb login` or WANDB_MODE=offline.
"""

import sys

import wandb

import nofuss
from nofuss.training.callbacks import Event


def log(event: Event) -> None:
    """Send an event: settings once, then numbers by step, and the scores as a summary."""
    if event.kind == "progress" or event.run is None:
        return
    if event.kind == "start":
        wandb.init(project="nofuss", name=event.run.name, config=dict(event.values))
    elif event.kind == "end":
        wandb.summary.update(dict(event.values))
        wandb.finish()
    else:
        values = {f"{event.kind}/{name}": value for name, value in event.values.items()}
        wandb.log(values, step=event.step)


if __name__ == "__main__":
    nofuss.train(sys.argv[1], callback=log)
