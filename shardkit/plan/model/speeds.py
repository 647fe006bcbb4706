"""How fast one rank's hardware is: measured by `shardkit doctor --calibrate`, else what is typical for the card."""

from __future__ import annotations

import math
import os
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...hardware import calibration
from ...models.flops import gpu_peak_flops
from ..target import Target

# What good kernels reach of a data sheet's figure.
_OF_PEAK_FLOPS = 0.7
_OF_BANDWIDTH = 0.8
_HOST_BYTES_PER_S = 200e9  # a server's memory, shared by the ranks of a machine
_CPU_CORE_FLOPS = 4e10
_CPU_SPECIAL = 0.2  # gelu, softmax, exp: 3 to 10 of 20 to 30 GB/s on one core with AVX-512 (torch 2.13)
_CPU_ATTENTION = 0.4
_NEW_PAGES = 2.5e9  # pages of 4 KiB
_LATE = 2e-3  # ranks that share a machine with others
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Speeds:
    """What one rank reaches while all ranks work.

    Attributes:
        matmul: FLOP/s of large matrix products by type: fp32, tf32, bf16, fp16, fp8.
        memory: bytes/s that kernels read and write in the device's memory.
        special: the same of kernels that compute exponentials and the like: as fast on a GPU, much slower on a CPU.
        attention: fused attention's share of the speed of matrix products.
        host: bytes/s that an optimizer step on the CPU reads and writes.
        copies: bytes/s between device and host, one direction.
        link: bytes/s of collectives inside a machine, as bus bandwidth.
        network: bytes/s of each rank to other machines.
        operator: seconds to issue one operator.
        collective: seconds that the smallest collective takes.
        late: seconds that ranks wait for the latest at a collective, where nothing hides it.
        hop: seconds that a ring takes for each further rank.
        tables: collective (all_reduce, all_gather, reduce_scatter) → [[bytes, bus bytes/s], …], where measured.
        tables_nodes: machines that took part in measuring them.
        new_pages: bytes/s that the system gives to new large tensors; a GPU's allocator keeps what it has.
        overlap: collectives and copies run beside kernels, and operators are issued ahead, as on a GPU.
        measured: on this machine.
    """

    matmul: Mapping[str, float]
    memory: float
    special: float
    attention: float
    host: float
    copies: float
    link: float
    network: float
    operator: float
    collective: float
    hop: float
    overlap: bool
    new_pages: float = math.inf
    late: float = 0.0
    tables: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    tables_nodes: int = 1
    measured: bool = False

    def collective_seconds(self, kind: str, n_bytes: int, ranks: int, nodes: int) -> float:
        """Time of a collective over `n_bytes` (of the whole tensor) in a group of `ranks` on `nodes` machines.

        Bytes that pass each rank, at the bus bandwidth (see `bandwidth`); between machines every rank of a machine has
        its own way out.
        """
        passing = n_bytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        table = self.tables.get(kind) if nodes <= self.tables_nodes else None
        if table:
            return self.late + passing / _between(table, n_bytes) + self.hop * (ranks - 1)
        bus = self.link if nodes == 1 else min(self.link, self.network * ranks / nodes)
        return self.late + self.collective + self.hop * (ranks - 1) + passing / bus


def speeds_of(target: Target) -> Speeds:
    """The speeds of a target's ranks; those of another number of ranks where only they were measured."""
    typical = _typical(target)
    device = target.gpu.device_name if target.gpu else calibration.cpu_name()
    constants = calibration.find(device, target.world_size)
    return typical if constants is None or "operator_s" not in constants else _measured(typical, constants, target)


def _typical(target: Target) -> Speeds:
    gpu = target.gpu
    if gpu is None:
        flops = _CPU_CORE_FLOPS * max(1, (os.cpu_count() or 1) // target.ranks_per_node)
        by_type = {"fp32": flops, "tf32": flops, "bf16": flops, "fp16": flops, "fp8": flops}
        return Speeds(
            matmul=by_type, memory=5e9, special=5e9 * _CPU_SPECIAL, attention=_CPU_ATTENTION, host=5e9, copies=5e9,
            link=1e9, network=1e9, operator=5e-6, collective=2e-4, hop=1e-5, overlap=False, new_pages=_NEW_PAGES,
            late=_LATE,
        )  # fmt: skip
    peaks = {mode: gpu_peak_flops(gpu.device_name, mode) for mode in ("fp32", "tf32", "bf16", "fp16")}
    slowest = peaks["fp32"] or gpu.hbm_gb_s * 2e10
    found = {mode: _OF_PEAK_FLOPS * (peak or slowest) for mode, peak in peaks.items()}
    return Speeds(
        matmul={**found, "fp8": found["bf16"] * (2 if gpu.capability >= (8, 9) else 1)},
        memory=_OF_BANDWIDTH * gpu.hbm_gb_s * 1e9,
        special=_OF_BANDWIDTH * gpu.hbm_gb_s * 1e9,
        attention=1.0,
        host=min(100e9, _HOST_BYTES_PER_S / target.ranks_per_node),
        copies=_OF_BANDWIDTH * gpu.pcie_gb_s * 1e9,
        link=_OF_BANDWIDTH * gpu.link_gb_s * 1e9,
        network=_OF_BANDWIDTH * gpu.network_gb_s * 1e9,
        operator=1e-5,
        collective=2e-5,
        hop=1e-6,
        overlap=True,
    )


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
    nodes = -(-constants["world_size"] // target.ranks_per_node)
    late = typical.late if constants.get("late_s") is None else constants["late_s"]
    return replace(speeds, tables=tables, tables_nodes=nodes, collective=constants["collective_s"], hop=0.0, late=late)


def _between(table: Sequence[Sequence[float]], n_bytes: int) -> float:
    """Bus bandwidth at a size, on straight lines in logarithms; below and above the table as at its ends per byte."""
    sizes, speeds = zip(*table, strict=True)
    if n_bytes <= sizes[0]:
        return float(speeds[0] * max(n_bytes, 1) / sizes[0])  # as long as the smallest
    at = bisect(sizes, n_bytes)
    if at == len(sizes):
        return float(speeds[-1])
    share = math.log(n_bytes / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
    return float(speeds[at - 1] ** (1 - share) * speeds[at] ** share)
