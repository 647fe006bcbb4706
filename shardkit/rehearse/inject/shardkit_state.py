"""The state of a program on GPUs: where it lies at moments, and what optimizers that have not stepped would add."""

from __future__ import annotations

import functools
import linecache
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

from shardkit_assumed import program_line  # type: ignore[import-not-found]
from shardkit_history import (  # type: ignore[import-not-found]
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
    """Scales and levels that a parameter of bitsandbytes keeps with its packed numbers."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from vars(state).values()
        state = getattr(state, "state2", None)


class Optimizers:
    """Each optimizer of this process with its steps. One that the program has dropped is gone here too."""

    def __init__(self) -> None:
        self.last_new_at = 0  # the most steps that any optimizer had done when another one stepped for the first time
        self._made: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def watch(self, torch: Any) -> None:
        """See each optimizer that is made from now on."""
        initialise = torch.optim.Optimizer.__init__

        @functools.wraps(initialise)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            initialise(optimizer, *args, **kwargs)
            self._made[optimizer] = program_line(sys._getframe(1))

        torch.optim.Optimizer.__init__ = init

    def stepped(self, optimizer: Any) -> None:
        if optimizer not in self._steps:
            self.last_new_at = self.most_steps()
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def most_steps(self) -> int:
        return max(self._steps.values(), default=0)

    def steps(self, wanted: int) -> int:
        """The steps that all optimizers have done. One that lags twice behind is not used any more."""
        fewest, most = min(self._steps.values(), default=0), self.most_steps()
        return most if most > 2 * max(wanted, fewest) else fewest

    def never_stepped(self) -> list[dict[str, Any]]:
        """Optimizers over trainable tensors on GPUs that no optimizer has updated so far, with bytes."""
        updated = {address for optimizer in list(self._steps) for address, _ in _trainable(optimizer)}
        rows = []
        for optimizer, (filename, line) in list(self._made.items()):
            # A program may make one, move or shard the model, and make another over the same numbers.
            sizes = {} if optimizer in self._steps else dict(_trainable(optimizer))
            if sizes and not sizes.keys() & updated:
                text = linecache.getline(filename, line).strip()
                rows.append({
                    "name": type(optimizer).__name__, "source_line": f"{filename}:{line}: {text}",
                    "parameters": sum(sizes.values()),
                    "more": sum(sizes.values()) * (1 + _states_for_each_parameter(optimizer.defaults)),
                })  # fmt: skip
        return rows


def _trainable(optimizer: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of each trainable tensor on a GPU that an optimizer updates."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for part in parts(parameter) if parameter.requires_grad else ():
                if part.is_cuda and part.data_ptr():
                    yield part.data_ptr(), int(part.nbytes)


def _states_for_each_parameter(defaults: dict[str, Any]) -> int:
    """How many tensors of a parameter's size the optimizer keeps, by the names of its settings."""
    if "betas" in defaults:
        return 3 if defaults.get("amsgrad") else 2
    return 1 if defaults.get("momentum") or "lr_decay" in defaults or "alpha" in defaults else 0
