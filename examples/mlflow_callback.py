"""Log a training to MLflow: python examples/mlflow_callback.py photos/

Needs `pip install mlflow`; MLFLOW_TRACKING_URI says where to.
"""

import re
import sys

import mlflow

import nofuss
from nofuss.training.callbacks import Event


def allowed(name: str) -> str:
    """Return the name with the characters that MLflow allows."""
    return re.sub(r"[^\w/. -]", "_", name.replace("@", "_at_"))


def log(event: Event) -> None:
    """Send an event: settings once, then numbers by step, the report at the end."""
    if event.kind == "progress" or event.run is None:
        return
    if event.kind == "start":
        mlflow.start_run(run_name=event.run.name)
        mlflow.log_params(dict(event.values))
        return
    group = "scores" if event.kind == "end" else event.kind
    values = {f"{group}/{allowed(name)}": value for name, value in event.values.items()}
    mlflow.log_metrics(values, step=event.step)
    if event.kind == "end":
        mlflow.log_artifact(str(event.run / "report.html"))
        mlflow.end_run()


if __name__ == "__main__":
    nofuss.train(sys.argv[1], callback=log)
