"""Where the state of a program lies on GPUs: parameters, gradients, optimizer states and buffers, at moments."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

from shardkit_categories import (  # type: ignore[import-not-found]
    BUFFERS,
    GRADS,
    MASTER,
    OPTIMIZER,
    PARAMS,
    Holding,
)


class StateHolders:
    """The state that the program's modules and optimizers hold on GPUs, at moments.

    Modules are those whose calls began a forward, optimizers those that stepped.
    """

    def __init__(self) -> None:
        self.holdings: list[Holding] = []
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def see_module(self, module: Any) -> None:
        from torch.nn import Module

        if not any(module is member for root in self._modules for member in Module.modules(root)):
            self._modules.add(module)

    def see_optimizer(self, optimizer: Any) -> None:
        self._optimizers.add(optimizer)

    def note(self) -> None:
        """Remember where the state lies now."""
        from torch.nn import Module  # loaded by the program

        addresses: dict[int, str] = {}
        for module in self._modules:
            for parameter in Module.parameters(module):  # Megatron's DDP has a list in place of `buffers`
                _add(addresses, PARAMS, parameter, getattr(parameter, "ds_tensor", None), *_quantised(parameter))
                _add(addresses, GRADS, parameter.grad)
            _add(addresses, BUFFERS, *Module.buffers(module))
        for optimizer in self._optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            _add(addresses, MASTER if addresses else PARAMS, *parameters)  # a model's own have their category by now
            _add(addresses, GRADS, *(parameter.grad for parameter in parameters))
            states = (state.values() if isinstance(state, dict) else [state] for state in optimizer.state.values())
            _add(addresses, OPTIMIZER, *(tensor for tensors in states for tensor in tensors))
        self.holdings.append(Holding(time.time_ns() // 1000, addresses))


def _add(addresses: dict[int, str], category: str, *tensors: Any) -> None:
    """Note addresses of tensors on GPUs; an address keeps its first category."""
    for tensor in tensors:
        for part in parts(tensor):
            if part.is_cuda and (address := part.data_ptr()):
                addresses.setdefault(address, category)


def parts(tensor: Any) -> Iterator[Any]:
    """The plain tensors of one that is made of others: a DTensor, a quantised one, a sparse gradient."""
    if not hasattr(tensor, "data_ptr"):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts(getattr(tensor, name))
    elif tensor.is_sparse:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


def _quantised(parameter: Any) -> Iterator[Any]:
    """What a parameter of bitsandbytes keeps beside its packed numbers."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from vars(state).values()
        state = getattr(state, "state2", None)
