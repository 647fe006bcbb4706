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


class KeepReused:
    """Keeps parameters gathered until the update where DeepSpeed would free them before their last use.

    This happens where a module calls itself, and where gradients are taken inside forward (`torch.autograd.grad`): then
    backward goes through the gradient's own graph, where no hook would gather the parameters again.

    Args:
        offload: DeepSpeed's owner of the modules' hooks.

    Attributes:
        in_backward: whether the engine's own backward runs; set by the engine.
    """

    def __init__(self, offload: Any) -> None:
        self.in_backward = False
        self._running: set[int] = set()
        before, after, before_backward = (getattr(offload, name) for name in _MODULE_HOOKS)
        for name, hook in zip(
            _MODULE_HOOKS,
            (self._entering(before), self._leaving(after), self._going_back(before_backward)),
            strict=True,
        ):
            setattr(offload, name, hook)
        offload.module.register_forward_pre_hook(lambda *_: self._running.clear(), prepend=True)

    def _entering(self, gather: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def entering(module: nn.Module) -> None:
            if not self.in_backward:
                if id(module) in self._running:
                    keep(module.parameters())
                self._running.add(id(module))
            gather(module)

        return entering

    def _leaving(self, release: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def leaving(module: nn.Module) -> None:
            self._running.discard(id(module))
            release(module)

        return leaving

    def _going_back(self, gather: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def going_back(module: Any) -> None:
            if not self.in_backward:
                keep(module.parameters(recurse=False))
                keep(param for _, param in module.ds_external_parameters())
            gather(module)

        return going_back


def keep(params: Iterable[Any]) -> None:
    """Leave parameters gathered from their next gather until the update."""
    for param in params:
        param.is_external_param = True
