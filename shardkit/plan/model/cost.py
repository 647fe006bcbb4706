"""The speeds of a rank's hardware, measured or typical, and the time that a traced step takes on it."""

from __future__ import annotations

import math
import os
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...hardware import calibration
from ...hardware.cards import gpu_peak_flops

if TYPE_CHECKING:
    from ..target import Target

# The share of a data sheet's figure that good kernels reach.
_OF_PEAK_FLOPS = 0.7
_OF_BANDWIDTH = 0.8
_HOST_BYTES_PER_S = 200e9  # a server's memory, shared by the ranks of a machine
_CPU_CORE_FLOPS = 4e10
_CPU_SPECIAL = 0.2  # gelu, softmax, exp: 3 to 10 of 20 to 30 GB/s on one core with AVX-512 (torch 2.13)
_CPU_ATTENTION = 0.4
_NEW_PAGES = 2.5e9  # pages of 4 KiB
_LATE = 2e-3  # for ranks that share a machine
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Speeds:
    """The speeds that one rank reaches while all ranks work."""

    matmul: Mapping[str, float]  # FLOP/s of large matrix products by type: fp32, tf32, bf16, fp16, fp8
    memory: float  # bytes/s that kernels read and write in the device's memory
    special: float  # the same for exponentials and the like: as fast on a GPU, much slower on a CPU
    attention: float  # fused attention's share of the speed of matrix products
    host: float  # bytes/s that an optimizer step on the CPU reads and writes
    copies: float  # bytes/s between device and host, one direction
    link: float  # bytes/s of collectives inside a machine, as bus bandwidth
    network: float  # bytes/s of each rank to other machines
    operator: float  # seconds to issue one operator
    collective: float  # seconds that the smallest collective takes
    hop: float  # seconds that each further rank adds to a ring
    overlap: bool  # collectives and copies run beside kernels, and operators are issued ahead, as on a GPU
    new_pages: float = math.inf  # bytes/s at which a CPU maps pages for new large tensors
    late: float = 0.0  # seconds that ranks wait for the slowest one at a collective, where nothing hides the wait
    # collective of `KINDS` → [[bytes, bus bytes/s], …], where measured
    tables: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    tables_nodes: Mapping[str, int] = field(default_factory=dict)  # machines that took part in measuring each
    measured: bool = False  # whether the speeds were measured on this machine

    def collective_seconds(self, kind: str, n_bytes: int, ranks: int, nodes: int) -> float:
        """Seconds of a collective over `n_bytes` (of the whole tensor) in a group of `ranks` on `nodes` machines.

        The bytes that pass each rank, divided by the bus bandwidth (see `tables`); between machines each rank of a
        machine has its own link.
        """
        passing = passing_bytes(kind, n_bytes, ranks)
        table = self.tables.get(kind) if nodes <= self.tables_nodes.get(kind, 0) else None
        if table:
            return self.late + passing / _between(table, n_bytes) + self.hop * (ranks - 1)
        # A ring enters and leaves each machine once, and its ranks' links share that; in an all-to-all each rank sends
        # to all others.
        links = 1 if kind == "all_to_all" else ranks / nodes
        bus = self.link if nodes == 1 else min(self.link, self.network * links)
        return self.late + self.collective + self.hop * (ranks - 1) + passing / bus


def passing_bytes(kind: str, n_bytes: int, ranks: int) -> float:
    """Bytes of a collective over `n_bytes` that each rank sends."""
    return n_bytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def speeds_of(target: Target) -> Speeds:
    """The speeds of a target's ranks; measured with another number of ranks if this one was not measured."""
    typical = _typical(target)
    device = target.gpu.device_name if target.gpu else calibration.cpu_name()
    constants = calibration.find(device, target.world_size)
    return typical if constants is None or "operator_s" not in constants else _measured(typical, constants, target)


def _typical(target: Target) -> Speeds:
    gpu = target.gpu
    if gpu is None:
        flops = _CPU_CORE_FLOPS * max(1, (os.cpu_count() or 1) // target.ranks_per_node)
        return Speeds(
            matmul=dict.fromkeys(("fp32", "tf32", "bf16", "fp16", "fp8"), flops),
            memory=5e9, special=5e9 * _CPU_SPECIAL, attention=_CPU_ATTENTION, host=5e9, copies=5e9,
            link=1e9, network=1e9, operator=5e-6, collective=2e-4, hop=1e-5, overlap=False, new_pages=_NEW_PAGES,
            late=_LATE,
        )  # fmt: skip
    peaks = {mode: gpu_peak_flops(gpu.device_name, mode) for mode in ("fp32", "tf32", "bf16", "fp16")}
    slowest = peaks["fp32"] or gpu.hbm_gb_s * 2e10
    flops_by_type = {mode: _OF_PEAK_FLOPS * (peak or slowest) for mode, peak in peaks.items()}
    return Speeds(
        matmul={**flops_by_type, "fp8": flops_by_type["bf16"] * (2 if gpu.capability >= (8, 9) else 1)},
        memory=_OF_BANDWIDTH * gpu.hbm_gb_s * 1e9, special=_OF_BANDWIDTH * gpu.hbm_gb_s * 1e9, attention=1.0,
        host=min(100e9, _HOST_BYTES_PER_S / target.ranks_per_node), copies=_OF_BANDWIDTH * gpu.pcie_gb_s * 1e9,
        link=_OF_BANDWIDTH * gpu.link_gb_s * 1e9, network=_OF_BANDWIDTH * gpu.network_gb_s * 1e9,
        operator=1e-5, collective=2e-5, hop=1e-6, overlap=True,
    )  # fmt: skip


def _measured(typical: Speeds, constants: Mapping[str, Any], target: Target) -> Speeds:
    by_type = {mode: speed for mode, speed in constants["matmul_flops_by_dtype"].items() if speed}
    speeds = replace(
        typical,
        matmul={**typical.matmul, **by_type},
        memory=constants["memory_bytes_per_s"],
        special=constants["memory_bytes_per_s"] * typical.special / typical.memory,
        host=constants["host_bytes_per_s"],
        copies=min(constants["copy_bytes_per_s"]),
        operator=constants["operator_s"],
        new_pages=constants.get("new_page_bytes_per_s", _NEW_PAGES) if target.gpu is None else math.inf,
        measured=True,
    )
    if constants["world_size"] == 1:
        return speeds
    tables = {kind: constants[kind] for kind in KINDS if constants.get(kind)}
    ranks = {**dict.fromkeys(tables, constants["world_size"]), "all_to_all": constants.get("all_to_all_ranks", 1)}
    nodes = {kind: -(-n // target.ranks_per_node) for kind, n in ranks.items()}
    late = typical.late if constants.get("late_s") is None else constants["late_s"]
    return replace(speeds, tables=tables, tables_nodes=nodes, collective=constants["collective_s"], hop=0.0, late=late)


def _between(table: Sequence[Sequence[float]], n_bytes: int) -> float:
    """Bus bandwidth at a size, interpolated in logarithms; below the table the time is constant, above it the speed."""
    sizes, speeds = zip(*table, strict=True)
    if n_bytes <= sizes[0]:
        return float(speeds[0] * max(n_bytes, 1) / sizes[0])  # takes as long as the smallest size
    at = bisect(sizes, n_bytes)
    if at == len(sizes):
        return float(speeds[-1])
    share = math.log(n_bytes / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
    return float(speeds[at - 1] ** (1 - share) * speeds[at] ** share)


@dataclass
class Segment:
    """A phase of one micro-batch (or the optimizer step): seconds for which each part of the hardware is busy."""

    phase: str
    compute: float = 0.0  # kernels, without those that backward runs again
    recompute: float = 0.0  # forward kernels that backward runs again
    dispatch: float = 0.0  # issuing operators
    links: float = 0.0  # collectives that can run beside kernels
    exchanges: float = 0.0  # collectives whose result the next kernel needs: all-to-alls
    copies: float = 0.0  # copies between device and host
    host: float = 0.0  # kernels on the CPU, for a job on GPUs
    flops: float = 0.0
    collectives: float = 0.0
    sent: float = 0.0  # bytes that the rank sends in collectives

    def along(self, deeper: Segment, at: float) -> Segment:
        """The segment on the line through this one (at 0) and another (at 1)."""
        shallower = {name: seconds for name, seconds in vars(self).items() if name != "phase"}
        return Segment(self.phase, **{k: max(0.0, v + (getattr(deeper, k) - v) * at) for k, v in shallower.items()})


# benchmarks/results/speed.json: four settings on an H200 and on H100s, predicted and measured.
SPEED_ERROR = "-18 to +52 %"
"""How far predicted tokens/s were off on GPUs. Their order was tested, on CPUs (benchmarks/results/auto.json)."""


@dataclass(frozen=True)
class TimeEstimate:
    """Predicted time of one optimizer step of one rank."""

    seconds: float
    parts: Mapping[str, float]  # seconds waited for each part of the hardware; hidden work does not count
    flops: float  # FLOPs of one rank's step, recomputation included
    targets: float  # tokens (or other units that the loss counts) of the step, over all ranks
    measured: bool  # whether the hardware's speeds were measured on this machine
    sent: float = 0.0  # bytes that one rank sends in collectives in a step

    @property
    def tokens_per_s(self) -> float:
        return self.targets / self.seconds


def step_time(
    segments: Sequence[Segment], micro_batches: int, targets: float, overlap: bool, measured: bool
) -> TimeEstimate:
    """The time of a step of `micro_batches`, some of which were traced; `overlap`: see `waits`."""
    parts: dict[str, float] = {}
    flops = sent = 0.0
    for segment in repeated(segments, micro_batches):
        flops, sent = flops + segment.flops, sent + segment.sent
        for name, seconds in waits(segment, overlap).items():
            parts[name] = parts.get(name, 0.0) + seconds
    return TimeEstimate(sum(parts.values()), parts, flops, targets, measured, sent)


def waits(segment: Segment, overlap: bool) -> dict[str, float]:
    """Seconds that a segment waits for each part of the hardware.

    With overlap, kernels, their dispatch, collectives and copies run side by side and the longest one counts; nothing
    hides one collective (the first gather or the last reduction), and work on the host is added. Without overlap
    everything adds up. Exchanges are added in any case: attention waits for them.
    """
    kernels = segment.compute + segment.recompute
    busy = {"compute": segment.compute, "recompute": segment.recompute, "host": segment.host}
    busy["exchanges"] = segment.exchanges
    hidden = {"dispatch": segment.dispatch, "links": segment.links, "copies": segment.copies}
    if not overlap:
        return busy | hidden
    longest = max(hidden, key=hidden.__getitem__)
    seconds_by_part = busy | dict.fromkeys(hidden, 0.0)
    seconds_by_part[longest] = max(0.0, hidden[longest] - kernels)
    if segment.collectives:
        seconds_by_part["links"] = max(seconds_by_part["links"], segment.links / segment.collectives)
    return seconds_by_part


def repeated(segments: Sequence[Segment], micro_batches: int) -> list[Segment]:
    """The segments of a whole step: its untraced micro-batches repeat the second-to-last traced one."""
    traced = sum(segment.phase == "forward" for segment in segments)
    if traced >= micro_batches:
        return list(segments)
    starts = [at for at, segment in enumerate(segments) if segment.phase == "forward"]
    middle = segments[starts[traced - 2] : starts[traced - 1]]  # forward and backward of one micro-batch
    at = next(index for index, segment in enumerate(segments) if segment is middle[-1]) + 1
    return [*segments[:at], *(replace(s) for s in [*middle] * (micro_batches - traced)), *segments[at:]]
