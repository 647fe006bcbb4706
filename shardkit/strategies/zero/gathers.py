"""ZeRO-3: which modules gather parameters, and how long these stay gathered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError, gib
from .state import ENGINE

_LOG = logging.getLogger(__name__)
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload"
for _name in ("forward_hooks", "backward_hooks"):
    ENGINE.use(f"{_OFFLOAD}.{_name}")
_MODULE_HOOKS = (
    "pre_sub_module_forward_function",
    "post_sub_module_forward_function",
    "pre_sub_module_backward_function",
)
for _name in _MODULE_HOOKS:
    ENGINE.use(f"{_OFFLOAD}.{_name}")
ENGINE.use("deepspeed.runtime.zero.partition_parameters.Init.is_external_param")
_PERSISTENT = ENGINE.use(
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.persistent_parameters", until="0.19.8"
)
for _name in ("is_invalid_trace", "_invalidate_trace", "fetch_sub_module"):
    ENGINE.use(f"deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.{_name}")


def gather_with_callers(model: nn.Module, members: Mapping[str, nn.Module], zero: Any) -> None:
    """ZeRO-3: gather the members of a list together when the module around the list is called, on every rank.

    The members lose their own hooks, which would gather only on the ranks that call them.
    """
    if not members:
        return
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    modules = dict(model.named_modules())
    inner_modules = {id(inner): inner for member in members.values() for inner in member.modules()}
    sizes: dict[str, int] = {}
    param: Any
    for name, member in members.items():
        caller = _caller(name, modules)
        if id(modules[caller]) in inner_modules:  # a list inside a member: gathered with the outer list
            continue
        for param in member.parameters():
            register_external_parameter(modules[caller], param)
            sizes[caller] = sizes.get(caller, 0) + int(param.ds_numel) * param.ds_tensor.element_size()
    _remove_hooks(list(inner_modules.values()), zero.parameter_offload)
    for name, member in members.items():
        member.register_forward_pre_hook(partial(_check_gathered, name, type(modules[_caller(name, modules)]).__name__))
    caller, size = max(sizes.items(), key=lambda named: named[1])
    if torch.distributed.get_rank() == 0:
        _LOG.info(
            "zero3 gathers lists whose members the data may choose whole, in %d modules: %s at most, in %s. If every "
            "rank calls every member, parallel.find_unused=false gathers them one by one",
            len(sizes), gib(size), caller or "the model",
        )  # fmt: skip


def _caller(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Name of the nearest module around a list that has a forward of its own."""
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]).forward is not nn.Module.forward:
            return name
    return ""


def _remove_hooks(modules: Sequence[nn.Module], offload: Any) -> None:
    """Remove DeepSpeed's hooks from modules, and leave the modules' other hooks."""
    hooks: set[int] = set()
    for module in modules:
        registered = module.register_forward_pre_hook(_nothing), module.register_forward_hook(_nothing)
        for handle in registered:
            hooks.add(id(handle.hooks_dict_ref()))
            handle.remove()
    for handles in (offload.forward_hooks, offload.backward_hooks):
        for handle in handles:
            if id(handle.hooks_dict_ref()) in hooks:
                handle.remove()


def _nothing(*_: Any) -> None:
    pass


def _check_gathered(name: str, caller: str, member: nn.Module, *_: Any) -> None:
    """Refuse a member's call outside of the module that gathers it: one rank alone would gather it, or compute with
    nothing."""
    if any(param.ds_status.name != "AVAILABLE" for param in member.parameters()):  # type: ignore[attr-defined]
        raise ConfigError(
            f"{name} was called outside of {caller}'s forward, in which parallel.strategy=zero3 gathers it",
            f"call it in the forward of {caller}, or set parallel.strategy=zero2 or fsdp",
        )


class DifferingBlocks:
    """Gathers a block whole, if ranks use different parts of it (a branch chosen by the data), and keeps it gathered
    from its first call to the update.

    Ranks would gather its layers in different orders otherwise: in backward, too, since what a rank uses decides where
    a recomputation begins.
    """

    def __init__(self, model: nn.Module, offload: Any) -> None:
        self._model, self._offload = model, offload
        self._names = {id(module): name for name, module in model.named_modules()}
        self._gathered_ids: set[int] = set()
        self._differing: list[nn.Module] = []
        self._passing: list[Any] = []
        self._passing_ids: set[int] = set()

    def expect(self) -> None:
        """Learn that ranks may skip parts of the model: DeepSpeed must not gather ahead into one."""
        self._model.register_forward_pre_hook(self._forget_trace)  # after DeepSpeed's own hook, which begins a trace

    def gather(self, block: nn.Module, part: nn.Module) -> None:
        """Gather the part, which only some ranks call in this forward; collective."""
        self._fetch(part)
        self._differing.append(block)

    def _fetch(self, part: nn.Module) -> None:
        self._forget_trace()
        keep(part.parameters())
        for module in part.modules():
            self._offload.get_param_coordinator().fetch_sub_module(module, forward=True)

    def hold(self, part: nn.Module) -> None:
        """Gather a part, which only some ranks call in this forward, and keep it to `release`; collective."""
        self._passing += [param for param in part.parameters() if not param.is_external_param]  # type: ignore[attr-defined]
        self._passing_ids.update(id(module) for module in part.modules())
        self._fetch(part)

    def is_held(self, module: nn.Module) -> bool:
        return id(module) in self._passing_ids

    def release(self, frees: bool) -> None:
        """Let the parts of `hold` be gathered and freed by their own calls again.

        `frees`: free them now. The update does it after a backward.
        """
        for param in self._passing:
            param.is_external_param = False
            if frees and not param.ds_persist and param.ds_status.name == "AVAILABLE":
                param.ds_active_sub_modules.clear()
                param.partition()
        self._passing.clear()
        self._passing_ids.clear()

    def end_forward(self) -> None:
        """Gather the blocks in which `gather` was called; collective then. Before, ranks were inside and outside of
        them."""
        blocks = {id(block): block for block in self._differing if id(block) not in self._gathered_ids}
        self._differing.clear()
        if not blocks:
            return
        from deepspeed.runtime.zero.partition_parameters import register_external_parameter

        if not self._gathered_ids:  # after DeepSpeed's own hook, which begins a trace
            self._model.register_forward_pre_hook(self._forget_trace)
        for block in blocks.values():
            self._gathered_ids.add(id(block))
            keep(block.parameters())
            for param in block.parameters():
                register_external_parameter(block, param)
            self._offload.get_param_coordinator().fetch_sub_module(block, forward=True)
        if torch.distributed.get_rank() == 0:
            names = ", ".join(self._names[key] for key in blocks)
            _LOG.warning("ranks use different parts of %s, which zero3 keeps gathered to the update from now on", names)

    def _forget_trace(self, *_: Any) -> None:
        """DeepSpeed gathers ahead by a trace of the calls, which has to be the same on every rank."""
        coordinator = self._offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


class KeepReused:
    """Keeps parameters gathered until the update where DeepSpeed would free them before their last use.

    This happens where a module calls itself, and where gradients are taken inside forward (`torch.autograd.grad`): then
    backward goes through the gradient's own graph, where no hook would gather the parameters again. `offload`:
    DeepSpeed's owner of the modules' hooks.
    """

    def __init__(self, offload: Any) -> None:
        self.in_backward = False  # whether the engine's own backward runs; set by the engine
        self._running: set[int] = set()
        before, after, before_backward = (getattr(offload, name) for name in _MODULE_HOOKS)

        def entering(module: nn.Module) -> None:
            if not self.in_backward:
                if id(module) in self._running:
                    keep(module.parameters())
                self._running.add(id(module))
            before(module)

        def leaving(module: nn.Module) -> None:
            self._running.discard(id(module))
            after(module)

        def going_back(module: Any) -> None:
            if not self.in_backward:
                keep(module.parameters(recurse=False))
                keep(param for _, param in module.ds_external_parameters())
            before_backward(module)

        for name, hook in zip(_MODULE_HOOKS, (entering, leaving, going_back), strict=True):
            setattr(offload, name, hook)
        offload.module.register_forward_pre_hook(lambda *_: self._running.clear(), prepend=True)


def keep_behind_other_outputs(model: nn.Module) -> None:
    """Keep a module's own parameters gathered to the update if its output is no tensor, tuple, list or dict.

    DeepSpeed finds no tensors in other outputs (a dataclass), and so not the moment before the module's backward.
    """

    def look(module: Any, args: Any, output: Any) -> None:
        if _is_opaque(output):
            keep(module.parameters(recurse=False))
            keep(param for _, param in module.ds_external_parameters())

    for module in model.modules():
        module.register_forward_hook(look, prepend=True)  # before DeepSpeed's hook, which frees the parameters


def _is_opaque(output: Any) -> bool:
    """Whether an output holds objects in which DeepSpeed looks for no tensors."""
    if isinstance(output, (tuple, list, dict)):
        return any(map(_is_opaque, output.values() if isinstance(output, dict) else output))
    return not isinstance(output, (torch.Tensor, str, int, float, type(None)))


def compare_before_gathers(named: Iterable[tuple[str, Any]], compare: Callable[[str], None]) -> None:
    """Call `compare` with a parameter's name before a read outside of its module's call gathers it."""

    def compared(name: str, param: Any, gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        compare(name)
        if args or kwargs or param.ds_status.name != "AVAILABLE":  # comparing may have gathered it on every rank
            return gather(*args, **kwargs)
        return None

    for name, param in named:
        param.all_gather = partial(compared, name, param, param.all_gather)


def gather_persistent_in_turn(zero: Any) -> None:
    """Gather the parameters that stay whole between steps one after another.

    DeepSpeed before 0.19.8 gathers them together, but waits for the last gather alone, which leaves gloo's others in
    flight.
    """
    if not _PERSISTENT.needed() or not zero.persistent_parameters:
        return
    first, gathers = zero.persistent_parameters[0], [param.all_gather for param in zero.persistent_parameters]

    def in_turn(params: Any = None, *args: Any, **kwargs: Any) -> Any:
        if params is not zero.persistent_parameters:
            return gathers[0](params, *args, **kwargs)
        for gather in gathers:
            gather()
        return None

    first.all_gather = in_turn


def keep(params: Iterable[Any]) -> None:
    """Leave parameters gathered from their next gather until the update."""
    for param in params:
        param.is_external_param = True
