"""Recompute several consecutive blocks together and keep only the first one's input.

The blocks stay where they are, and the model still calls them one by one. During a block's forward, a handle replaces
every tensor that autograd would save; when backward asks for the first handle of a segment, all its blocks run again in
their original order and hand over the tensors they save. An argument that is the previous block's unchanged output is
taken from that run; any other argument (a mask, a skip connection, an output that was changed on its way) is kept. So
the gradients are right whatever happens between two blocks, and memory is lowest if nothing does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from ..errors import TrainingError
from ..parallel.blocks import Around
from ..parallel.compat import TreeSpec, caller_recomputes, tree_flatten, tree_leaves, tree_unflatten, version_of
from .buffers import BufferRecord


def recompute_together(blocks: Sequence[nn.Module]) -> None:
    """Make these blocks one segment, in place."""
    for block, forward in zip(blocks, _Segment(blocks).forwards, strict=True):
        block.forward = forward


class _Segment:
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.forwards = [Around(partial(self.forward, index), block.forward) for index, block in enumerate(blocks)]
        self.replay: _Replay | None = None
        self._inside = False
        self._open: weakref.ref[_Pass] | None = None  # weak: only the graph may keep a pass alive

    def forward(self, position: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # a block that calls itself, or another one: a part of the outer call
            return inner(*args, **kwargs)
        if self.replay is not None:
            with self._within():
                return self.replay.forward(position)
        if not torch.is_grad_enabled() or caller_recomputes():  # then nothing is kept here
            return inner(*args, **kwargs)
        current = self._open() if self._open is not None else None
        if current is None or current.calls[-1].position + 1 != position:
            current = _Pass(self)
            self._open = weakref.ref(current)
        with self._within():
            return current.forward(position, args, kwargs)

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def __getstate__(self) -> dict[str, Any]:  # a copied model gets its own segment
        return {**self.__dict__, "replay": None, "_open": None, "_inside": False}


class _Handle:
    """Stands in for a saved tensor in the graph; `value` is set once the tensor was recomputed."""

    __slots__ = ("__weakref__", "index", "like", "owner", "value")

    def __init__(self, owner: _Pass, index: int, tensor: torch.Tensor) -> None:
        self.owner, self.index, self.like = owner, index, _likeness(tensor)
        self.value: torch.Tensor | None = None


class _Pass:
    """One forward through a segment: how its blocks were called, and the handles that the graph holds."""

    def __init__(self, segment: _Segment) -> None:
        self.segment = segment
        self.calls: list[_Call] = []
        self.handles: list[weakref.ref[_Handle]] = []
        self._outputs: list[_Seen] = []

    def forward(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        previous = [self._output_index(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        call = _Call.record(position, leaves, spec, previous, BufferRecord(self.segment.blocks[position]))
        self.calls.append(call)
        self._outputs = []  # only the comparison above needed them
        with call.buffers.recording(), saved_tensors_hooks(self._pack, self._unpack):
            out = self.segment.forwards[position].inner(*args, **kwargs)
        if position + 1 < len(self.segment.blocks):
            self._outputs = [_Seen(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        return out

    def _output_index(self, tensor: torch.Tensor) -> int | None:
        return next((index for index, seen in enumerate(self._outputs) if seen.is_same(tensor)), None)

    def _pack(self, tensor: torch.Tensor) -> _Handle:
        handle = _Handle(self, len(self.handles), tensor)
        self.handles.append(weakref.ref(handle))
        return handle

    def _unpack(self, handle: _Handle) -> torch.Tensor:
        if handle.value is None:
            _Replay(self).run()
        if handle.value is None:
            raise self.changed(f"saved {len(self.handles)} tensors in forward, fewer when it ran again")
        return handle.value

    def changed(self, difference: str) -> TrainingError:
        names = ", ".join(sorted({type(block).__name__ for block in self.segment.blocks}))
        return TrainingError(
            f"activation.policy=sqrt: {names} {difference}",
            "make its forward depend on nothing but its input and torch's random state, or set activation.policy=none",
        )


class _Seen:
    """A block's output, to recognise it as the next block's input; shares its storage but keeps no graph alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias, self._version, self._needs_grad = tensor.detach(), version_of(tensor), tensor.requires_grad

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether this is the same memory, read the same way, and not written to since (engines' hooks alias it)."""
        alias = self._alias
        return (
            type(tensor) is type(alias) is torch.Tensor
            and tensor.data_ptr() == alias.data_ptr()
            and _likeness(tensor) == _likeness(alias)
            and tensor.stride() == alias.stride()
            and version_of(tensor) == self._version
            and tensor.requires_grad == self._needs_grad
        )


@dataclass(frozen=True)
class _Call:
    """One call of a block, with everything needed to repeat it."""

    position: int
    leaves: list[Any]
    """Arguments; None in place of a tensor: tensors are in `saved_index`, or come from the previous block."""
    spec: TreeSpec
    previous: list[int | None]
    saved_index: dict[int, int]
    """Index among the leaves → among the kept tensors."""
    holder: torch.Tensor
    cpu_state: torch.Tensor
    device_states: tuple[list[int], list[torch.Tensor]]
    device_type: str
    autocast: list[torch.autocast]
    buffers: BufferRecord

    @classmethod
    def record(
        cls, position: int, leaves: list[Any], spec: TreeSpec, previous: list[int | None], buffers: BufferRecord
    ) -> _Call:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        keep = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and previous[i] is None]
        kinds = sorted({t.device.type for t in tensors} - {"cpu"})
        anchor = torch.empty(0, requires_grad=True)
        return cls(
            position=position,
            leaves=[None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
            spec=spec,
            previous=previous,
            saved_index={leaf: index for index, leaf in enumerate(keep)},
            holder=_Keep.apply(anchor, *(leaves[i] for i in keep)),  # type: ignore[no-untyped-call]
            cpu_state=torch.get_rng_state(),
            device_states=get_device_states(*tensors),
            device_type=kinds[0] if kinds else "cuda",
            autocast=[_autocast(kind) for kind in {"cpu", *kinds} if torch.amp.is_autocast_available(kind)],
            buffers=buffers,
        )

    def arguments(self, outputs: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        saved_tensors = self.holder.grad_fn.saved_tensors  # type: ignore[union-attr]
        leaves = list(self.leaves)
        for index, source in enumerate(self.previous):
            if source is not None:
                leaves[index] = outputs[source]
            elif index in self.saved_index:
                leaves[index] = saved_tensors[self.saved_index[index]]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Restore the random states and autocast of the call."""
        devices, states = self.device_states
        torch.set_rng_state(self.cpu_state)
        set_device_states(devices, states, device_type=self.device_type)
        with ExitStack() as entered:
            for autocast in self.autocast:
                entered.enter_context(autocast)
            yield


class _Keep(torch.autograd.Function):
    """Saves its arguments as an operator would: changes in place are noticed, and hooks (offload) see them."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors[1:])
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise AssertionError("nothing is computed from the holder")


class _AllRecomputed(Exception):
    """Everything that backward needs was recomputed."""


class _Replay:
    """Runs a pass again and hands each saved tensor to its handle."""

    def __init__(self, source: _Pass) -> None:
        self._pass = source
        self._missing = {i: handle for i, ref in enumerate(source.handles) if (handle := ref()) is not None}
        self._count = 0
        self._outputs: list[torch.Tensor] = []
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def run(self) -> None:
        segment, first_call = self._pass.segment, self._pass.calls[0]
        segment.replay = self
        try:
            with (
                torch.enable_grad(),
                torch.random.fork_rng(first_call.device_states[0], device_type=first_call.device_type),
            ):
                for call in self._pass.calls:
                    args, kwargs = self._arguments = call.arguments(self._outputs)
                    with call.surroundings(), call.buffers.restored():
                        # Call the module, not its forward: the engine's hooks gather a sharded block.
                        segment.blocks[call.position](*args, **kwargs)
        except _AllRecomputed:
            pass
        finally:
            segment.replay = None

    def forward(self, position: int) -> Any:
        """Run a block during the replay with the arguments of its first call, even if a user's hook changes them."""
        args, kwargs = self._arguments
        # torch (2.13) never releases a hook that raised, or anything the hook holds: so this one holds nothing large.
        hand_over = partial(_Replay._hand_over, weakref.proxy(self))
        with saved_tensors_hooks(hand_over, lambda tensor: tensor):
            out = self._pass.segment.forwards[position].inner(*args, **kwargs)
        self._outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        return out

    def _hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        handle = self._missing.pop(self._count, None)
        self._count += 1
        # Keep the parameter itself: ZeRO-3 frees its data after forward and gathers it again for the block's backward.
        value = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        if handle is not None:
            if handle.like != _likeness(tensor):
                raise self._pass.changed(f"saved {handle.like} in forward, {_likeness(tensor)} when it ran again")
            handle.value = value
        if not self._missing:
            raise _AllRecomputed
        return value


def _likeness(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _autocast(device_type: str) -> torch.autocast:
    return torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
