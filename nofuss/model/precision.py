"""Networks in half precision: autocast around the backbone, and a scaler for float16's gradients.

Weights, optimizer, head, proxies and losses stay in float32; only what the network computes is
rounded. On GPUs with tensor cores that halves time and memory; CPUs are mostly slower.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.amp import GradScaler, autocast

from nofuss.config import Precision
from nofuss.errors import UsageError

HALVES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def casting(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a network computes in a precision; none for fp32."""
    if precision not in HALVES:
        return nullcontext()
    return autocast(device.type, dtype=HALVES[precision])


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise UsageError if a device can't compute in a precision."""
    if precision not in HALVES:
        return
    reason = ""
    if not torch.amp.is_autocast_available(device.type):
        reason = f"torch has no autocast for device {device.type}"
    elif device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported():
        reason = f"{torch.cuda.get_device_name(device)} has no bfloat16; use fp16"
    if reason:
        raise UsageError(f"--precision {precision}: {reason}; leave it out, or use fp32")


def scaler_of(precision: Precision, device: torch.device) -> GradScaler | None:
    """Return what keeps float16's gradients from vanishing; None where none do.

    Gradients below 6e-8 are zero in float16, so the loss is multiplied by a large factor before
    they are computed. bfloat16 has the exponents of float32.
    """
    return GradScaler(device.type) if precision == "fp16" else None
