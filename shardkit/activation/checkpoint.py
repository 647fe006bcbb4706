"""Activation memory: recompute it in backward from a region's input (Chen et al. 2016), or keep it in host memory."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import Self

from ..config.schema import ActivationConfig
from ..errors import ConfigError, TrainingError
from ..parallel import compat
from ..parallel.blocks import Around, attention_modules, chosen_blocks
from ..parallel.compat import (
    OFFLOAD,
    DispatchMode,
    attentions,
    caller_recomputes,
    has_values,
    owner_of,
    products,
    schema,
    tree_leaves,
    tree_map_only,
    version_of,
)

_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip
_changing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Block → names of the buffers that a forward of it has changed so far."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def checkpoint_activations(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    config: ActivationConfig,
    attention_classes: Sequence[type[nn.Module]] = (),
    compiled: bool = False,
) -> None:
    """Make the policy's regions recompute their activations in backward, in place.

    A region's `forward` is replaced and its module is not wrapped, so parameter names do not change and an engine's
    hooks stay outside the recomputed region. Random states are restored: dropout drops the same elements.
    """
    if config.policy == "budget" and config.budget < 1:
        _refuse_dropout(model)
    # The share of activations that torch.compile may keep is process-wide, and read at compile time.
    if compat.set_memory_budget(config.budget if config.policy == "budget" else 1.0):
        torch.compiler.reset()  # code compiled earlier in this process uses the old budget
    if not config.recomputes:
        return
    blocks = chosen_blocks(model, blocks, config)
    regions: Sequence[nn.Module] = blocks
    if config.policy == "selective":
        regions = attention_modules(blocks, attention_classes, config.policy)
    elif config.policy == "every_k":
        if config.every_k > len(blocks):
            raise ConfigError(
                f"activation.every_k={config.every_k}, but the model has {len(blocks)} blocks "
                f"({type(blocks[0]).__name__})",
                f"set activation.every_k to 1..{len(blocks)}, or activation.policy=none",
            )
        # Start at the first block: a checkpointed last block would be recomputed at once, at the peak it should lower.
        regions = blocks[:: config.every_k]
    for module in model.modules():
        settings = getattr(module, "config", None)
        # A transformers model's cache of keys and values would be filled twice by a layer that is computed twice.
        if getattr(settings, "use_cache", None) is True:
            settings.use_cache = False  # type: ignore[union-attr]
    options: dict[str, Any] = {"use_reentrant": False}
    if config.policy == "selective_op" and compat.PRODUCTS.works(instead="everything is recomputed"):
        torchs = partial(create_selective_checkpoint_contexts, keep_products)
        options["context_fn"] = torchs if compiled else contexts

    # All modules share this function. torch.compile would compile an object for each module, and give up after eight.
    def recompute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(type(self).forward, self, *args, **options, **kwargs)

    for module in regions:
        # Compiled code takes buffers as inputs and changes them once, so it needs no record of them.
        if any(True for _ in module.buffers()) and not compiled:
            module.forward = MethodType(_recompute_with_buffers(vars(module).get("forward"), options), module)
        elif "forward" in vars(module):  # replaced before: not the class's method
            module.forward = partial(checkpoint, module.forward, **options)
        else:
            module.forward = MethodType(recompute, module)


def _recompute_with_buffers(replaced: Callable[..., Any] | None, options: dict[str, Any]) -> Callable[..., Any]:
    """A recomputing `forward` that treats the buffers which it changes as `BufferRecord` says.

    Inside of a region that the model recomputes itself it only runs: that region changes the buffers twice, as without
    a policy.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = replaced or MethodType(type(self).forward, self)
        if caller_recomputes():
            return inner(*args, **kwargs)
        contexts = options.get("context_fn", lambda: None)
        record = BufferRecord(self)
        settings = options | {"context_fn": lambda: record.contexts(contexts())}
        return checkpoint(inner, *args, **settings, **kwargs)

    return forward


class BufferRecord:
    """The buffers of one call of a block, which batch norm, spectral norm and counters change in forward.

    A recomputation must read the values before the call, and must not change them a second time. A block's first call
    copies all its buffers, later calls copy those that have changed before.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        # name → the values before the call, of the buffers that the call changed
        self.before: dict[str, torch.Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the block's forward."""
        changing = _changing.get(self._block)
        buffers = dict(self._block.named_buffers(remove_duplicate=False))
        versions = {name: version_of(buffer) for name, buffer in buffers.items()}
        copies = {name: buffers[name].detach().clone() for name in buffers if changing is None or name in changing}
        yield
        for name, buffer in self._block.named_buffers(remove_duplicate=False):
            untouched = name in buffers and buffer is buffers[name] and version_of(buffer) == versions[name]
            # Batch norm's kernel writes without raising the version: compare the values, in the first call alone.
            if untouched and changing is None:
                owner = self._block.get_submodule(name.rpartition(".")[0])
                is_statistic = isinstance(owner, _NORMS) and owner.training and owner.track_running_stats
                untouched = torch.equal(buffer, copies[name]) if has_values(buffer) else not is_statistic
            if untouched and (changing is None or name not in changing):
                continue
            if name not in copies:
                raise TrainingError(
                    f"the forward of {type(self._block).__name__} changes its buffer {name}, which it left alone in "
                    "the first step: activation.policy would compute with the new values when it runs it again",
                    "change the buffer in every step or in none, or set activation.policy=none",
                )
            self.before[name] = copies[name]
        _changing.setdefault(self._block, set()).update(self.before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Around a recomputation: buffers hold the values before the call, and get the present ones back at the end."""
        present: list[tuple[nn.Module, str, torch.Tensor]] = []
        try:
            for name, values in self.before.items():
                owner, _, key = name.rpartition(".")
                module = self._block.get_submodule(owner)
                present.append((module, key, getattr(module, key)))
                setattr(module, key, values.clone())
            yield
        finally:
            for module, key, buffer in present:
                setattr(module, key, buffer)

    def contexts(
        self, inner: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of forward and recomputation (`context_fn` of torch.utils.checkpoint), around `inner`'s."""
        forward, again = inner or (None, None)
        return _Around(self.recording, forward), _Around(self.restored, again)


class _Around:
    """Enters a fresh context and then `inner`, as often as it is entered: backward may run twice."""

    def __init__(self, fresh: Any, inner: AbstractContextManager[Any] | None) -> None:
        self._fresh, self._inner = fresh, inner
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._fresh())
            if self._inner is not None:
                stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _refuse_dropout(model: nn.Module) -> None:
    """Compiled code that recomputes dropout under a budget drops different elements (torch 2.13 on CPU: a directional
    derivative is 2 to 8 % off): https://github.com/pytorch/pytorch/issues/190758, open."""
    for name, module in model.named_modules():
        rates = {"p": module.p} if isinstance(module, _DROPOUTS) else dict(vars(module))
        for key, rate in rates.items():
            if isinstance(rate, float) and 0 < rate < 1 and (key == "p" or "drop" in key):
                raise ConfigError(
                    f"activation.policy=budget, but {name or 'the model'} has {key}={rate:g}: torch.compile would draw "
                    "other random numbers when it recomputes, and gradients would be wrong",
                    "set model.dropout=0 (or the model's own key), activation.budget=1, or activation.policy=selective",
                )


# `selective_op`: keep the outputs of matrix products and fused attention, recompute everything else.
# torch has this as `create_selective_checkpoint_contexts`, which compiled code uses. In eager mode torch returns a kept
# product in its current state: a bias that was added to it in place is added a second time, without an error if a view
# lies between (torch 2.13: `y = linear(x)` on 3-dimensional input and `y += bias`, which is also how DeepSpeed's linear
# works under ZeRO-3). Here a kept product is copied before anything writes to it.

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,
    _aten.convolution.default,
    *products(),
}
ATTENTIONS = attentions()


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy in torch's terms.

    Attention with dropout is recomputed: if the second pass skipped it, it would not draw its random numbers, and every
    later dropout in the block would drop different elements than in forward.
    """
    if op in PRODUCTS or (op in ATTENTIONS and not _dropout_p(op, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> tuple[DispatchMode, DispatchMode]:
    """The modes for forward and for recomputation (`context_fn` of `torch.utils.checkpoint`)."""
    keeping = _Keeping()
    return keeping, _Recalling(keeping)


class _Keeping(DispatchMode):
    """Keeps products in the order of their computation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[tuple[Any, Any]] = []
        self._by_storage: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if schema(func).is_mutable:
            for tensor in _written(func, args, kwargs):
                index = self._by_storage.pop(id(tensor.untyped_storage()), None)
                if index is not None:
                    op, product = self.products[index]
                    self.products[index] = op, tree_map_only(torch.Tensor, torch.clone, product)
        out = func(*args, **kwargs)
        if keep_products(None, func, *args, **kwargs) == CheckpointPolicy.MUST_SAVE:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self._by_storage[id(tensor.untyped_storage())] = len(self.products)
            self.products.append((func, tree_map_only(torch.Tensor, torch.Tensor.detach, out)))
        return out


class _Recalling(DispatchMode):
    """Hands the kept products out again in the first recomputation, in the same order.

    Each backward pass through the block recomputes it (`autograd.grad(…, create_graph=True)` and then the loss's
    backward are two), and torch ends a recomputation before the block's end, once it has what backward needs. Later
    recomputations compute the products too.
    """

    def __init__(self, keeping: _Keeping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = keeping.products
        self._next = 0
        self._n_recomputations = 0

    def __enter__(self) -> Self:
        self._n_recomputations += 1
        if self._n_recomputations > 1:
            self._products.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._n_recomputations > 1 or keep_products(None, func, *args, **kwargs) != CheckpointPolicy.MUST_SAVE:
            return func(*args, **kwargs)
        if self._next >= len(self._products) or self._products[self._next][0] is not func:
            raise TrainingError(
                f"activation.policy=selective_op: backward computed {func} where forward had not",
                "let forward depend on its input alone, or set activation.policy=selective",
            )
        _, out = self._products[self._next]
        self._products[self._next] = None, None  # freed with its last use
        self._next += 1
        return out


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to."""
    for index, argument in enumerate(schema(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _dropout_p(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    index = [argument.name for argument in schema(op).arguments].index("dropout_p")
    value: float = args[index] if len(args) > index else kwargs.get("dropout_p", 0.0)
    return value


# Keep the tensors that blocks save for backward in host memory; copies overlap computation on their own streams.
# A storage that several saved tensors share is copied once. Parameters, their views and buffers stay where they are:
# they are state, and an engine that shards them frees and gathers them itself.
# On a GPU, at most two blocks' activations wait for their copies at a time: the next block makes the computation wait,
# so memory stays bounded when the bus is slower than the model. In backward, a block's first use of a saved tensor
# starts the copies of the block before it. The last two blocks' activations are still on the device when backward
# starts, and are not copied back. On the CPU nothing overlaps and nothing is gained: tensors are copied only for tests.

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
        if index == self._n_blocks - 1 and not self._warned and self._largest and not self.moved_bytes:
            self._warned = True
            warnings.warn(
                f"activation.offload=cpu moves nothing: the largest saved tensor has {self._largest} bytes, "
                f"activation.offload_min_bytes is {self.min_bytes}",
                stacklevel=2,
            )
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
        is_plain = type(tensor) is torch.Tensor or not has_values(tensor)  # planning traces on fake ones
        if not is_plain or isinstance(owner_of(tensor), nn.Parameter) or tensor.layout != torch.strided:
            return False
        if tensor.device.type != self._offloader.device.type or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return id(storage) not in self._state and self._offloader.moves(storage.nbytes())


def _storages(module: nn.Module) -> set[int]:
    """The storages of a module's parameters (gathered, if an engine gathers the whole module) and buffers."""
    return {id(tensor.untyped_storage()) for tensor in (*module.parameters(), *module.buffers())}
