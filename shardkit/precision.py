"""Compute types: what forward and backward run in while the optimizer's master weights stay fp32."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .config import PrecisionConfig

_COMPUTE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(config: PrecisionConfig) -> torch.dtype:
    """The type of matrix products' inputs (tf32 keeps fp32 tensors)."""
    return _COMPUTE[config.mode]


def set_matmul_precision(config: PrecisionConfig) -> None:
    """Allow or forbid TF32 tensor cores for fp32 products, process-wide."""
    torch.set_float32_matmul_precision("high" if config.mode == "tf32" else "highest")


def autocast_forward(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Run the model's forward under autocast, in place; backward follows the types forward chose."""
    if dtype == torch.float32:
        return
    forward: Any = model.forward

    @functools.wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return forward(*args, **kwargs)

    model.forward = under_autocast
