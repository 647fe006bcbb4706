"""DeepSpeed's state: flat partitions (ZeRO-1/2) or partitions per parameter (ZeRO-3), read and restored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.libraries import Feature
from ...errors import CheckpointError
from ...memory.probe import weight_state
from ...memory.rows import StateKind
from ...parallel.weights import even_range, exchange, parameters_on_meta, replace_parameters
from ..base import Shard
from ..states import create_states, flat, scalars_of, set_scalars

ACCOUNT = Feature("ZeRO's state in memory's categories, and its checkpoints")
ENGINE = Feature("training under ZeRO")
GROUP_NORMS = "get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"
EPILOGUE = "overlapping_partition_gradients_reduce_epilogue"
_STAGES = {
    2: ("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", (
        "bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups", "averaged_gradients",
        "all_grad_tensors", "update_lp_params",
    )),
    3: ("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", (
        "fp16_groups", "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer", "sub_group_to_group_id",
        "checkpoint_event_prologue", "checkpoint_event_epilogue", "_reassign_or_swap_out_partitioned_parameters",
    )),
}  # fmt: skip
_NAMES = {
    stage: [ACCOUNT.use(f"{optimizer}.{name}") for name in (*names, "loss_scaler", "dynamic_loss_scale")]
    for stage, (optimizer, names) in _STAGES.items()
}
for _optimizer, _ in _STAGES.values():
    for _name in ("clip_grad", "overflow", "optimizer", *GROUP_NORMS, EPILOGUE):
        ENGINE.use(f"{_optimizer}.{_name}")
# offload_ratio below 1 makes a second optimizer, whose learning rate DeepSpeed (0.19) does not change.
ENGINE.use(f"{_STAGES[3][0]}.backup_optimizer")
for _name in ("ds_tensor", "ds_numel", "ds_shape", "ds_status", "partition_numel"):
    ENGINE.use(f"deepspeed.runtime.zero.partition_parameters.Init.{_name}")
for _name in ("_post_init_method", "_convert_to_deepspeed_param", "local_device", "dtype"):
    ENGINE.use(f"deepspeed.runtime.zero.partition_parameters.Init.{_name}")
MASK = ENGINE.use("deepspeed.runtime.zero.stage_1_and_2.mask_nan_or_inf_with_val_inplace")
IS_INVALID = ENGINE.use("deepspeed.runtime.zero.stage_1_and_2.is_invalid_grad_norm", since="0.19.8")
for _name in ("scaled_global_norm", "unscale_and_clip_grads"):
    ENGINE.use(f"{_STAGES[2][0]}.{_name}")
ENGINE.use("deepspeed.ops.__compatible_ops__")
ENGINE.use("deepspeed.utils.groups._WORLD_GROUP")  # DeepSpeed keeps them beyond the process group that they belong to
ENGINE.use("deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP")
ENGINE.use("torch._dynamo")  # imported before zero.Init replaces what its import looks at
ENGINE.use("torch.nn.functional.linear")  # ZeRO-3 replaces it for the process; put back when a job ends
ACCOUNT.use("deepspeed.ops.adam.DeepSpeedCPUAdam.ds_opt_adam")
ACCOUNT.use("deepspeed.ops.adam.DeepSpeedCPUAdam.opt_id")
BUILDS = Feature("one build of DeepSpeedCPUAdam at a time, and no waiting for a killed build")
BUILD_FOLDER = BUILDS.use("torch.utils.cpp_extension._get_build_directory")
BUILDS.use("deepspeed.ops.op_builder.CPUAdamBuilder.NAME")


def accounted(
    zero: Any, stage: int, state: Iterator[tuple[StateKind, torch.Tensor]]
) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """`state`, up to the first name that DeepSpeed no longer has: only the memory account then loses entries."""
    try:
        yield from state
    except AttributeError:
        names = _NAMES[3 if stage == 3 else 2]
        gone = next((name for name in names if not hasattr(zero, name.path.rpartition(".")[2])), None)
        if gone is None:
            raise
        ACCOUNT.lost(gone)


class BuiltInPartitions:
    """`zero.Init` for a model whose values are all drawn later: no rank writes or sends more than its partitions.

    A parameter is on meta until its module is built. The planner may enter this context twice. `init`: a `zero.Init`
    that is not entered yet.
    """

    def __init__(self, init: Any) -> None:
        self._init, self._inside = init, ExitStack()
        ended = init._post_init_method

        def partition(module: nn.Module) -> None:
            _partition_metas(init, module.named_parameters(recurse=False), module)
            ended(module)

        init._post_init_method = partition

    def __enter__(self) -> None:
        self._inside.enter_context(self._init)
        self._inside.enter_context(parameters_on_meta())

    def __exit__(self, *raised: Any) -> None:
        self._inside.__exit__(*raised)


def partition_model(init: Any, model: nn.Module) -> None:
    """Replace each parameter on meta by this rank's part of it, with any values; buffers go to the device."""
    _partition_metas(init, model.named_parameters(), model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(init.local_device)


def _partition_metas(init: Any, named: Iterable[tuple[str, nn.Parameter]], model: nn.Module) -> None:
    """Allocate each parameter and keep this rank's part of it; the rest of the allocation is never touched.

    `zero.Init` itself would send the first rank's values to all ranks.
    """
    parts: dict[int, Any] = {}
    for _, param in named:
        if param.is_meta:
            dtype = init.dtype if param.is_floating_point() else param.dtype
            full_tensor = torch.empty(param.shape, dtype=dtype, device=init.local_device)
            part: Any = nn.Parameter(full_tensor, requires_grad=param.requires_grad)
            vars(part).update(vars(param) | vars(part))  # attributes that the model's code has set on it
            init._convert_to_deepspeed_param(part)
            part.partition()
            parts[id(param)] = part
    replace_parameters(model, lambda param: parts.get(id(param), param))


def stage_of(zero: Any) -> int:
    """ZeRO's stage, from DeepSpeed's optimizer."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return 3
    return 2 if zero.partition_gradients else 1


def state_of(zero: Any, module: nn.Module) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """Every local tensor of parameters, masters, gradients, optimizer state and buffers, from DeepSpeed's optimizer."""
    stage = stage_of(zero)
    yield from accounted(zero, stage, (zero3_state if stage == 3 else zero12_state)(module, zero))
    for buffer in module.buffers():
        yield "buffers", buffer


def kept_buffers(zero: Any) -> Iterator[torch.Tensor]:
    """The buffers for gradients that DeepSpeed makes with its optimizer and keeps on the device.

    Stage 3: the reduce bucket; stages 1 and 2 with offload: a copy of the largest parameter's gradient.
    """
    for bucket in getattr(zero, "ipg_buckets", {}).values() if stage_of(zero) == 3 else ():
        if bucket.buffer is not None:
            yield bucket.buffer
    copy = getattr(zero, "temp_grad_buffer_for_gpu_offload", None)
    if copy is not None:
        yield copy


def offloaded(zero: Any) -> list[str]:
    """The settings of `parallel` by which state lives on the host: `offload_optimizer`, `offload_param`."""
    stage = stage_of(zero)
    masters = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    settings = ["offload_optimizer"] if any(master.device.type == "cpu" for master in masters) else []
    parts = (param.ds_tensor for group in zero.fp16_groups for param in group) if stage == 3 else ()
    return settings + ["offload_param"] * any(part.device.type == "cpu" for part in parts)


def optimizer_of(zero: Any, master: torch.Tensor) -> Any:
    """The optimizer that updates a master partition: with offload_ratio a second one updates those on the GPU."""
    on_gpu = getattr(zero, "backup_optimizer", None)
    return zero.optimizer if on_gpu is None or master.device.type == "cpu" else on_gpu


def share_rates(zero: Any) -> None:
    """Make the second optimizer (offload_ratio) follow the schedule: DeepSpeed (0.19) never updates its rate."""
    on_gpu = getattr(zero, "backup_optimizer", None)
    for group, shown in zip(on_gpu.param_groups if on_gpu else (), zero.optimizer.param_groups, strict=False):
        group["lr"] = shown["lr"]


def zero12_state(module: nn.Module, zero: Any) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """Model parameters (whole; trained ones in flat buffers), and this rank's fp32 masters, gradients and optimizer
    state."""
    for flat_group in zero.bit16_groups_flat:
        yield "params", flat_group
    for param in module.parameters():
        if not param.requires_grad:
            yield from weight_state(param)
    yield from _masters_and_states(zero, zero.single_partition_of_fp32_groups)
    for grads_by_group in (zero.averaged_gradients, zero.all_grad_tensors):
        for grads in grads_by_group.values():
            for grad in grads or ():
                yield "grads", grad
    for group in zero.bit16_groups:
        for param in group:
            for grad in (param.grad, getattr(param, "grad_accum", None)):
                if grad is not None:
                    yield "grads", grad
    for grad in getattr(zero, "accumulated_grads_in_cpu", {}).values():
        yield "grads", grad


def zero3_state(module: nn.Module, zero: Any) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """This rank's partitions, and parameters that are gathered now (persistent ones always are)."""
    param: Any
    for param in module.parameters():
        yield from weight_state(param.ds_tensor)
        if param.numel() and param.ds_status.name == "AVAILABLE":
            yield from weight_state(param.data)
    yield from _masters_and_states(zero, zero.fp32_partitioned_groups_flat)
    if zero.grad_partitions_flat_buffer is not None:
        yield "grads", zero.grad_partitions_flat_buffer


def _masters_and_states(zero: Any, masters: list[torch.Tensor]) -> Iterator[tuple[StateKind, torch.Tensor]]:
    for master in masters:
        yield "master_params", master
        if master.grad is not None:
            yield "grads", master.grad
        for value in optimizer_of(zero, master).state.get(master, {}).values():
            if isinstance(value, torch.Tensor):
                yield "optimizer", value


def zero12_shards(zero: Any, fqns: dict[int, str], rank: int) -> Iterator[Shard]:
    """This rank's range of each parameter: where the parameter overlaps with this rank's part of its group's buffer."""
    groups = zip(zero.bit16_groups, zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, strict=True)
    for group, buffer, master in groups:
        size = master.numel()
        rank_start = rank * size
        for param in group:
            if param.numel() == 0:
                continue
            # The parameter's place in the buffer, whatever order and padding the engine chose.
            offset = (param.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            begin, end = max(offset, rank_start), min(offset + param.numel(), rank_start + size)
            if begin < end:
                yield from _fragment(
                    zero, fqns[id(param)], tuple(param.shape), begin - offset, master, begin - rank_start, end - begin
                )


def zero3_shards(zero: Any, fqns: dict[int, str], rank: int) -> Iterator[Shard]:
    """This rank's range of each parameter, from equal padded parts; a sub-group's master has the parts in order."""
    for group, master in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for param in group:
            part = int(param.partition_numel())
            start = rank * part
            length = max(0, min(part, int(param.ds_numel) - start))
            if length:
                yield from _fragment(zero, fqns[id(param)], tuple(param.ds_shape), start, master, offset, length)
            offset += part


def _fragment(
    zero: Any, fqn: str, shape: tuple[int, ...], start: int, master: torch.Tensor, at: int, length: int
) -> Iterator[Shard]:
    yield Shard(f"model.{fqn}", shape, start, master.detach().narrow(0, at, length))
    for key, value in optimizer_of(zero, master).state.get(master, {}).items():
        if isinstance(value, torch.Tensor) and value.shape == master.shape:
            yield Shard(f"optim.{fqn}.{key}", shape, start, value.narrow(0, at, length))


def masters(zero: Any, stage: int) -> Iterator[tuple[torch.Tensor, list[nn.Parameter], dict[str, Any]]]:
    """(this rank's flat master, the parameters in it, their optimizer group) of every partition."""
    if stage < 3:
        groups = zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, zero.optimizer.param_groups, strict=True)
        yield from groups
        return
    for index, (master, params) in enumerate(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)):
        yield master, params, optimizer_of(zero, master).param_groups[zero.sub_group_to_group_id[index]]


def create_zero_states(zero: Any, stage: int, fqns: Mapping[int, str], stateless: Collection[str]) -> None:
    """Create the optimizer state of every flat master, except where all of its parameters are in `stateless`."""
    for master, params, group in masters(zero, stage):
        optimizer = optimizer_of(zero, master)
        if params and all(fqns[id(param)] in stateless for param in params):
            optimizer.state.pop(master, None)
        else:
            create_states(optimizer, group, master)


def zero_scalars(zero: Any, stage: int, fqns: dict[int, str]) -> dict[str, float]:
    """The step counter of each flat master, for every parameter in it; and the loss scaler, `engine.loss_scaler.*`."""
    numbers: dict[str, float] = {}
    for master, params, _ in masters(zero, stage):
        state = optimizer_of(zero, master).state.get(master, {})
        for param in params:
            numbers |= scalars_of(fqns[id(param)], master, state)
    return numbers | {f"engine.loss_scaler.{key}": value for key, value in _loss_scaler(zero).items()}


def set_zero_scalars(zero: Any, stage: int, fqns: dict[int, str], scalars: Mapping[str, float]) -> None:
    """Restore saved numbers; the parameters of a flat master must agree on them."""
    for master, params, _ in masters(zero, stage):
        state = optimizer_of(zero, master).state.get(master, {})
        names = [fqns[id(param)] for param in params]
        for key in state:
            values = {name: scalars[f"optim.{name}.{key}"] for name in names if f"optim.{name}.{key}" in scalars}
            if len(set(values.values())) > 1:
                low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
                raise CheckpointError(
                    f"the checkpoint says {values[low]:g} for optim.{low}.{key} and {values[high]:g} for "
                    f"optim.{high}.{key}, but ZeRO keeps one for both",
                    "resume under ddp, fsdp or hsdp, or freeze the parameters that get no gradient",
                )
        for name in names:
            set_scalars(name, master, state, scalars)
    if hasattr(zero.optimizer, "ds_opt_adam"):
        _replay_bias_correction(zero.optimizer)
    for key, value in _loss_scaler(zero).items():
        setattr(zero.loss_scaler, key, type(value)(scalars.get(f"engine.loss_scaler.{key}", value)))


def _loss_scaler(zero: Any) -> dict[str, float]:
    """Numbers of a dynamic loss scaler (fp16); a static one follows from the config."""
    values = vars(zero.loss_scaler) if getattr(zero, "dynamic_loss_scale", False) else {}
    return {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _replay_bias_correction(optimizer: Any) -> None:
    """Advance DeepSpeedCPUAdam's own powers of beta to the loaded step.

    The kernel multiplies them in fp32 step by step, but uses `pow` if a step does not follow the last one: the results
    differ in the last bits, and a resumed run would leave the original's curve.
    """
    state = next((s for s in optimizer.state.values() if "step" in s), None)
    if state is None:
        return
    group, empty = optimizer.param_groups[0], torch.empty(0)
    for step in range(1, int(state["step"]) + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, True, empty, empty, empty, empty
        )


@torch.no_grad()
def refresh_compute_weights(zero: Any, stage: int) -> None:
    """Copy the masters into the weights that forward reads and gather these, like the engine's own step."""
    if stage < 3 and all(buffer.device.type == "cpu" for buffer in zero.bit16_groups_flat):
        for buffer, master in zip(zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, strict=True):
            buffer.view(-1, master.numel())[dist.get_rank()].copy_(master)
        exchange(zero.bit16_groups_flat)  # gloo's own all-gather would copy the whole
        return
    if stage < 3:
        zero.update_lp_params()
        return
    zero.checkpoint_event_prologue()  # persistent parameters are whole outside a step: partition them first
    for index in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(index)
    zero.checkpoint_event_epilogue()


def frozen_shards(module: nn.Module, stage: int, rank: int, part: int, parts: int) -> Iterator[Shard]:
    """Frozen parameters: this rank's partition under ZeRO-3; one of `parts` ranges of whole ones under ZeRO-1/2."""
    param: Any
    for fqn, param in module.named_parameters():
        if param.requires_grad:
            continue
        if stage < 3:
            start, end = even_range(param.numel(), part, parts)
            yield Shard(f"model.{fqn}", tuple(param.shape), start, flat(fqn, param)[start:end])
            continue
        size = int(param.partition_numel())
        length = max(0, min(size, int(param.ds_numel) - rank * size))
        if length:
            local = param.ds_tensor.detach().view(-1).narrow(0, 0, length)
            yield Shard(f"model.{fqn}", tuple(param.ds_shape), rank * size, local)
