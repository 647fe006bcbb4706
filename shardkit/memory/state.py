"""Bytes of parameters, gradients and optimizer state, counted from the storages that hold them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn

from .rows import KINDS, StateBytes, StateKind

_PLAIN = (torch.Tensor, nn.Parameter)
_ORDER = {kind: order for order, kind in enumerate(KINDS)}


class HasState(Protocol):
    """Anything that can list its state, as every strategy can. Lower packages know nothing else of an engine."""

    def state_tensors(self) -> Iterable[tuple[StateKind, torch.Tensor]]:
        """Every local tensor that holds state; the same storage may come more than once."""


def module_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """State of a plain, DDP or FSDP2 module and of torch optimizers.

    Parameters that only an optimizer holds (fp32 masters of a mixed-precision wrapper) are `master_params`.
    """
    model_params = set()
    # The functions of the class, not the methods: Megatron's DDP has a list in place of the method `buffers`.
    for param in nn.Module.parameters(model):
        model_params.add(id(param))
        yield from weight_state(param)
        if param.grad is not None:
            yield "grads", param.grad
    for buffer in nn.Module.buffers(model):
        yield "buffers", buffer
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in model_params:
                    yield "master_params", param
                    if param.grad is not None:
                        yield "grads", param.grad
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield "optimizer", value


def weight_state(param: torch.Tensor) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """A parameter with its category: `quantized` for integers, which are the packed bytes or the scales of a weight.

    bitsandbytes keeps scales and levels in a `quant_state` beside its own parameters in 4 bits, whose packed bytes may
    be stored in any type.
    """
    quantized = getattr(param, "quant_state", None)
    is_plain = param.is_floating_point() or param.is_complex() or param.dtype == torch.bool
    yield "params" if is_plain and quantized is None else "quantized", param
    while quantized is not None:
        for name in ("absmax", "code", "offset"):
            tensor = getattr(quantized, name, None)
            if isinstance(tensor, torch.Tensor):
                yield "quantized", tensor
        quantized = getattr(quantized, "state2", None)


def local_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of this rank inside a DTensor or another wrapper subclass; a plain tensor itself."""
    flatten = None if type(tensor) in _PLAIN else getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from local_tensors(inner)


def page_locked(n_bytes: int) -> int:
    """Bytes that torch's allocator of pinned memory takes for `n_bytes`: a power of two (torch 2.9 to 2.15).

    PYTORCH_ALLOC_CONF may limit that: `pinned_max_round_threshold_mb`, `pinned_max_cached_size_mb`.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    limits = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb:(\d+)", settings)
    if any(n_bytes > int(limit) << 20 for limit in limits):
        return n_bytes
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0


def count_state(tensors: Iterable[tuple[StateKind, torch.Tensor]], device: torch.device) -> dict[StateKind, StateBytes]:
    """Bytes per category, on the training device and on the host.

    A storage counts once and whole, however many views of it come: a flat buffer behind several parameters counts with
    its padding, pinned memory as torch rounds it up. A storage in several categories belongs to the first of them in
    the order of `KINDS`. Meta tensors and freed storages have no bytes.

    `device`: where the model trains. If it is the CPU, tensors there count as `device`; otherwise tensors on the CPU,
    pinned or not, count as `host`.
    """
    seen: dict[tuple[object, int], tuple[int, int, bool]] = {}
    elsewhere = device.type != "cpu"
    for kind, tensor in tensors:
        order = _ORDER[kind]
        for local in (tensor,) if type(tensor) in _PLAIN else local_tensors(tensor):
            storage = local.untyped_storage()
            n_bytes = storage.nbytes()
            local_device = local.device
            if n_bytes == 0 or local_device.type == "meta":
                continue
            # Two storages over the same memory (DLPack, set_) share the address; those of fakes, on meta, have none.
            key = ("fake", id(storage)) if storage.device.type == "meta" else (local_device, storage.data_ptr())
            # Pinned memory is rounded up once for each storage, as torch allocates it, not for each tensor.
            counted = seen.get(key)
            if counted is None or order < counted[0]:
                on_host = elsewhere and local_device.type == "cpu"
                if on_host and local.is_pinned():
                    n_bytes = page_locked(n_bytes)
                seen[key] = (order, n_bytes, on_host)
    sums = {kind: [0, 0] for kind in KINDS}
    for order, n_bytes, on_host in seen.values():
        sums[KINDS[order]][on_host] += n_bytes
    return {kind: StateBytes(*sums[kind]) for kind in KINDS}
