"""Keep the tensors that blocks save for backward in host memory; copies overlap computation on their own streams.

A storage that several saved tensors share is copied once. Parameters, their views and buffers stay where they are:
they are state, and an engine that shards them frees and gathers them itself.

On a GPU, at most two blocks' activations wait for their copies at a time: the next block makes the computation wait, so
memory stays bounded when the bus is slower than the model. In backward, a block's first use of a saved tensor starts
the copies of the block before it. The last two blocks' activations are still on the device when backward starts, and
are not copied back. On the CPU nothing overlaps and nothing is gained: tensors are copied only for tests.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..config.schema import ActivationConfig
from ..parallel.blocks import Around, chosen_blocks
from ..parallel.compat import OFFLOAD, owner_of, version_of

IN_FLIGHT = 2
"""Blocks whose activations may still be on the device while their copies run."""


def offload_activations(
    model: nn.Module, blocks: Sequence[nn.Module], config: ActivationConfig, device: torch.device
) -> None:
    """Make every block keep its saved tensors in host memory, in place; call it after `checkpoint_activations`."""
    if config.offload == "none" or not OFFLOAD.works():
        return
    blocks = chosen_blocks(model, blocks, config)
    offloader = Offloader(device, config.offload_min_bytes, len(blocks))
    for index, block in enumerate(blocks):
        block.forward = Around(partial(offloader.forward, index, block), block.forward)


class Offloader:
    """Offloads all blocks of a model: tracks the storages on the host and the copies in flight."""

    def __init__(self, device: torch.device, min_bytes: int, n_blocks: int) -> None:
        self.device = device
        self.min_bytes = min_bytes
        self.moved_bytes = 0
        self._n_blocks = n_blocks
        self._largest = 0
        self._warned = False
        self._bus = _Bus(device) if device.type == "cuda" else None
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        self._leaving: deque[_Group] = deque()
        self._last_group: weakref.ref[_Group] | None = None

    def forward(self, index: int, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        while len(self._leaving) >= IN_FLIGHT:
            self._leaving.popleft().leave()
        before = self._last_group() if self._last_group is not None and index > 0 else None
        group = _Group(self, before, _storages(block))
        self._last_group = weakref.ref(group)
        with saved_tensors_hooks(group.pack, group.unpack):
            out = forward(*args, **kwargs)
        if self._bus is not None:
            group.copied = self._bus.outward.record_event()
            self._leaving.append(group)
        if index == self._n_blocks - 1:
            self._warn_if_idle()
        return out

    def copy_of(self, tensor: torch.Tensor, group: _Group) -> _Copy:
        """The copy of a tensor's storage; starts one if its current version has none."""
        storage = tensor.untyped_storage()
        copy = self._copies.get(id(storage))
        if copy is None or copy.source() is not storage or copy.version != version_of(tensor):
            copy = self._copies[id(storage)] = _Copy(tensor, self._bus)
            group.copies.append(weakref.ref(copy))
            self.moved_bytes += storage.nbytes()
        return copy

    def moves(self, n_bytes: int) -> bool:
        self._largest = max(self._largest, n_bytes)
        return n_bytes >= self.min_bytes

    def _warn_if_idle(self) -> None:
        if not self._warned and self._largest and not self.moved_bytes:
            self._warned = True
            warnings.warn(
                f"activation.offload=cpu moves nothing: the largest saved tensor has {self._largest} bytes, "
                f"activation.offload_min_bytes is {self.min_bytes}",
                stacklevel=2,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloader:  # a copied model gets its own copies
        memo[id(self)] = fresh = Offloader(self.device, self.min_bytes, self._n_blocks)
        return fresh


class _Bus:
    """A stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            host.copy_(source, non_blocking=True)
        return host

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start a copy; returns it and the event after which it may be read."""
        copy = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self.inward.wait_stream(torch.cuda.current_stream(self.device))  # which may have used this memory
        self.inward.wait_stream(self.outward)
        with torch.cuda.stream(self.inward):
            copy.copy_(host, non_blocking=True)
        copy.record_stream(self.inward)  # the copy may be freed before anything waits for it
        return copy, self.inward.record_event()


class _Copy:
    """One storage's bytes on the host, and on the device while they are there."""

    def __init__(self, tensor: torch.Tensor, bus: _Bus | None) -> None:
        storage = tensor.untyped_storage()
        # The storage's Python object lives as long as the storage: a dead reference reveals a new one at its address.
        self.source = weakref.ref(storage)
        self.version = version_of(tensor)
        self._bus = bus
        self._arrived: torch.cuda.Event | None = None
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.host = flat.clone() if bus is None else bus.to_host(flat)
        self.on_device: torch.Tensor | None = None if bus is None else flat

    def fetch(self) -> None:
        if self.on_device is None:
            if self._bus is None:
                self.on_device = self.host
            else:
                self.on_device, self._arrived = self._bus.to_device(self.host)

    def storage(self) -> torch.UntypedStorage:
        """The device's storage, ready to be read on the current stream."""
        self.fetch()
        assert self.on_device is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self.on_device.device).wait_event(self._arrived)
        return self.on_device.untyped_storage()


class _Saved:
    """A saved tensor's place in a copied storage."""

    __slots__ = ("copy", "device", "dtype", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor, copy: _Copy) -> None:
        self.copy, self.dtype, self.device = copy, tensor.dtype, tensor.device
        self.offset, self.size, self.stride = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(self.copy.storage(), self.offset, self.size, self.stride)


class _Group:
    """The tensors that one call of a block saves."""

    def __init__(self, offloader: Offloader, before: _Group | None, state: set[int]) -> None:
        self.copies: list[weakref.ref[_Copy]] = []
        self.copied: torch.cuda.Event | None = None
        self._offloader = offloader
        self._before = weakref.ref(before) if before is not None else None
        self._state = state

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if not self._moves(tensor):
            return tensor
        return _Saved(tensor, self._offloader.copy_of(tensor, self))

    def unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._fetch()
        if self._before is not None and (before := self._before()) is not None:
            before._fetch()
        return saved.tensor()

    def _fetch(self) -> None:
        """Start copying everything back, once."""
        for copy in self._live():
            copy.fetch()
        self.copies.clear()

    def leave(self) -> None:
        """Release the device's storages; the computation's next allocations wait for their copies."""
        if self.copied is not None:
            torch.cuda.current_stream(self._offloader.device).wait_event(self.copied)
        for copy in self._live():
            copy.on_device = None

    def _live(self) -> list[_Copy]:
        return [copy for ref in self.copies if (copy := ref()) is not None]

    def _moves(self, tensor: torch.Tensor) -> bool:
        owner = owner_of(tensor)
        if type(tensor) is not torch.Tensor or isinstance(owner, nn.Parameter) or tensor.layout != torch.strided:
            return False
        if tensor.device.type != self._offloader.device.type or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return id(storage) not in self._state and self._offloader.moves(storage.nbytes())


def _storages(module: nn.Module) -> set[int]:
    """The storages of a module's parameters (gathered, if an engine gathers the whole module) and buffers."""
    return {id(tensor.untyped_storage()) for tensor in (*module.parameters(), *module.buffers())}
