"""Weights without values: a model is built on fake tensors, and takes the memory that building and drawing take."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...parallel.draws import CHUNK, InitRecipe
from ...parallel.weights import Weights
from ...parallel.world import World
from .compat import DispatchMode, FakeTensor, no_modes
from .unplannable import constructor_reads, of_deepspeed

_READS = (
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.equal, torch.allclose, torch.is_nonzero,
)  # fmt: skip


class _ReadValues(TorchFunctionMode):
    """Passes each read of a tensor's value to `answer`, except DeepSpeed's own reads, which run unchanged."""

    def __init__(self, answer: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not of_deepspeed(sys._getframe(1)):
            return self._answer(partial(func, *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _read_whole() -> AbstractContextManager[Any]:
    """Read all elements at once in `tolist`, as real tensors do; fake tensors' own `tolist` reads them one by one."""
    return patch.object(FakeTensor, "tolist", torch.Tensor.tolist)


def _refused(read: Callable[[], Any]) -> Any:
    raise constructor_reads(sys._getframe(1))


class _LargeOnMeta(DispatchMode):  # type: ignore[no-untyped-call]
    """Makes large tensors of `torch.empty` on meta, since a run does not touch their memory while it builds a model."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func is torch.ops.aten.empty.memory_format and on_cpu and math.prod(args[0]) >= CHUNK:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def _made_untouched(make_model: Callable[[], nn.Module]) -> nn.Module:
    with _LargeOnMeta():  # type: ignore[no-untyped-call]
        model = make_model()
    plain = [value for module in model.modules() for value in vars(module).values()]
    tensors = [*model.buffers(), *(value for value in plain if isinstance(value, torch.Tensor))]
    return make_model() if any(tensor.is_meta for tensor in tensors) else model


class FakeWeights(Weights):
    """Weights without values.

    Some constructors read values, such as the drop rates of layers from a `linspace`. Such a constructor first runs on
    real tensors, and its reads are then answered with the values seen there. In that first run the parameters are on
    meta, unless the constructor reads parameters that training would make real too.
    """

    def build(
        self,
        make_model: Callable[[], nn.Module],
        construction: AbstractContextManager[object] | None,
        cut_up: bool = False,
    ) -> nn.Module:
        if self.init_parameter is not None and construction is None:
            make_model = partial(_made_untouched, make_model)
        try:
            with _ReadValues(_refused), _read_whole():
                return super().build(make_model, construction, cut_up)
        except Exception:  # which exception a fake read raises depends on how the value is read
            values = self._really_read(make_model)
            if not values:
                raise
        with _ReadValues(lambda read: values.pop(0) if values else _refused(read)), _read_whole():
            return super().build(make_model, construction, cut_up)

    def _really_read(self, make_model: Callable[[], nn.Module]) -> list[Any]:
        """The values that the constructor reads, in order; empty if it reads none, or fails on real tensors too."""
        values: list[Any] = []

        def record(read: Callable[[], Any]) -> Any:
            values.append(read())
            return values[-1]

        def drawn(*_: object) -> None:
            raise AssertionError("nothing is drawn while a model is built")

        for init in (drawn, self.init_parameter):
            values.clear()
            with suppress(Exception):  # the error of the fake run is shown, which may name an operator
                with no_modes(), _ReadValues(record):
                    Weights(self.seed, init).build(make_model, None)
                return values
        return []

    def fill(self, fqn: str, shape: torch.Size, out: torch.Tensor, start: int = 0) -> None:
        """Allocate the host memory that drawing a parameter takes, without drawing."""
        if out.numel():
            self._draw(fqn, shape)

    def _draw(self, fqn: str, shape: torch.Size) -> None:
        with no_modes():
            recipe = self.recipe(fqn, shape)
        torch.empty(CHUNK if isinstance(recipe, InitRecipe) else shape.numel(), dtype=torch.float32)

    def materialise(self, model: nn.Module, device: torch.device, world: World | None = None) -> None:
        """Move the model to the device. `Module.to` cannot swap fake parameters that have weak references."""
        made: dict[int, Any] = {}
        for fqn, param in model.named_parameters():
            if param.is_meta:
                made[id(param)] = param, _moved(param, device, True)
                self._draw(fqn, param.shape)
        for module in model.modules():
            named_tensors = (module.named_parameters(recurse=False, remove_duplicate=False), True), (
                module.named_buffers(recurse=False, remove_duplicate=False), False,
            )  # fmt: skip
            for named, is_param in named_tensors:
                for name, tensor in list(named):
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _moved(tensor, device, is_param)
                    setattr(module, name, made[id(tensor)][1])


def _moved(tensor: torch.Tensor, device: torch.device, is_param: bool) -> Any:
    if tensor.device == device:
        return tensor  # as `Module.to` leaves it
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if is_param else value
