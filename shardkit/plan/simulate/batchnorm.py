"""`nn.SyncBatchNorm` on fake tensors: the shapes of its kernels, which torch 2.9 to 2.13 has for real GPUs only."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import _functions

Tensor = torch.Tensor
_kept: list[torch.library.Library] = []  # a registration lives as long as its library


def register_shapes() -> None:
    """Let fake tensors go through a synchronised batch norm; once in a process."""
    library = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    for kernel in (_stats, _gather_stats_with_counts, _elemt, _backward_reduce, _backward_elemt):
        library.impl(f"batch_norm{kernel.__name__}", kernel)  # type: ignore[no-untyped-call]
    _kept.append(library)
    # While a graph is captured it leaves out looking for ranks without samples, which needs values.
    capturing = _Changed(torch.cuda, is_current_stream_capturing=lambda: True)
    _functions.torch = _Changed(torch, cuda=capturing)  # type: ignore[attr-defined, assignment]


class _Changed:
    """A module with some of its members replaced."""

    def __init__(self, module: Any, **members: Any) -> None:
        self.__dict__.update(members)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _of_channels(like: Tensor) -> Tensor:
    """Statistics are fp32 where the input has half of its bits."""
    dtype = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    return like.new_empty(like.shape[1], dtype=dtype)


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _of_channels(input), _of_channels(input)


def _gather_stats_with_counts(
    input: Tensor, mean: Tensor, invstd: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _of_channels(input), _of_channels(input)


def _elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    return torch.empty_like(input)


def _backward_reduce(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, input_g: bool, weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    affine = input.new_empty(0) if weight is None else torch.empty_like(weight)
    return _of_channels(input), _of_channels(input), affine, torch.empty_like(affine)


def _backward_elemt(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, sum_dy: Tensor,
    sum_dy_xmu: Tensor, count: Tensor,
) -> Tensor:  # fmt: skip
    return torch.empty_like(input)
