"""Networks in half precision: autocast around the backbone.

Weights, optimizer, head, proxies and losses stay in float32; only what the network computes is
rounded. On GPUs with tensor cores that halves time and memory; CPUs are mostly slower.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.amp import autocast

from nofuss.config import Precision
from nofuss.errors import UsageError


def casting(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a network computes in a precision; none for fp32."""
    if precision == "fp32":
        return nullcontext()
    return autocast(device.type, dtype=torch.bfloat16)


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
