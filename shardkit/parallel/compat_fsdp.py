"""Private names of FSDP2 that training uses; see `compat` for torch's other ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ..config.libraries import Feature

GATHERED = Feature("gathered parameters and unreduced gradients of FSDP2 in memory's categories")
REACH = Feature("FSDP2 with parameters that are used outside of their unit's forward")
PACKED = Feature("FSDP2 over weights in 4 bits")

_FSDP = "torch.distributed.fsdp._fully_shard"
_fsdp = [
    GATHERED.use("torch.distributed.fsdp.FSDPModule._get_fsdp_state"),
    GATHERED.use(f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_group"),
    GATHERED.use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params"),
    GATHERED.use(f"{_FSDP}._fsdp_param.FSDPParam.all_gather_outputs"),
    GATHERED.use(f"{_FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad"),
]
_reach = [
    REACH.use(f"{_FSDP}._fsdp_state.FSDPState._training_state"),
    REACH.use(f"{_FSDP}._fsdp_state.FSDPState._state_ctx"),
    REACH.use(f"{_FSDP}._fsdp_state.FSDPStateContext.post_backward_final_callback_queued"),
    REACH.use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup._training_state"),
    REACH.use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup.post_backward"),
    REACH.use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup.finalize_backward"),
]
_INTEGERS = "https://github.com/pytorch/pytorch/issues/177844"
_nn_of_fsdp = PACKED.use(f"{_FSDP}._fsdp_param.nn", _INTEGERS, until="2.13.0")
PACKED.use(f"{_FSDP}._fsdp_param.FSDPParam.init_dtype_attrs", _INTEGERS, until="2.13.0")
REACH.use(f"{_FSDP}._fsdp_param.FSDPParam._unsharded_param")
REACH.use(f"{_FSDP}._fsdp_param.FSDPParam.sharded_param")


def shard(modules: Any, **options: Any) -> None:
    """torch's `fully_shard`. Integer parameters before torch 2.13, too: it would ask for their gradients and cast them.

    `modules`: a module, or several that become one unit.
    """
    if not _nn_of_fsdp.needed():
        fully_shard(modules, **options)
        return
    _nn_of_fsdp.find()
    with patch(f"{_FSDP}._fsdp_param.nn", _NnWithIntegerParameters()):
        fully_shard(modules, **options)
    for param in _fsdp_params(modules[0] if isinstance(modules, list) else modules):
        if not param.sharded_param.is_floating_point():
            param.init_dtype_attrs = partial(_init_without_cast, param, param.init_dtype_attrs)


def _init_without_cast(param: Any, init: Callable[[Any], None], policy: Any) -> None:
    init(policy)
    param.param_dtype = None


class _NnWithIntegerParameters:
    """`torch.nn`, whose parameters need no gradient where their type has none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(tensor: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(tensor, requires_grad and (tensor.is_floating_point() or tensor.is_complex()))


def is_one_unit(module: Any, other: Any) -> bool:
    """Whether two modules were sharded together, as one unit of FSDP2."""
    return module._get_fsdp_state() is other._get_fsdp_state()


def gathered_params(module: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors into which FSDP2 gathers a module's parameters; their storages have bytes only while needed."""
    for param in _fsdp_params(module):
        yield from getattr(param, "all_gather_outputs", ())


def unreduced_grads(module: Any) -> Iterator[torch.Tensor]:
    """Yield the unsharded gradients that FSDP2 keeps while gradient synchronisation is off."""
    for param in _fsdp_params(module):
        grad = getattr(param, "unsharded_accumulated_grad", None)
        if grad is not None:
            yield grad


def reduce_gradients(module: Any) -> None:
    """Reduce the gradients of FSDP2's unit `module` and free its parameters, as the end of its backward does."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        group.post_backward()
        group.finalize_backward()


def before_reduction(module: Any, note: Callable[[list[Any]], None]) -> None:
    """Call `note` each time FSDP2 is about to reduce the gradients of its unit `module`.

    `note`: takes the trained parameters, sharded, that have no gradient to reduce.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    reduce = group.post_backward

    def noted(*unused: Any) -> Any:
        if group.reduce_grads:
            note([param.sharded_param for param in group.fsdp_params if _lacks_gradient(param)])
        return reduce(*unused)

    group.post_backward = noted


def _lacks_gradient(param: Any) -> bool:
    if param.unsharded_accumulated_grad is not None or not param.sharded_param.requires_grad:
        return False
    gathered = getattr(param, "_unsharded_param", None)
    return gathered is None or gathered.grad is None


def was_gathered(module: Any) -> bool:
    """Whether FSDP2's unit `module` has been gathered yet. Before that, its missing gradients cannot count as zero."""
    return all(getattr(param, "_unsharded_param", None) is not None for param in _fsdp_params(module))


def has_gradients(module: Any) -> bool:
    """Whether FSDP2's unit `module` has gradients of gathered parameters that are not reduced yet."""
    params = (getattr(param, "_unsharded_param", None) for param in _fsdp_params(module))
    return any(param is not None and param.grad is not None for param in params)


@contextmanager
def backward_inside_forward(root: Any, units: Sequence[Any]) -> Iterator[list[Any]]:
    """Inside, a backward leaves the state of FSDP2 as it was.

    Otherwise torch would take the end of that backward for the end of the step, and free the root's parameters in the
    middle of forward.

    Yields:
        A list, which at the end holds those of `units` through which the backward went.
    """
    entered: list[Any] = []
    states = [unit._get_fsdp_state() for unit in units]
    parts = [(state, *([state._fsdp_param_group] if state._fsdp_param_group else [])) for state in states]
    before = [[part._training_state for part in group_states] for group_states in parts]
    context = root._get_fsdp_state()._state_ctx
    queued, context.post_backward_final_callback_queued = context.post_backward_final_callback_queued, True
    try:
        yield entered
    finally:
        context.post_backward_final_callback_queued = queued
        for unit, group_states, earlier in zip(units, parts, before, strict=True):
            if [part._training_state for part in group_states] != earlier:
                entered.append(unit)
            for part, state in zip(group_states, earlier, strict=True):
                part._training_state = state


def _fsdp_params(module: Any) -> Sequence[Any]:
    try:
        group = module._get_fsdp_state()._fsdp_param_group
        params: Sequence[Any] = () if group is None else group.fsdp_params
        if params:
            _ = params[0].all_gather_outputs, params[0].unsharded_accumulated_grad
    except AttributeError:
        gone = next((name for name in _fsdp if not name.exists()), None)
        if gone is None:
            raise
        GATHERED.lost(gone)
        return ()
    return params
