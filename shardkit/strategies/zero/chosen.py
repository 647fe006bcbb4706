"""Parameters that a rank may skip in a step (experts): gathered, reduced and updated alike on every rank.

DeepSpeed pairs the ranks' gathers and reductions by their order alone, and updates a parameter group as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...config.capability import CAPABILITIES
from ...config.load import resolve_batch
from ...config.schema import RunConfig, StrategyName
from ...errors import ConfigError
from ...parallel.blocks import chosen_members
from ...parallel.world import World
from .gathers import gather_with_callers
from .state import ENGINE, masters, stage_of

_OPTIMIZERS = ("stage_1_and_2.DeepSpeedZeroOptimizer", "stage3.DeepSpeedZeroOptimizer_Stage3")
for _optimizer in _OPTIMIZERS:
    for _name in ("reduce_ready_partitions_and_remove_grads", "_optimizer_step"):
        ENGINE.use(f"deepspeed.runtime.zero.{_optimizer}.{_name}")
for _name in ("setup_buckets", "use_grad_accum_attribute", "fill_grad_accum_attribute", "get_gradient_for_reduction"):
    ENGINE.use(f"deepspeed.runtime.zero.{_OPTIMIZERS[0]}.{_name}")


class ChosenParts:
    """Handles list members that the data may choose (experts) under ZeRO; without any, every method does nothing.
    It also completes the gradients of a step that accumulate on the host (`_LastBackward`).

    Call `split_groups` before `deepspeed.initialize` and `attach` after it. `model`: the model without the engine's
    wrapper. `blocks`: modules that every rank calls, or those of towers. `parts`: of a model with towers, which ranks
    may skip whole; see `find_parts`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        parts: Mapping[str, nn.Module],
        config: RunConfig,
        world: World,
    ) -> None:
        members = {} if config.parallel.find_unused is False else chosen_members(model, blocks)
        self._model, self._members, self._world = model, members, world
        self._strategy: StrategyName = config.parallel.strategy
        self._accumulates_on_host = (
            config.parallel.offload_optimizer != "none" and resolve_batch(config, world.size) > 1
        )
        self._member_of = _owners(model, parts)
        for name in sorted(members, key=len):  # the innermost member comes last
            self._member_of |= {id(p): name for p in members[name].parameters() if p.requires_grad}
        self._names = {
            id(p): fqn for fqn, p in model.named_parameters() if id(p) in self._member_of or (parts and p.requires_grad)
        }
        self._used: set[int] = set()
        self._skipped: set[int] = set()
        self._copies: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._order: _AgreedOrder | None = None
        self._last_backward: _LastBackward | None = None
        self._is_last = True

    def split_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each member parameter groups of its own, so that it can be left out of an update and count its steps."""
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups if self._names else ():
            by_member: dict[str, list[nn.Parameter]] = {}
            for param in group["params"]:
                by_member.setdefault(self._member_of.get(id(param), ""), []).append(param)
            (_, group_params), *later_members = sorted(by_member.items())
            group["params"] = group_params
            copies = [{**group, "params": params} for _, params in later_members]
            self._copies += [(copy, group) for copy in copies]
            groups += [group, *copies]
        optimizer.param_groups = groups or optimizer.param_groups

    def attach(self, zero: Any) -> None:
        """Take over the order of DeepSpeed's reductions, its gathers of the members and its update of their groups."""
        if stage_of(zero) == 3:
            gather_with_callers(self._model, self._members, zero)
        self._zero = zero
        if self._accumulates_on_host and stage_of(zero) > 1:
            self._last_backward = _LastBackward(zero, self._model, self._world.device)
        if self._names:
            self._count(self._names)
            self._agree_on_order()

    def allow(self, names: Collection[str]) -> None:
        """Let ranks use these parameters differently too, from the present backward on; collective.

        They have no parameter groups of their own: a step in which no rank uses them is refused.
        """
        fresh = {id(p): fqn for fqn, p in self._model.named_parameters() if fqn in names and id(p) not in self._names}
        self._names |= fresh
        self._count(fresh)
        if self._order is None:
            self._agree_on_order().begin(self._is_last)

    def _count(self, keys: Collection[int]) -> None:
        """Note which of these parameters, by id, get gradients on this rank."""
        for group in masters_of(self._zero):
            for param in group:
                key = id(param)
                if key in keys:
                    param.register_hook(lambda _, key=key: self._used.add(key))  # type: ignore[no-untyped-call]

    def _agree_on_order(self) -> _AgreedOrder:
        self._order = _AgreedOrder(self._zero, self._model, self._world)
        update = self._zero._optimizer_step
        self._zero._optimizer_step = lambda index: None if index in self._skipped else update(index)
        return self._order

    def begin_backward(self, is_last: bool) -> None:
        """Call before each backward; `is_last` on the step's last micro-batch."""
        self._is_last = is_last
        if self._last_backward is not None:
            self._last_backward.begin()
        if self._order is not None:
            self._order.begin(is_last)

    def complete(self) -> None:
        """Give the parameters that a backward left out on this rank, but not on others, gradients of zeros; called
        before DeepSpeed ends that backward."""
        if self._order is not None:
            self._order.complete()
        if self._last_backward is not None and self._is_last:
            self._last_backward.complete()

    def before_step(self) -> None:
        """Find the groups that no rank used in this step: they are not updated; collective."""
        if self._order is None:
            return
        for copy, group in self._copies:
            copy |= {key: value for key, value in group.items() if key != "params"}
        counts = self._world.sum([float(key in self._used) for key in self._names])
        used = {key for key, count in zip(self._names, counts, strict=True) if count}
        self._used.clear()
        self._skipped.clear()
        used_in_part: list[int] = []
        for index, params in enumerate(masters_of(self._zero)):
            unused = [id(param) for param in params if id(param) in self._names and id(param) not in used]
            if len(unused) < len(params):
                used_in_part += unused
            else:
                self._skipped.add(index)
        if used_in_part:
            raise self._used_in_part(used_in_part)

    def _used_in_part(self, unused: Sequence[int]) -> ConfigError:
        """The error for a group of which these parameters, by id, got no gradient on any rank."""
        member, name = self._member_of.get(unused[0]), self._names[unused[0]]
        if member is None:
            n_trained = sum(len(params) for params in masters_of(self._zero))
            return ConfigError(
                f"{len(unused)} of {n_trained} parameters got no gradient in this step on any rank ({name}"
                f"{', …' if len(unused) > 1 else ''}), which parallel.strategy={self._strategy} cannot train: "
                f"{CAPABILITIES['unused_params'].reasons[self._strategy]}",
                "freeze them (requires_grad_(False)), use them in the loss, or set parallel.strategy=fsdp",
            )
        return ConfigError(
            f"{member} was used in part in this step: {name} got no gradient on any rank, which parallel.strategy="
            f"{self._strategy} cannot leave alone by itself",
            "use all of the module's parameters, freeze those, or set parallel.strategy=fsdp",
        )


def _owners(model: nn.Module, parts: Mapping[str, nn.Module]) -> dict[int, str]:
    """Map each trained parameter, by id, to the part of a model with towers that owns it; those of the largest part
    belong together with what no part owns."""
    if not parts:
        return {}
    sizes = {
        name: sum(int(getattr(param, "ds_numel", param.numel())) for param in part.parameters())
        for name, part in parts.items()
    }
    largest = max(sizes, key=sizes.__getitem__)
    owners = {id(param): fqn for fqn, param in model.named_parameters() if param.requires_grad}  # of modules around
    for name, part in parts.items():
        owners |= {id(param): name for param in part.parameters() if param.requires_grad}
    return {key: name for key, name in owners.items() if name != largest}


def masters_of(zero: Any) -> list[list[nn.Parameter]]:
    """The parameters of each flat master, in the order of DeepSpeed's updates."""
    return [params for _, params, _ in masters(zero, stage_of(zero))]


def _reductions(zero: Any, model: nn.Module) -> list[tuple[Any, ...]]:
    """The arguments of DeepSpeed's reduction of each parameter's gradient, in about the order in which they come."""
    position = {id(param): index for index, param in enumerate(model.parameters())}
    groups = zero.fp16_groups if stage_of(zero) == 3 else zero.bit16_groups
    params = [(param, index) for index, group in enumerate(groups) for param in group if param.requires_grad]
    params.sort(key=lambda pair: -position[id(pair[0])])
    return [(param,) if stage_of(zero) == 3 else (param, index) for param, index in params]


def _set_zero(zero: Any, param: Any, device: torch.device) -> None:
    """Give a parameter a gradient of zeros, unless earlier micro-batches left it one."""
    if stage_of(zero) < 3:
        zero.setup_buckets()
        if zero.get_gradient_for_reduction(param) is not None:
            return
        param.grad = torch.zeros_like(param)
        if zero.use_grad_accum_attribute:
            zero.fill_grad_accum_attribute()
        return
    shard = param.data  # empty while the parameter is not gathered; torch wants a gradient of the data's shape
    param.data = torch.zeros(param.ds_shape, dtype=param.ds_tensor.dtype, device=device)
    param.grad = torch.zeros_like(param)
    param.data = shard


class _LastBackward:
    """Gives a parameter that a step's last backward left out on every rank a gradient of zeros.

    On the host, DeepSpeed takes what a parameter's gradients have summed up to when the last backward brings one. Else
    the update would lose what earlier micro-batches gave the parameter, and use an older gradient.
    """

    def __init__(self, zero: Any, model: nn.Module, device: torch.device) -> None:
        self._zero, self._device, self._reductions = zero, device, _reductions(zero, model)
        self._reduce = zero.reduce_ready_partitions_and_remove_grads
        zero.reduce_ready_partitions_and_remove_grads = self._note_and_reduce
        self._reduced: set[int] = set()

    def begin(self) -> None:
        self._reduced = set()

    def _note_and_reduce(self, param: nn.Parameter, *group: int) -> None:
        self._reduced.add(id(param))
        self._reduce(param, *group)

    def complete(self) -> None:
        for arguments in self._reductions:
            if id(arguments[0]) not in self._reduced:
                _set_zero(self._zero, arguments[0], self._device)
                self._reduce(*arguments)


class _AgreedOrder:
    """Reduces gradients in one order on every rank; a gradient that a rank lacks counts as zero.

    A gradient waits until all before it in the order are reduced. Those that never come are found at the end of
    backward. The order is the reverse of the model's parameters, and from the second backward on that of rank 0's
    gradients in the first.
    """

    def __init__(self, zero: Any, model: nn.Module, world: World) -> None:
        self._zero, self._world, self._stage = zero, world, stage_of(zero)
        self._arguments = _reductions(zero, model)
        self._reduce = zero.reduce_ready_partitions_and_remove_grads
        self._position = {id(arguments[0]): position for position, arguments in enumerate(self._arguments)}
        self._arrivals: list[int] | None = []
        zero.reduce_ready_partitions_and_remove_grads = self._arrived
        self.begin(True)

    def begin(self, is_last: bool) -> None:
        self._reduces = is_last or self._stage > 1  # ZeRO-1 keeps the gradients of the other micro-batches
        self._waiting: set[int] = set()
        self._next = 0

    def _arrived(self, param: nn.Parameter, *group: int) -> None:
        if not self._reduces:
            return
        position = self._position[id(param)]
        self._waiting.add(position)
        if self._arrivals is not None:
            self._arrivals.append(position)
        while self._next in self._waiting:
            self._waiting.remove(self._next)
            self._reduce(*self._arguments[self._next])
            self._next += 1

    def complete(self) -> None:
        if not self._reduces:
            return
        for position in range(self._next, len(self._arguments)):
            if position not in self._waiting:
                _set_zero(self._zero, self._arguments[position][0], self._world.device)
            self._reduce(*self._arguments[position])
        if self._arrivals is not None:
            self._reorder(self._arrivals)

    def _reorder(self, arrivals: list[int]) -> None:
        """Take over rank 0's order of this first backward; collective."""
        arrivals_of_first_rank: Any = self._world.gather(arrivals)[0] if self._world.size > 1 else arrivals
        positions = [
            *dict.fromkeys(arrivals_of_first_rank),
            *(position for position in range(len(self._arguments)) if position not in set(arrivals_of_first_rank)),
        ]
        self._arguments = [self._arguments[position] for position in positions]
        self._position = {id(arguments[0]): position for position, arguments in enumerate(self._arguments)}
        self._arrivals = None
