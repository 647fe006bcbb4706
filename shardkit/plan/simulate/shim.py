"""Fake tensors on device cuda without a GPU, on CUDA and CPU builds of torch alike.

`install` changes the process for good (see `compat`, which patches torch). Tested with torch 2.9.0, 2.13 and 2.15 on
Linux x86-64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...hardware.cards import Gpu
from . import compat
from .fakes import Fakes

_current = 0
_released: Callable[[], None] = lambda: None  # noqa: E731 - replaced by `on_release`


def on_release(callback: Callable[[], None]) -> None:
    """Call `callback` whenever the program empties the allocator's cache. It replaces an earlier callback."""
    global _released
    _released = callback


def current_stream() -> int:
    """Number of the current stream; 0 is the default stream."""
    return _current


def install(gpu: Gpu, n_devices: int = 8) -> None:
    """Make `FakeTensorMode` work with device cuda in this process, until it ends."""
    compat.install_fake_cuda(_cuda_api(gpu, n_devices), _attention)
    compat.register_cuda_kernels()
    compat.register_batch_norm(_BATCH_NORM)
    _check()


class FakeStream:
    """Replaces `torch.cuda.Stream`: only a number."""

    _made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        FakeStream._made += 1
        self.stream_id = self.cuda_stream = FakeStream._made
        self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, 1

    def record_event(self, event: Any = None) -> FakeEvent:
        return FakeEvent()

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class FakeEvent:
    """Replaces `torch.cuda.Event`: every event has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


@contextmanager
def _on_stream(stream: FakeStream | None) -> Iterator[None]:
    global _current
    before, _current = _current, _current if stream is None else stream.stream_id
    try:
        yield
    finally:
        _current = before


def _cuda_api(gpu: Gpu, n_devices: int) -> dict[str, Any]:
    """Replacements for members of `torch.cuda` that describe or use a GPU."""
    default = FakeStream()
    default.stream_id = default.cuda_stream = 0
    properties = SimpleNamespace(
        name=gpu.device_name, total_memory=gpu.memory, major=gpu.capability[0], minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors, max_threads_per_multi_processor=gpu.threads_per_multiprocessor,
        gcnArchName="", warp_size=32,
    )  # fmt: skip
    replaced: dict[str, Any] = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": _on_stream,
        "StreamContext": _on_stream,
        "device": nullcontext,
        "current_stream": lambda *_: default,
        "default_stream": lambda *_: default,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: _released(),
        "device_count": lambda: n_devices,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: gpu.capability,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: gpu.device_name,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (gpu.memory, gpu.memory),
        **{f"{prefix}memory_{amount}": lambda *_: 0 for prefix in ("", "max_") for amount in ("allocated", "reserved")},
    }
    types = {"FloatTensor": torch.float32, "ByteTensor": torch.uint8, "IntTensor": torch.int32}
    return replaced | {key: partial(torch.tensor, dtype=dtype, device="cuda") for key, dtype in types.items()}


_real_attention = F.scaled_dot_product_attention


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Replaces `scaled_dot_product_attention`, which never fuses on fakes, by the kernel chosen on the planned GPU."""
    if query.device.type != "cuda":
        return _real_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    width, shared = query.shape[-1], enable_gqa and query.shape[1] != key.shape[1]
    kernel = _kernel(query, key, value, attn_mask is not None, shared)
    with torch.autocast("cuda", enabled=False):
        if kernel == "flash":
            padding = -width % 8
            if padding:
                query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
            factor = scale or 1 / math.sqrt(width)
            out, *_ = compat.flash_attention(query, key, value, dropout_p, is_causal, False, scale=factor)
            return out[..., :width] if padding else out  # type: ignore[no-any-return]
        if kernel == "efficient":
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            bias = attn_mask
            if bias is not None:  # that kernel's form: additive, rows padded to 16 elements, expanded
                if bias.dtype == torch.bool:
                    bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
                padding = -bias.shape[-1] % 16
                bias = F.pad(bias, (0, padding))[..., :-padding] if padding else bias
                bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            out, *_ = compat.efficient_attention(query, key, value, bias, grad, dropout_p, is_causal, scale=scale)
            return out  # type: ignore[no-any-return]
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, shared)


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masked: bool, shared: bool
) -> Literal["flash", "efficient", "plain"]:
    """The attention kernel that torch chooses on the planned card (sdp_utils.cpp of torch 2.9 to 2.13).

    Newer cards prefer cuDNN's kernel. It is planned as flash attention, or with a mask as the memory-efficient kernel.
    `shared`: heads share keys (`enable_gqa`). Keys that are broadcast without it have no fused kernel.
    """
    if query.dim() != 4 or (not shared and query.shape[:2] != key.shape[:2]):
        return "plain"
    newer = torch.cuda.get_device_capability() >= (8, 0)
    half = query.dtype in (torch.float16, torch.bfloat16)
    widths = query.shape[-1], value.shape[-1]
    if newer and half and not masked and widths[0] == widths[1] <= 256:
        return "flash"
    multiple = 8 if half else 4 if newer else 1
    has_kernel = newer or query.dtype != torch.bfloat16
    return "efficient" if has_kernel and not shared and not any(width % multiple for width in widths) else "plain"


def _plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    causal: bool, scale: float | None, shared: bool,
) -> torch.Tensor:  # fmt: skip
    """Unfused attention, operator by operator as torch runs it on CUDA, in fp32."""
    dtype, factor = query.dtype, math.sqrt(abs(scale or 1 / math.sqrt(query.shape[-1])))
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    query = query * factor
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, query.new_zeros(()), query.new_full((), -math.inf))
    if shared:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    weights = query @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        # torch's own function adds the mask in place only to real tensors.
        weights.add_(mask)
    weights = compat.softmax_of_rows(weights, -1)
    if dropout:
        weights = F.dropout(weights, dropout)
    out, _ = (weights @ value).to(dtype), weights.to(dtype)  # torch returns both
    return out


def _of_channels(like: Tensor) -> Tensor:
    """An empty tensor for statistics per channel, in fp32 for inputs of 16 bits, else in the input's dtype."""
    dtype = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    return like.new_empty(like.shape[1], dtype=dtype)


def _statistics(input: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _of_channels(input), _of_channels(input)


def _backward_reduce(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    affine = input.new_empty(0) if weight is None else torch.empty_like(weight)
    return _of_channels(input), _of_channels(input), affine, torch.empty_like(affine)


_BATCH_NORM: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _statistics,
    "batch_norm_elemt": lambda input, *_: torch.empty_like(input),
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": lambda grad_out, input, *_: torch.empty_like(input),
}
"""Kernels of `nn.SyncBatchNorm`: for each a function that returns results of the same shapes."""


def _check() -> None:
    """Raise RuntimeError unless a small fake backward pass has the right device, and the right dtype under autocast."""
    if torch.accelerator.current_accelerator() != torch.device("cuda"):
        raise RuntimeError("torch does not use cuda as its accelerator")
    with Fakes(), torch.device("cuda"):
        layer = torch.nn.Linear(4, 4)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = layer(torch.zeros(2, 4))
        out.sum().backward()
        if out.dtype is not torch.bfloat16 or layer.weight.grad is None or layer.weight.grad.device.type != "cuda":
            raise RuntimeError("a fake backward pass on cuda gives a wrong dtype or device")
