"""FSDP2: each block's parameters sharded by rows, gathered for its forward and backward; hsdp replicates the shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from ..config.schema import RunConfig
from ..errors import ConfigError
from ..memory.rows import StateKind
from ..parallel.blocks import Unit, chosen_by_data, find_parts, find_units
from ..parallel.compat import accumulated_hooks_of, gathered_params, hooks_of, shard, unreduced_grads
from ..parallel.experts import shard_experts
from ..parallel.mesh import data_mesh
from ..parallel.precision import compute_dtype, engine_forward, loss_scaler, master_dtype, reduce_dtype, routers_of
from ..parallel.runs import Runs, runs_of
from ..parallel.weights import Weights
from ..parallel.world import World
from .base import Facts, OptimizerFactory, Shard, StepRequest, Update
from .reach import REDUCES_UNUSED, Reach, UnusedParameters, explained, without_views
from .states import TorchStates, buffer_shards, with_scalars
from .step import clip_and_step

Hook = Callable[[torch.Tensor], Any]


class FSDP(TorchStates):
    """`fsdp` (one shard group) and `hsdp` (dp_replicate groups of dp_shard ranks)."""

    name: str
    facts = Facts(
        shards_state=True, shards_parameters=True, needs_same_calls=True, counts_unused_as_zero=REDUCES_UNUSED
    )
    model: nn.Module
    elementwise = True

    def __init__(self, config: RunConfig, world: World) -> None:
        self.name = config.parallel.strategy
        self._config = config
        self._world = world
        self._scaler = loss_scaler(config.precision, world.device)
        self._no_sync = config.parallel.no_sync is True
        self._offload = config.parallel.offload_param == "cpu"
        self._reduces = True
        """Whether the present micro-batch's backward reduces gradients."""
        self._order_differs = False
        """Whether ranks may call units in different orders, since the data choose."""
        self._unused: UnusedParameters | None = None
        """The parameters that this rank did not use in the step; `None` on a single rank."""
        self._parts: dict[str, nn.Module] = {}
        """The parts of a model with towers, which ranks may skip whole."""
        self._inner_units: list[FSDPModule] = []
        """Units that several others call, and that are not held."""
        self._blocks: Sequence[nn.Module] = ()
        self._may_differ: list[str] = []
        """The parameters that the data may choose (experts): ranks may use different ones."""

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        self._scalars = weights.scalars
        is_on_meta = any(p.is_meta for p in model.parameters())
        chosen_names = chosen_by_data(model, blocks)
        if self._world.size > 1 and self._config.parallel.find_unused is not False:
            self._parts = find_parts(model, blocks)
        units = find_units(model, blocks)  # innermost first; the model, with all that no other unit owns, is the last
        parameter_hooks = take_hooks(model)
        engine_forward(model, self._world.device, self._config.precision, self.name)
        self._reach = Reach(model, self.name, observes=not self._config.compile.enabled)
        on_gpu, precision = self._world.device.type == "cuda", self._config.precision
        dtype = compute_dtype(precision)
        param_dtype = None if dtype == master_dtype(precision) else dtype
        policy: dict[str, Any] = {
            "mesh": self.make_mesh(),
            "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype(precision)),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self._offload else OffloadPolicy(),
        }
        if self._world.experts is not None:
            shard_experts(
                model, self._world.experts, self._world.loss_size,
                {**policy, "reshard_after_forward": self.reshards}, self._config.compile.enabled,
            )  # fmt: skip
        if param_dtype is not None:
            fp32 = {**policy, "mp_policy": replace(policy["mp_policy"], param_dtype=None)}
            for router in routers_of(model, precision):  # a block's unit would gather their weights in 16 bits
                router.register_forward_hook(without_views)
                shard(router, reshard_after_forward=self.reshards, **fp32)
        for unit in units[:-1]:  # modules inside of a unit that are sharded before stay units of their own
            self._shard_unit(unit, policy)
        if precision.output_dtype == "fp32":  # the model's output may have another dtype than a block's
            policy["mp_policy"] = replace(policy["mp_policy"], output_dtype=torch.float32)
        # The root's own parameters (embeddings, head) are needed first in backward: gathered once.
        shard(model, reshard_after_forward=False, **policy)
        for fqn, param in model.named_parameters():
            if not isinstance(param, DTensor):
                raise ConfigError(
                    f"parallel.strategy={self.name} does not shard {fqn}: no unit owns it, and its gradient would not "
                    "be reduced over ranks",
                    "register it in a module that the model calls, or set parallel.strategy=ddp or a ZeRO stage",
                )
        self._reach.watch(model)
        # Units that are called in any order, or not by every rank, stay gathered for the whole step.
        for unit in units:
            is_chosen = unit.kind == "shared" and not chosen_names.isdisjoint(unit.names)
            self._order_differs |= is_chosen
            if unit.kind == "tied" or is_chosen:
                self._reach.hold(unit.modules[0])
        inner = [unit.modules[0] for unit in units if unit.kind == "shared"]
        self._inner_units = [m for m in inner if isinstance(m, FSDPModule) and not self._reach.is_held(m)]
        self._blocks = blocks
        self._prefetch(model, blocks)
        self._hook_gathered(model, parameter_hooks)
        if is_on_meta:
            self._materialise(model, weights)
        if self._world.size > 1:
            # In a model with towers any parameter may be unused on some rank: a projector, a part of a tower.
            trained = (name for name, param in model.named_parameters() if param.requires_grad)
            self._may_differ = sorted(trained if self._parts else chosen_names)
            self._unused = UnusedParameters(model)
        self._wrapped = self.model = self._bare = model
        self.optimizer = make_optimizer(model)
        self._parameters = list(model.parameters())

    def _shard_unit(self, unit: Unit, policy: dict[str, Any]) -> None:
        # FSDP2's hooks are not compiled with a block, and this one must not become a graph of its own beside it.
        copy_views: Callable[..., Any] = without_views
        if self._config.compile.enabled:
            copy_views = torch.compiler.disable(without_views)  # type: ignore[no-untyped-call]
        for module in unit.modules:
            module.register_forward_hook(copy_views)
        modules = unit.modules[0] if len(unit.modules) == 1 else [*unit.modules]
        shard(modules, reshard_after_forward=self.reshards, **policy)

    @property
    def reshards(self) -> bool:
        """Whether a block's gathered parameters are freed after its forward."""
        return self._config.parallel.reshard_after_forward

    def _prefetch(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Gather the parameters of `parallel.prefetch` blocks ahead; torch's default is one in backward.

        By default torch gathers the unit whose forward ended before. Where ranks call different units (shared experts),
        each rank would gather in another order: then the blocks are named here, and no other unit gathers ahead. Nor
        does a block of one tower gather one of another, which some ranks skip.
        """
        ahead = self._config.parallel.prefetch
        differs = self._order_differs or bool(self._parts)
        if ahead == 1 and not differs:
            return
        part_of = {id(module): name for name, part in self._parts.items() for module in part.modules()}
        stacks: dict[str, list[nn.Module]] = {}
        for block in blocks:
            stacks.setdefault(part_of.get(id(block), ""), []).append(block)
        for stack in stacks.values():
            if ahead != 1:
                _gather_ahead(stack, ahead, FSDPModule.set_modules_to_forward_prefetch)
            _gather_ahead(stack[::-1], ahead, FSDPModule.set_modules_to_backward_prefetch)
        if differs:
            behind_others = [block for stack in stacks.values() for block in stack[1:]]
            nothing_ahead = [m for m in model.modules() if isinstance(m, FSDPModule) and m not in behind_others]
            for unit in nothing_ahead:
                unit.set_modules_to_backward_prefetch([unit])  # gathered by then; an empty list is torch's default

    def _hook_gathered(self, model: nn.Module, hooks: dict[str, list[Hook]]) -> None:
        """Register hooks of gradients on the gathered parameters, which exist from their first gather on."""
        waiting: dict[str, list[Hook]] = dict(hooks)
        places = {fqn: (model.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2]) for fqn in hooks}

        def register(*_: object) -> None:
            for fqn in [*waiting]:
                module, name = places[fqn]
                param = dict(module.named_parameters(recurse=False))[name]
                if not isinstance(param, DTensor):
                    for hook in waiting.pop(fqn):
                        param.register_hook(hook)  # type: ignore[no-untyped-call]
            if not waiting:
                for handle in handles:
                    handle.remove()

        units = [module for module in model.modules() if hooks and isinstance(module, FSDPModule)]
        handles = [unit.register_forward_pre_hook(register) for unit in units]
        self._reach.gathered = register

    def hold(self, part: nn.Module) -> None:
        self._reach.hold_now(part)

    def release(self) -> None:
        self._reach.release(self.reshards)

    def is_held(self, module: nn.Module) -> bool:
        return self._reach.is_held(module)

    def unused(self) -> list[str]:
        return [] if self._unused is None else self._unused.names()

    def explained(self, error: Exception) -> Exception:
        return explained(error, self.model, self.name)

    def allow_differing_use(self, names: Collection[str]) -> None:
        self._may_differ = sorted({*self._may_differ, *names})
        if not self._inner_units:
            return
        # What a rank uses decides where a recomputation begins, hence in which order it would gather these.
        self._order_differs = True
        self._prefetch(self._bare, self._blocks)
        for unit in self._inner_units:
            self._reach.hold(unit)
            unit.unshard()
        self._reach.gathered()
        self._inner_units = []

    def skipped(self, unused: UnusedParameters) -> list[nn.Parameter]:
        """The parameters that no rank used in this step, which a single process would not update.

        Parameters that ranks may choose are counted over ranks, which is collective. Of the others, `BlockCalls`
        compares the names over ranks.
        """
        names = unused.names()
        unused.end_step()
        skipped = set(names) - set(self._may_differ)
        if self._may_differ:
            used = self._world.sum([float(fqn not in names) for fqn in self._may_differ])
            for fqn, count in zip(self._may_differ, used, strict=True):
                if not REDUCES_UNUSED and 0 < count < self._world.size:
                    raise ConfigError(
                        f"{int(count)} of {self._world.size} ranks used {fqn} in this step, which parallel.strategy="
                        f"{self.name} cannot train with torch {torch.__version__}",
                        "install torch 2.13 or later, or set parallel.strategy=ddp",
                    )
                if not count:
                    skipped.add(fqn)
        return [param for fqn, param in self.model.named_parameters() if fqn in skipped] if skipped else []

    def make_mesh(self) -> DeviceMesh:
        """The ranks over which parameters are sharded, and for hsdp replicated."""
        return data_mesh(self._config, self._world.device.type, self._world.env, self._world.mesh)

    def _materialise(self, model: nn.Module, weights: Weights) -> None:
        """Allocate the shards of a model built on meta and draw each one's rows."""
        direct = ((m, m.named_buffers(recurse=False, remove_duplicate=False)) for m in model.modules())
        buffers = [(m, name, buffer) for m, named in direct for name, buffer in named]
        model.to_empty(device="cpu" if self._offload else self._world.device)
        for module, name, buffer in buffers:  # to_empty loses their values too
            setattr(module, name, buffer.to(self._world.device))
        for fqn, param in model.named_parameters():
            assert isinstance(param, DTensor)
            local = param.detach().to_local()  # type: ignore[attr-defined]
            start, _, run, stride = _runs(param)
            weights.fill(fqn, param.shape, local.view(-1), start, run, stride)

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        self._reduces = is_last or not self._no_sync
        if self._no_sync:
            self._wrapped.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            # A tower that no rank enters in the last micro-batch has no backward there that could reduce what it got.
            for part in self._parts.values():
                for unit in part.modules():
                    if isinstance(unit, FSDPModule):
                        unit.set_requires_gradient_sync(True, recurse=False)
            self._reach.keep_held()
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        try:
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._reach.finish_backward(self._reduces)
            self.release()
        except (RuntimeError, AssertionError) as error:
            raise self.explained(error) from error

    def step(self, request: StepRequest) -> Update:
        self._reach.finish_step()
        skipped = self.skipped(self._unused) if self._unused is not None else []
        return clip_and_step(self._parameters, self.optimizer, self._scaler, request, skipped)

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        yield from super().state_tensors()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                for grad in unreduced_grads(module):
                    yield "grads", grad

    def communication_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that FSDP2 gathers parameters into; their storages have bytes only while needed."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield from gathered_params(module)

    def weights_changed(self, replicas_equal: bool = False) -> None:
        """Free gathered parameters: an evaluation leaves some that only a backward would free."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def shards(self) -> Iterator[Shard]:
        return with_scalars(self._shards(), self._scalars)

    def _shards(self) -> Iterator[Shard]:
        self.weights_changed()
        for fqn, param in self.model.named_parameters():
            assert isinstance(param, DTensor)
            replica = _replica(param, self._world)
            start, _, run, stride = _runs(param)
            named = [(f"model.{fqn}", param.detach())]
            named += [
                (f"optim.{fqn}.{key}", value)
                for key, value in self.optimizer.state.get(param, {}).items()
                if isinstance(value, DTensor) and value.shape == param.shape
            ]
            for name, value in named:
                local = value.to_local().view(-1)  # type: ignore[attr-defined]
                yield Shard(name, tuple(param.shape), start, local, replica, run, stride)
        yield from buffer_shards(self.model, self._world.rank)

    def load_targets(self) -> Iterator[Shard]:
        return self.shards()


def _gather_ahead(
    blocks: Sequence[nn.Module], ahead: int, prefetch: Callable[[FSDPModule, list[FSDPModule]], None]
) -> None:
    """Tell each block, in the order of their calls, which of the next ones to gather with it."""
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    assert len(units) == len(blocks)
    for index, unit in enumerate(units):
        prefetch(unit, units[index + 1 : index + 1 + ahead])


def take_hooks(model: nn.Module) -> dict[str, list[Hook]]:
    """The hooks that the model's own code has put on its parameters, by name: sharding replaces the parameters."""
    for fqn, param in model.named_parameters():
        if accumulated_hooks_of(param):
            raise ConfigError(
                f"{fqn} has a hook for its accumulated gradient (register_post_accumulate_grad_hook), which "
                "parallel.strategy=fsdp and hsdp do not call: they shard the gradient",
                "use register_hook, or set parallel.strategy=ddp",
            )
    return {fqn: hooks for fqn, param in model.named_parameters() if (hooks := hooks_of(param))}


def _replica(param: DTensor, world: World) -> int:
    """0 on the first of the ranks that hold the same part of a parameter."""
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or ()
    replica = 0
    for dim, placement in enumerate(param.placements):
        if placement.is_replicate():
            replica = replica * mesh.size(dim) + mesh.get_local_rank(dim)
    if not any(name.startswith(("tp", "ep")) for name in names):  # it lies between layers that ranks share: each has it
        replica = replica * world.tp + world.rank % world.tp
    return replica


def _runs(param: DTensor) -> Runs:
    """The elements of a sharded parameter that this rank holds."""
    mesh = param.device_mesh
    return runs_of(param.shape, mesh.shape, mesh.get_coordinate() or (), param.placements)
