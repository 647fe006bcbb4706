"""Where DeepSpeed keeps its state: flat partitions (ZeRO-1/2) and per-parameter partitions (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...memory.rows import StateKind
from ..base import Shard


def optimizer_of(zero: Any, master: torch.Tensor) -> Any:
    """What updates a master partition: with offload_ratio DeepSpeed has a second optimizer, for those on the GPU."""
    on_gpu = getattr(zero, "backup_optimizer", None)
    return zero.optimizer if on_gpu is None or master.device.type == "cpu" else on_gpu


def share_rates(zero: Any) -> None:
    """Let that second optimizer follow the schedule: DeepSpeed (0.19) gives its first group the first rate for good."""
    on_gpu = getattr(zero, "backup_optimizer", None)
    for group, shown in zip(on_gpu.param_groups if on_gpu else (), zero.optimizer.param_groups, strict=False):
        group["lr"] = shown["lr"]


def zero12_state(zero: Any) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """Flat model parameters (whole), this rank's fp32 master partition, its gradients and its optimizer state."""
    for flat in zero.bit16_groups_flat:
        yield "params", flat
    yield from _masters_and_states(zero, zero.single_partition_of_fp32_groups)
    for held in (zero.averaged_gradients, zero.all_grad_tensors):
        for grads in held.values():
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
    """This rank's partitions; parameters that are gathered right now (persistent ones always are) count as well."""
    param: Any
    for param in module.parameters():
        yield "params", param.ds_tensor
        if param.numel() and param.ds_status.name == "AVAILABLE":
            yield "params", param.data
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
    """Each group is one flat buffer cut into world_size equal partitions; a parameter's part of ours is one range."""
    groups = zip(zero.bit16_groups, zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, strict=True)
    for group, flat, master in groups:
        size = master.numel()
        mine = rank * size
        for param in group:
            if param.numel() == 0:
                continue
            # Where the parameter lies, whatever order and padding the engine chose.
            offset = (param.data_ptr() - flat.data_ptr()) // flat.element_size()
            first, last = max(offset, mine), min(offset + param.numel(), mine + size)
            if first < last:
                yield from _fragment(
                    zero, fqns[id(param)], tuple(param.shape), first - offset, master, first - mine, last - first
                )


def zero3_shards(zero: Any, fqns: dict[int, str], rank: int) -> Iterator[Shard]:
    """Each parameter is cut into equal padded parts; a sub-group's master holds its parameters' parts in order."""
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
