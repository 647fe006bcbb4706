"""Activation checkpointing: keep a region's input, recompute the rest in backward (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import Self

from ..config.schema import ActivationConfig
from ..errors import ConfigError, TrainingError
from ..parallel import compat
from ..parallel.blocks import attention_modules, chosen_blocks
from ..parallel.compat import (
    DispatchMode,
    attentions,
    caller_recomputes,
    has_values,
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
                untouched = torch.equal(buffer, copies[name]) if has_values(buffer) else not self._is_statistic(name)
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

    def _is_statistic(self, name: str) -> bool:
        """Whether a buffer is one of those that batch norm's kernel writes."""
        owner = self._block.get_submodule(name.rpartition(".")[0])
        return isinstance(owner, _NORMS) and owner.training and owner.track_running_stats

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
                self._copy_before_write(tensor)
        out = func(*args, **kwargs)
        if keep_products(None, func, *args, **kwargs) == CheckpointPolicy.MUST_SAVE:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self._by_storage[id(tensor.untyped_storage())] = len(self.products)
            self.products.append((func, tree_map_only(torch.Tensor, torch.Tensor.detach, out)))
        return out

    def _copy_before_write(self, tensor: torch.Tensor) -> None:
        index = self._by_storage.pop(id(tensor.untyped_storage()), None)
        if index is not None:
            op, out = self.products[index]
            self.products[index] = op, tree_map_only(torch.Tensor, torch.clone, out)


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
