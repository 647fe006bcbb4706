"""Operators on tensors of two dtypes, and those of them that CUDA's own code or a plan's fake tensors refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def operators() -> dict[str, Callable[[], Any]]:
    def fp32(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cuda")

    def bf16(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

    rows = torch.zeros(2, dtype=torch.long, device="cuda")
    heads = (1, 2, 8, 16)
    return {
        "convolution": lambda: F.conv2d(fp32(2, 4, 8, 8), bf16(4, 4, 3, 3)),
        "convolution with bias": lambda: F.conv2d(fp32(2, 4, 8, 8), bf16(4, 4, 3, 3), bf16(4)),
        "transposed convolution": lambda: F.conv_transpose2d(bf16(2, 4, 8, 8), fp32(4, 4, 3, 3)),
        "linear": lambda: F.linear(fp32(2, 4), bf16(4, 4)),
        "linear with bias": lambda: F.linear(fp32(2, 3, 4), bf16(4, 4), bf16(4)),
        "bias": lambda: torch.addmm(fp32(4), bf16(2, 4), bf16(4, 4)),
        "batched product": lambda: torch.bmm(fp32(2, 3, 4), bf16(2, 4, 3)),
        "matrix and vector": lambda: torch.mv(fp32(4, 4), bf16(4)),
        "layer norm": lambda: F.layer_norm(fp32(2, 4), (4,), bf16(4), bf16(4)),
        "layer norm in fp32": lambda: F.layer_norm(bf16(2, 4), (4,), fp32(4), fp32(4)),
        "group norm": lambda: F.group_norm(fp32(2, 4, 8, 8), 2, bf16(4), bf16(4)),
        "rms norm": lambda: F.rms_norm(fp32(2, 4), (4,), bf16(4)),
        "attention": lambda: F.scaled_dot_product_attention(bf16(*heads), fp32(*heads), fp32(*heads)),
        "written rows": lambda: fp32(4, 4).index_put_((rows,), bf16(2, 4)),
        "added rows": lambda: fp32(4, 4).index_add_(0, rows, bf16(2, 4)),
        "copied rows": lambda: fp32(4, 4).index_copy(0, rows, bf16(2, 4)),
        "sum": lambda: fp32(4) + bf16(4),
        "error": lambda: F.mse_loss(fp32(2, 4), bf16(2, 4)),
        "one dtype": lambda: F.layer_norm(F.linear(bf16(2, 4), bf16(4, 4), bf16(4)), (4,), bf16(4), bf16(4)),
    }


def refused() -> list[str]:
    found = []
    for name, operator in operators().items():
        try:
            operator()
        except RuntimeError:
            found.append(name)
    return found


def refused_by_a_plan() -> list[str]:
    from shardkit.hardware.cards import GPUS
    from shardkit.plan.simulate import shim
    from shardkit.plan.simulate.fakes import Fakes

    shim.install(GPUS["h100"])
    with Fakes():
        return refused()
