"""`selective_op`: keep the outputs of matrix products and fused attention, recompute everything else.

torch has this as `create_selective_checkpoint_contexts`, which compiled code uses. In eager mode torch returns a kept
product in its current state: a bias that was added to it in place is added a second time, without an error if a view
lies between (torch 2.13: `y = linear(x)` on 3-dimensional input and `y += bias`, which is also how DeepSpeed's linear
works under ZeRO-3). Here a kept product is copied before anything writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy
from typing_extensions import Self

from ..errors import TrainingError
from ..parallel.compat import DispatchMode, attentions, products, schema, tree_leaves, tree_map_only

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
