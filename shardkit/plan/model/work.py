"""The hardware's work in a traced step: time by segment, from each operator's FLOPs and bytes.

An operator takes as long as the slower of its arithmetic and its memory traffic (the roofline model, Williams et al.
2009). FLOPs are counted as torch counts them, halved for causal attention. Traffic counts each tensor that the
operator reads or writes once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ...config.schema import RunConfig
from ...memory.tracing.compat import schema, tree_iter
from ...memory.tracing.events import EventLog
from ..simulate.compat import packet_of, resolve_process_group
from .cost import Segment, Speeds, passing_bytes

_PHASES = ("forward", "backward", "update")
_MODES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip
_NO_WORK = (
    "aten::empty", "aten::new_empty", "aten::detach", "aten::resize_", "aten::set_", "aten::_local_scalar_dense",
    "aten::lift_fresh", "aten::record_stream", "aten::is_pinned", "_c10d_functional::wait_tensor", "prim::device",
)  # fmt: skip
_SPECIAL = tuple(
    f"aten::{name}"
    for name in ("gelu", "silu", "tanh", "sigmoid", "exp", "log", "erf", "_softmax", "_log_softmax", "pow", "bernoulli",
                 "native_dropout", "sin", "cos")
)  # fmt: skip
_WATCHING = 1.1e-5
"""Seconds that `selective_op` adds to each forward operator by inspecting it in Python (torch 2.13, one
core of a shared x86-64 machine: 400 small operators with and without it)."""
_LARGE = 2**24
"""New CPU tensors of at least this many bytes get new pages: the C library returns such blocks to the system."""
_LAUNCHES = {"aten::_foreach_norm": 3}
"""Kernels of operators that launch several on a GPU whatever their sizes: zeros, partial sums, and their sums."""
_LOOKUPS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index")


class WorkCounter:
    """Adds up the segments of a traced step, on hardware of some speeds; each step replaces the previous one."""

    def __init__(
        self, config: RunConfig, log: EventLog, speeds: Speeds, device: torch.device, ranks_per_node: int
    ) -> None:
        self._log, self._speeds, self._device, self._ranks_per_node = log, speeds, device, ranks_per_node
        self._fp32 = "tf32" if config.precision.mode == "tf32" else "fp32"
        self._recomputes = config.activation.recomputes
        self._watching = _WATCHING if config.activation.policy == "selective_op" else 0.0
        self._groups: dict[str, tuple[int, int]] = {}
        self.segments: list[Segment] = []

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        phase, operator = self._log.phase, _operator_of(func)
        if phase not in _PHASES or operator.is_view:
            return
        if not self.segments or self.segments[-1].phase != phase:
            if phase == "forward" and self.segments and self.segments[-1].phase == "update":
                self.segments = []
            self.segments.append(Segment(phase))
        segment = self.segments[-1]
        if operator.is_collective:
            if operator.works:
                self._collective(segment, operator.name, args, out)
            return
        operands, results = list(_tensors((args, kwargs))), list(_tensors((out,)))
        if operator.makes_new and self._device.type == "cpu":
            segment.compute += sum(n for n in map(_n_bytes, results) if n >= _LARGE) / self._speeds.new_pages
        if not operator.works:
            return
        places = {tensor.device.type for tensor in (*operands, *results) if tensor.dim()}
        places = places or {tensor.device.type for tensor in results}  # single numbers: a kernel all the same
        if places == {"cpu", "cuda"}:
            segment.copies += sum(map(_n_bytes, results)) / self._speeds.copies
            return
        traffic = _traffic(operator, (*args, *kwargs.values()), operands, results)
        if places != {self._device.type}:
            segment.host += traffic / self._speeds.host
            return
        flops = _flops(func, operator.name, args, kwargs, out)
        busy = traffic / (self._speeds.special if operator.special else self._speeds.memory)
        if flops:
            share = self._speeds.attention if "attention" in operator.name else 1.0
            dtype = next((tensor.dtype for tensor in operands if tensor.is_floating_point()), torch.float32)
            busy = max(busy, flops / (share * self._speeds.matmul[_MODES.get(dtype, self._fp32)]))
        if self._recomputes and phase == "backward" and torch.is_grad_enabled():
            segment.recompute += busy
        else:
            segment.compute += busy
        segment.flops += flops
        launches = _LAUNCHES.get(operator.name, 1) if self._device.type == "cuda" else 1
        segment.dispatch += launches * self._speeds.operator + (self._watching if torch.is_grad_enabled() else 0.0)

    def _collective(self, segment: Segment, name: str, args: Any, out: Any) -> None:
        ranks, nodes = self._group(args)
        if ranks == 1:
            return
        n_bytes = max(map(_sum_bytes, (*args, out)))  # a gather's output, a scatter's input
        operator = name.partition("::")[2].replace("_", "")
        kind = "all_reduce" if "allreduce" in operator else "reduce_scatter" if "reduce" in operator else "all_gather"
        kind = "all_to_all" if "alltoall" in operator else kind
        seconds = self._speeds.collective_seconds(kind, n_bytes, ranks, nodes)
        segment.sent += passing_bytes(kind, n_bytes, ranks)
        # The next kernel waits for an all-to-all, and for the collectives of a layer that ranks share.
        if kind == "all_to_all" or name.startswith("_c10d_functional"):
            segment.exchanges += seconds
            return
        segment.links += seconds
        segment.collectives += 1

    def _group(self, args: Any) -> tuple[int, int]:
        """(ranks, machines) of the group that a collective's arguments name."""
        boxed_group = next((a for a in tree_iter(args) if isinstance(a, torch.ScriptObject)), None)
        group = resolve_process_group(args[-1]) if boxed_group is None else dist.ProcessGroup.unbox(boxed_group)
        size = self._groups.get(group.group_name)
        if size is None:
            ranks = dist.get_process_group_ranks(group)
            nodes = len({rank // self._ranks_per_node for rank in ranks})
            size = self._groups[group.group_name] = len(ranks), nodes
        return size


class _Operator(NamedTuple):
    name: str
    is_view: bool
    is_collective: bool
    works: bool  # whether it reads or writes memory
    special: bool
    makes_new: bool  # whether its results are new tensors, not its arguments
    looks_up: bool  # whether it reads only as many bytes of its inputs as it returns
    writes: tuple[bool, ...]  # which arguments it changes, if it returns nothing


@functools.cache
def _operator_of(func: Any) -> _Operator:
    form = schema(func)
    alias = form.returns[0].alias_info if form.returns else None
    changes = (argument.alias_info for argument in form.arguments)
    return _Operator(
        form.name,
        is_view=alias is not None and not alias.is_write,
        is_collective=form.name.startswith(("c10d::", "_c10d_functional::")),
        works=not form.name.startswith(_NO_WORK),
        special=form.name.startswith(_SPECIAL),
        makes_new=bool(form.returns) and alias is None,
        looks_up=form.name in _LOOKUPS,
        writes=() if form.returns else tuple(change is not None and change.is_write for change in changes),
    )


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args.values() if isinstance(args, dict) else args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple, dict)):
            yield from _tensors(arg)


def _n_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel reads or writes; an expanded tensor's storage is smaller than its shape."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _sum_bytes(*args: Any) -> int:
    return sum(map(_n_bytes, _tensors(args)))


def _traffic(operator: _Operator, args: Any, operands: list[torch.Tensor], results: list[torch.Tensor]) -> int:
    written = sum(map(_n_bytes, results))
    if operator.looks_up:
        return 2 * written
    if operator.writes:  # otherwise the operator returns the tensors it writes in place
        written = sum(_sum_bytes(arg) for arg, is_changed in zip(args, operator.writes, strict=False) if is_changed)
    return sum(map(_n_bytes, operands)) + written


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    flops: float
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        flops = sdpa_flop_count(*(t.shape for t in args[:3]))  # type: ignore[no-untyped-call]
    elif name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        flops = sdpa_backward_flop_count(*(t.shape for t in args[:4]))  # type: ignore[no-untyped-call]
    elif (count := flop_registry.get(packet_of(func))) is not None:
        flops = count(*args, **kwargs, out_val=out)
    else:
        return 0.0
    at = next((at for at, argument in enumerate(schema(func).arguments) if argument.name == "is_causal"), len(args))
    is_causal = kwargs.get("is_causal", at < len(args) and args[at])
    return flops / 2 if is_causal is True else flops
