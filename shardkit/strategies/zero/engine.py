"""ZeRO-1/2/3 through DeepSpeed's engine, with offload. Only this package imports deepspeed."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from ...activation.tiles import is_tiled
from ...config.libraries import Private
from ...config.load import resolve_batch
from ...config.schema import RunConfig
from ...errors import ConfigError
from ...memory.rows import StateKind
from ...parallel import compat
from ...parallel.blocks import find_parts
from ...parallel.precision import engine_forward
from ...parallel.weights import Weights
from ...parallel.world import World
from ..base import Facts, OptimizerFactory, Shard, StepRequest, Strategy, Update
from ..states import buffer_shards, with_scalars
from ..step import skipping
from .chosen import ChosenParts
from .config import build_cpu_adam, build_ds_config
from .gathers import (
    DifferingBlocks,
    KeepReused,
    compare_before_gathers,
    gather_persistent_in_turn,
    keep_behind_other_outputs,
)
from .state import (
    EPILOGUE,
    GROUP_NORMS,
    IS_INVALID,
    MASK,
    BuiltInPartitions,
    create_zero_states,
    frozen_shards,
    kept_buffers,
    offloaded,
    partition_model,
    refresh_compute_weights,
    set_zero_scalars,
    share_rates,
    stage_of,
    state_of,
    zero3_shards,
    zero12_shards,
    zero_scalars,
)


class ZeRO(Strategy):
    prepare_cpu_adam = staticmethod(build_cpu_adam)

    def __init__(self, config: RunConfig, world: World) -> None:
        self.name = config.parallel.strategy
        sharding = config.parallel.sharding
        self.stage = sharding.stage
        self.facts = Facts(
            shards_state=sharding.state, shards_parameters=sharding.parameters, gathers_by_layer=self.stage == 3,
            hooks_modules=True,
            needs_same_calls=True, counts_unused_as_zero=config.parallel.find_unused is not False,
            waits_in_backward=True,
        )  # fmt: skip
        self._config = config
        self._world = world
        self._linear = nn.functional.linear
        self._accum = resolve_batch(config, world.size)
        self._fqns: dict[int, str] = {}
        self._is_last = self._has_ended = False
        """Whether this is the step's last micro-batch, and whether its backward has come to DeepSpeed's own end."""
        self._ds_config()  # a conflict in raw keys is refused before anything is written
        # DeepSpeed caches its process groups for good: in a process that has trained before it has to make new ones.
        groups = _deepspeed(world).utils.groups
        if groups._WORLD_GROUP not in compat.groups():  # otherwise it belongs to a process group that the caller keeps
            groups._WORLD_GROUP = None
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # hpz: DeepSpeed refuses to create a second one

    def _ds_config(self, sizes: tuple[int, int] | None = None) -> dict[str, Any]:
        on_cuda = self._world.device.type == "cuda"
        return build_ds_config(self._config, self._world.size, self._accum, on_cuda, sizes)

    def construction(self) -> AbstractContextManager[object] | None:
        if self.stage < 3 or self._config.model.quantize is not None:  # the 16-bit weights would be partitioned first
            return None
        # Its import inspects Tensor.__new__, which zero.Init replaces: import it before a model is built.
        import torch._dynamo  # noqa: F401

        return BuiltInPartitions(self._partitioner())

    def _partitioner(self) -> Any:
        # The dtype comes from the config: without fp16 support an explicit `dtype` is ignored and bf16 used.
        return _deepspeed(self._world).zero.Init(config_dict_or_path=self._ds_config())

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        deepspeed = _deepspeed(self._world)
        self._scalars = weights.scalars
        named = list(model.named_parameters())
        if self.stage == 3 and any(param.is_meta for _, param in named):
            partition_model(self._partitioner(), model)
            named = list(model.named_parameters())
        if any(hasattr(param, "ds_tensor") for _, param in named):
            param: Any
            for fqn, param in named:  # draw this rank's range of each parameter; the rest is zero padding
                part, start = param.ds_tensor, self._world.rank * param.ds_tensor.ds_numel
                part.data.zero_()
                weights.fill(
                    fqn, param.ds_shape, part.data[: min(part.ds_numel, max(param.ds_numel - start, 0))], start
                )
                param.ds_secondary_tensor = None  # hpz: a copy of the old values
        else:
            weights.materialise(model, self._world.device, self._world)
            named = list(model.named_parameters())
        self._fqns = {id(param): fqn for fqn, param in named}
        # DeepSpeed casts inputs for fp16 alone.
        engine_forward(model, self._world.device, self._config.precision, self.name, cast_inputs=True)
        if self.stage == 3 and self._config.compile.enabled and self._config.compile.scope == "block":
            # A block's weights are gathered by its own hooks, which are not compiled; hooks inside would break graphs.
            for block in blocks:
                deepspeed.utils.set_z3_leaf_module(block, True)
        if self.stage == 3:
            # The hooks of the whole MLP gather its weights once for all tiles; those of its layers once for each.
            for mlp in filter(is_tiled, model.modules()):
                deepspeed.utils.set_z3_leaf_module(mlp, True)
        numel = [(int(getattr(param, "ds_numel", param.numel())), param.requires_grad) for _, param in named]
        sizes = sum(n for n, _ in numel), sum(n for n, trained in numel if trained)
        optimizer = make_optimizer(model)
        if self._config.parallel.offload_optimizer != "none":
            optimizer = self._on_cpu(optimizer)
        parts = {} if self._config.parallel.find_unused is False else find_parts(model, blocks)
        self._chosen = ChosenParts(model, blocks, parts, self._config, self._world)
        self._chosen.split_groups(optimizer)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._ds_config(sizes), dist_init_required=False
        )
        self.model = self._engine
        self.optimizer = self._zero.optimizer
        self._chosen.attach(self._zero)
        self._reused = KeepReused(self._zero.parameter_offload) if self.stage == 3 else None
        self._differing = DifferingBlocks(model, self._zero.parameter_offload) if self.stage == 3 else None
        if self.stage == 3:
            if parts and self._differing is not None:
                self._differing.expect()
            keep_behind_other_outputs(model)
            gather_persistent_in_turn(self._zero)
        self._norms = FiniteNorms(self._zero, self._world.device)
        self._epilogue = getattr(self._zero, EPILOGUE)
        setattr(self._zero, EPILOGUE, self._note_end)
        with suppress(AttributeError, OSError):  # another C library than glibc
            # DeepSpeed has copied every partition into one buffer; glibc would keep the freed ones for later.
            ctypes.CDLL(None).malloc_trim(0)

    def _on_cpu(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Replace AdamW by DeepSpeed's vectorised CPU kernel; other optimizers stay torch's own."""
        if type(optimizer) is not torch.optim.AdamW:
            return optimizer
        self.prepare_cpu_adam(self._world)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        settings = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in optimizer.param_groups]
        moments_in_fp32 = self._config.precision.mode != "pure_bf16"
        on_cpu: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, adamw_mode=True, fp32_optimizer_states=moments_in_fp32, **settings
        )
        return on_cpu

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        self._is_last = is_last
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._chosen.begin_backward(is_last)
        return nullcontext()

    def allow_differing_use(self, names: Collection[str]) -> None:
        self._chosen.allow(names)

    def hold(self, part: nn.Module) -> None:
        if self._differing is not None:
            self._differing.hold(part)

    def release(self) -> None:
        if self._differing is not None:
            self._differing.release(frees=True)

    def is_held(self, module: nn.Module) -> bool:
        return self._differing is not None and self._differing.is_held(module)

    def gather_with_block(self, block: nn.Module, part: nn.Module) -> None:
        if self._differing is not None:
            self._differing.gather(block, part)

    def compare_gathers(self, compare: Callable[[str], None]) -> None:
        if self.stage == 3:
            compare_before_gathers(
                ((self._fqns[id(param)], param) for param in self._engine.module.parameters()), compare
            )

    def backward(self, loss: torch.Tensor) -> None:
        self._has_ended = False
        if self._differing is not None:
            self._differing.end_forward()
        if self._reused is not None:
            self._reused.in_backward = True
        try:
            self._engine.backward(loss, scale_wrt_gas=False)
        finally:
            if self._reused is not None:
                self._reused.in_backward = False
        if not self._is_last:
            self.finish_backward()

    def _note_end(self) -> None:
        """Stands in the place of DeepSpeed's end of a backward, which `finish_backward` calls."""
        self._has_ended = True

    def finish_backward(self) -> None:
        if not self._has_ended:  # ZeRO-1 reduces in the last backward only
            return
        # First the gradients that this rank lacks, then DeepSpeed's own end, which reduces its last bucket and waits
        # for the device. DeepSpeed would come to it inside its backward, before the host could do other work, and
        # before the gradients of a reentrant checkpoint() have all come.
        self._chosen.complete()
        self._epilogue()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        grad: torch.Tensor | None = safe_get_full_grad(parameter)
        return None if grad is None else grad / self.loss_scale()

    def step(self, request: StepRequest) -> Update:
        self._zero.clip_grad = request.config.train.max_norm or 0.0  # the engine clips in its own step
        self._chosen.before_step()
        share_rates(self._zero)
        self._norms.forget()
        with skipping(self._zero.optimizer, self._norms.bad):
            self._engine.step()
        if self._differing is not None:
            self._differing.release(frees=False)
        if self._config.precision.mode != "fp16":
            norm = self._norms.checked(torch.as_tensor(self._engine.get_global_grad_norm()))
            return Update(norm, updated=True)
        # When loss scaling skips a step, DeepSpeed up to 0.19.6 reports an earlier step's norm.
        skipped = bool(self._zero.overflow)
        norm = torch.as_tensor(math.inf if skipped else self._engine.get_global_grad_norm())
        return Update(norm, not skipped)

    def loss_scale(self) -> float:
        return float(self._zero.loss_scale)

    def weights_changed(self, replicas_equal: bool = False) -> None:
        refresh_compute_weights(self._zero, self.stage)

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        return state_of(self._zero, self._engine.module)

    def communication_tensors(self) -> Iterator[torch.Tensor]:
        """The buffers that gradients pass through in every step."""
        return kept_buffers(self._zero)

    def shards(self) -> Iterator[Shard]:
        return with_scalars(self._shards(self._world.rank, self._world.size), self._scalars)

    def _shards(self, part: int, parts: int) -> Iterator[Shard]:
        """This rank's partitions, and one of `parts` ranges of replicated tensors."""
        rank = self._world.rank
        yield from (zero3_shards if self.stage == 3 else zero12_shards)(self._zero, self._fqns, rank)
        yield from frozen_shards(self._engine.module, self.stage, rank, part, parts)
        yield from buffer_shards(self._engine.module, rank)

    def create_optimizer_state(self, stateless: Collection[str] = ()) -> None:
        create_zero_states(self._zero, self.stage, self._fqns, stateless)

    def load_targets(self) -> Iterator[Shard]:
        return with_scalars(self._shards(0, 1), self._scalars)

    def scalars(self) -> dict[str, float]:
        return zero_scalars(self._zero, self.stage, self._fqns)

    def after_load(self, scalars: Mapping[str, float]) -> None:
        set_zero_scalars(self._zero, self.stage, self._fqns, scalars)
        self.weights_changed()

    def teardown(self) -> None:
        """Drop the engine's hooks and buffers: another engine can then be made in this process."""
        nn.functional.linear = self._linear  # ZeRO-3 replaces it process-wide
        if hasattr(self, "_engine"):
            self._engine.destroy()
        vars(self).clear()  # a wrapped model that outlives its process group can abort the process at exit


def _deepspeed(world: World) -> Any:
    """Import deepspeed for this device and make it use the existing process group."""
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # deepspeed reads these when it sets up its communication layer, and uses LOCAL_RANK as the GPU's index.
    os.environ.setdefault("LOCAL_RANK", str(world.env.local_rank if world.device.index is None else world.device.index))
    os.environ.setdefault("RANK", str(world.rank))
    os.environ.setdefault("WORLD_SIZE", str(world.size))
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"parallel.strategy is a ZeRO stage, but deepspeed does not import: {error}",
            "pip install deepspeed, or set parallel.strategy=fsdp (the same sharding without it)",
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
    # Its shared-memory collectives only work under its own launcher; elsewhere compiling them wastes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, dist_init_required=False
        )
    return deepspeed


class FiniteNorms:
    """Computes on the device, before the update's kernels run, whether the norm of the gradients is finite.

    DeepSpeed replaces a group's norm that is not finite by -1, and up to 0.19.6 uses the -1 like any norm when it
    combines groups: it takes the step. In stages 1 and 2 on a GPU each -1 is copied from pageable memory, and 0.19.8
    reads the total norm back: the host waits twice for each group. There the norms stay as they are; nothing is read.
    """

    def __init__(self, zero: Any, device: torch.device) -> None:
        self.bad = torch.zeros((), device=device)  # 1 if a norm of this step was not finite, else 0
        self._bad_on_host = False
        self._of_groups = stage_of(zero) == 3 or bool(offloaded(zero))
        if self._of_groups:
            for name in GROUP_NORMS:
                setattr(zero, name, self._noting_group(getattr(zero, name)))
            return
        zero.get_grad_norm_direct = _inside(zero.get_grad_norm_direct, MASK, lambda norm, device=None, val=-1.0: None)
        zero.unscale_and_clip_grads = _inside(zero.unscale_and_clip_grads, IS_INVALID, lambda norm: False)
        compute = zero.scaled_global_norm

        def noted(*args: Any, **kwargs: Any) -> Any:
            norm = compute(*args, **kwargs)
            # inf · 0 and NaN · 0 are NaN, which differs from 0. Two kernels only: this runs in every step.
            torch.mul(norm, 0, out=self.bad).ne_(0)
            return norm

        zero.scaled_global_norm = noted

    def _noting_group(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            group_norm = compute(*args, **kwargs)
            norm = torch.as_tensor(group_norm)
            bad = (norm.sqrt() * 0).ne_(0)
            if norm.device == self.bad.device:
                torch.maximum(self.bad, bad.float(), out=self.bad)
            elif bad:
                self._bad_on_host = True
                self.bad.fill_(1.0)
            return group_norm

        return noted

    def forget(self) -> None:
        """Forget the norms of the last step, before those of the next one are computed."""
        if self._of_groups:
            self._bad_on_host = False
            self.bad.zero_()

    def checked(self, norm: torch.Tensor) -> torch.Tensor:
        """DeepSpeed's norm over all groups; not finite if one group's norm was not."""
        if not self._of_groups:
            return norm
        if norm.device != self.bad.device:
            return torch.full_like(norm, math.inf) if self._bad_on_host else norm
        return norm.masked_fill(self.bad > 0, math.inf)


def _inside(method: Callable[..., Any], name: Private, instead: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with a function of its module replaced by `instead` while the method runs."""
    module, _, function = name.path.rpartition(".")
    if not name.needed():  # an older release, without that function
        return method
    name.find()  # raises if a newer release has renamed it

    def replaced(*args: Any, **kwargs: Any) -> Any:
        names = vars(sys.modules[module])
        original, names[function] = names[function], instead
        try:
            return method(*args, **kwargs)
        finally:
            names[function] = original

    return replaced
