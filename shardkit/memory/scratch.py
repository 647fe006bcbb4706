"""Memory that operators take inside and that no tensor of the program shows: bytes by operator, from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch


def _flash_attention_backward(args: Any) -> int:
    """FlashAttention-2's backward: row sums and an fp32 accumulator of dQ, rows rounded up to 128 and widths to 32.

    With fewer key heads than query heads, dK and dV are made at the query heads' number first.
    Args are (grad_out, query, key, ...), each [batch, heads, sequence, head width].
    """
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    rows_up, width_up = -(-rows // 128) * 128, -(-width // 32) * 32
    n_bytes: int = 4 * batch * heads * rows_up * (1 + width_up)
    if key.shape[1] != heads:
        n_bytes += 2 * batch * key.shape[2] * heads * width * query.element_size()
    return n_bytes


def _gathered(args: Any) -> int:
    """gloo gathers into a flat copy of the output; args are (output, input, ...)."""
    return _n_bytes(args[0])


def _reduced(args: Any) -> int:
    """gloo reduces a copy of the whole input, then keeps this rank's part; args are (output, input, ...)."""
    return _n_bytes(args[1])


def _n_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


SCRATCH: dict[str, tuple[Literal["cuda", "cpu"], Callable[[Any], int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": ("cuda", _flash_attention_backward),
    "c10d::_allgather_base_": ("cpu", _gathered),
    "c10d::_reduce_scatter_base_": ("cpu", _reduced),
}
"""Operator → (kind of device it is true for, bytes)."""
