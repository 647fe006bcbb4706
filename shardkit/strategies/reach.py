"""FSDP2's units that their own calls do not gather and free, and parameters that a rank did not use in a step.

FSDP2 gathers a unit's parameters for the unit's own forward and backward. Some units are held instead: gathered from
their first use to the end of backward, where their gradients are reduced once, as the model's own parameters are. These
are units of tied parameters, towers that only some ranks enter, and units through which forward differentiates. A
parameter that is used while it is sharded is refused by name (`explained`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from ..config.libraries import is_first_rank
from ..errors import ConfigError
from ..parallel import compat
from ..parallel.blocks import plain_type

_LOG = logging.getLogger(__name__)
OBSERVED_STEPS = 2
"""Steps whose forward is observed; torch's functions take about 2 µs more each meanwhile."""


class Reach(TorchFunctionMode):
    """Holds the units of a model that are not gathered and freed by their own calls.

    `observes`: look in the first steps for a backward inside of forward, and for late gradients.
    """

    def __init__(self, model: nn.Module, strategy: str, observes: bool) -> None:
        super().__init__()
        self._model, self.name = model, strategy
        self._names = {id(module): name or "the model" for name, module in model.named_modules()}
        self._units: list[FSDPModule] = []
        self._late: list[Any] = []
        """Units that got more gradients after FSDP2 had reduced theirs: these are reduced at the end of backward."""
        self.held_units: list[FSDPModule] = []
        self._passing: list[FSDPModule] = []
        """Units that are held up to the end of the next backward."""
        self._passing_parts: set[int] = set()
        self._hooked: set[int] = set()
        self._observes = observes
        self._steps = 0
        self.gathered: Callable[[], None] = lambda: None  # called when a unit was gathered outside of its forward

    def watch(self, model: nn.Module) -> None:
        """Watch the forward of the model, which is sharded by now: in the first steps, and always if it runs a backward
        inside."""
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        model.register_forward_pre_hook(torch.compiler.disable(self._gather))  # type: ignore[no-untyped-call]
        if self._observes:
            forward = model.forward

            @functools.wraps(forward)
            def observed(*args: Any, **kwargs: Any) -> Any:
                with self if self._observes else nullcontext():
                    return forward(*args, **kwargs)

            model.forward = observed

    def _gather(self, *_: Any) -> None:
        """Gather the held units; a hook before the model's forward."""
        for unit in self.held_units:
            unit.unshard()
        if self.held_units:
            self.gathered()

    def hold(self, unit: Any) -> None:
        """Hold a unit from now on, in each step."""
        assert isinstance(unit, FSDPModule)
        if unit not in self.held_units:
            self.held_units.append(unit)
            if id(unit) not in self._hooked:
                self._hooked.add(id(unit))
                # FSDP2 frees it after an outer call of itself, if it calls itself.
                again = torch.compiler.disable(  # type: ignore[no-untyped-call]
                    lambda *_: unit.unshard() if unit in self.held_units else None
                )
                unit.register_forward_hook(again)  # type: ignore[attr-defined]
        self._keep(unit)

    def hold_now(self, part: nn.Module) -> None:
        """Gather the units in a part of the model now, and hold them up to the end of the next backward."""
        self._passing_parts.add(id(part))
        for unit in part.modules():
            if isinstance(unit, FSDPModule) and not self._is_held_unit(unit):
                self.hold(unit)
                self._passing.append(unit)
                unit.unshard()
        self.gathered()

    def release(self, reshards: bool) -> None:
        """Let the units of `hold_now` be gathered and freed by their own calls again.

        `reshards`: whether a unit's gathered parameters are freed after its forward.
        """
        for unit in self._passing:
            self.held_units.remove(unit)
            unit.set_reshard_after_forward(reshards, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.reshard()
        self._passing.clear()
        self._passing_parts.clear()

    def is_held(self, module: nn.Module) -> bool:
        """Whether calls of a module gather nothing, since its unit, or all units in it, are held."""
        if id(module) in self._passing_parts:
            return True
        return isinstance(module, FSDPModule) and self._is_held_unit(module)

    def _is_held_unit(self, unit: FSDPModule) -> bool:
        """Whether a unit is held; modules that hold one tied parameter are one unit."""
        return any(compat.is_one_unit(unit, held) for held in self.held_units)

    def keep_held(self) -> None:
        """Hold the held units after a change of the whole model's settings."""
        for unit in self.held_units:
            self._keep(unit)

    def _keep(self, unit: FSDPModule) -> None:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)
        unit.set_requires_gradient_sync(False, recurse=False)

    def finish_backward(self, reduces: bool) -> None:
        """Reduce the held units' gradients, if `reduces`, and free their parameters."""
        for unit in [*self._units, self._model] if self._observes and reduces else ():
            # It got gradients after it had reduced its own.
            if unit not in self.held_units and unit not in self._late and compat.has_gradients(unit):
                self._late.append(unit)
        for unit in self.held_units:
            unit.set_requires_gradient_sync(reduces or unit in self._passing, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            compat.reduce_gradients(unit)
            self._keep(unit)
        for unit in self._late if reduces else ():
            compat.reduce_gradients(unit)

    def finish_step(self) -> None:
        self._steps += 1
        if self._steps == OBSERVED_STEPS:
            self._observes = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad or func is torch.autograd.backward or func is torch.Tensor.backward:
            return self._backward(func, args, kwargs)
        return func(*args, **kwargs)

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A backward inside of forward: hold the units that it goes through."""
        self._steps = -sys.maxsize  # observe every step
        with compat.backward_inside_forward(self._model, self._units) as entered:
            result = func(*args, **kwargs)
        for unit in entered:
            if unit not in self.held_units:
                self._say(f"forward takes a gradient through {self._names[id(unit)]}")
            self.hold(unit)
            unit.unshard()
        self.gathered()
        return result

    def _say(self, cause: str) -> None:
        if is_first_rank():
            frame = _caller(sys._getframe())
            line = "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"
            _LOG.warning("%s%s: its parameters stay gathered to the end of each backward", cause, line)


def without_views(module: nn.Module, args: Any, out: Any) -> Any:
    """A hook after a unit's forward: copies outputs that are views, since a caller's change of a view in place would
    silently drop the hook of backward that FSDP2 puts on it."""
    return _copied(out) if torch.is_grad_enabled() else out


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        is_view = tree.requires_grad and compat.owner_of(tree) is not tree
        return tree.clone() if is_view else tree
    if isinstance(tree, dict):
        fresh = {key: _copied(value) for key, value in tree.items()}
        if any(fresh[key] is not value for key, value in tree.items()):
            tree = copy.copy(tree)
            for key, value in fresh.items():
                tree[key] = value
        return tree
    if isinstance(tree, (tuple, list)):
        fresh_items = [_copied(value) for value in tree]
        if all(new is old for new, old in zip(fresh_items, tree, strict=True)):
            return tree
        return type(tree)(*fresh_items) if hasattr(tree, "_fields") else type(tree)(fresh_items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {field.name: _copied(getattr(tree, field.name)) for field in dataclasses.fields(tree)}
        if any(value is not getattr(tree, name) for name, value in changed.items()):
            tree = copy.copy(tree)
            for name, value in changed.items():
                object.__setattr__(tree, name, value)
    return tree


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither torch's nor this file's."""
    while frame is not None and (frame.f_code.co_filename == __file__ or _is_torch(frame)):
        frame = frame.f_back
    return frame


def _is_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


_NOT_GATHERED = ("got mixed torch.Tensor and DTensor", "storage of size 0", "sharded_param.grad to be DTensor")
"""Parts of torch's messages when a computation uses a sharded parameter, or gives it a gradient of the full shape."""


def explained(error: Exception, model: nn.Module, strategy: str) -> Exception:
    """A `ConfigError` in place of torch's error if a parameter was used while it was sharded; else the error itself."""
    words = str(error)
    line = words.partition("\n")[0]
    if any(sign in words for sign in _NOT_GATHERED):
        return ConfigError(
            f"{_reached(error, model)} is used where it is not gathered: parallel.strategy={strategy} gathers a unit's "
            f"parameters for the unit's own forward and backward ({line})",
            "call the whole block, name block_classes that hold both the part and its caller, turn off "
            "compile.enabled if it is on, or set parallel.strategy to ddp or a ZeRO stage",
        )
    if "is a view and is being modified inplace" in words and "RegisterPostBackwardFunction" in words:
        return ConfigError(
            f"{_reached(error, model)} changes its input in place, which parallel.strategy={strategy} needs unchanged",
            "write x = x + y in place of x += y, or set parallel.strategy to ddp or a ZeRO stage",
        )
    return error


def _reached(error: Exception, model: nn.Module) -> str:
    """The module in whose forward an error arose, its unit, and the line of the model's code."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_locals["self"] for frame in frames if id(frame.f_locals.get("self")) in names]
    callers = [frame for frame in frames if not _is_torch(frame) and id(frame.f_locals.get("self")) in names]
    line = f" ({callers[-1].f_code.co_filename}:{callers[-1].f_lineno})" if callers else ""
    if not modules:
        return f"a parameter of {plain_type(model).__name__}"
    part = modules[-1]
    units = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    unit = next((unit for unit in units if any(inner is part for inner in unit.modules())), None)
    if unit is None:
        return f"a parameter of a block, read by {names[id(part)]}{line},"
    return f"{names[id(part)]} in the block {names[id(unit)]}{line}"


REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13
"""Whether a gradient that a rank lacks can count as zero; else FSDP2 would mix it up with another parameter's."""


class UnusedParameters:
    """Counts, for each parameter of a sharded model, the reductions of a step to which this rank gave no gradient.

    Ranks that use different parameters of a unit must still reduce the same ones: FSDP2 packs the gradients of a unit
    into one buffer, without their names. `model`: the sharded model; its units count missing gradients as zero from now
    on, where torch can.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._reductions: Counter[FSDPModule] = Counter()
        self._without: Counter[tuple[FSDPModule, str]] = Counter()
        self._step_is_over = False
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._gathered_once = False
        for unit in self._units:
            if REDUCES_UNUSED:
                unit.set_reduce_scatter_unused_params(True, recurse=False)
            count = torch.compiler.disable(partial(self._count, unit))  # type: ignore[no-untyped-call]
            compat.before_reduction(unit, count)

    def _count(self, unit: FSDPModule, without_gradient: list[Any]) -> None:
        self.begin_step()
        self._reductions[unit] += 1
        for param in without_gradient:
            self._without[unit, self._names[id(param)]] += 1

    def names(self) -> list[str]:
        """The parameters that this rank did not use in the present step; between two steps, in the one that ended."""
        return sorted(name for (unit, name), count in self._without.items() if count == self._reductions[unit])

    def end_step(self) -> None:
        """Restart the count at the next reduction; until then `names` describes the step that has ended.

        The first step gathers the units that it did not use, on all ranks: FSDP2 reduces no zeros for a unit that was
        never gathered, and a rank that uses it later would reduce it alone.
        """
        self._step_is_over = True
        if not self._gathered_once:
            self._gathered_once = True
            for unit in self._units:
                if not compat.was_gathered(unit):
                    unit.unshard()
                    unit.reshard()

    def begin_step(self) -> None:
        """Forget the step that has ended, if one has."""
        if self._step_is_over:
            self._reductions.clear()
            self._without.clear()
            self._step_is_over = False
