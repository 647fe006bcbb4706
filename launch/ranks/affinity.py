"""CPUs and threads of each rank of a node: a share of the allowed CPUs, near its GPU."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import LaunchError
from ...files import cgroup_folders, n_cpus, text_of
from .env import RankEnv, integer, pci_addresses, shown, slurm_step

_ROOT = Path("/")


def default_omp_threads(local_world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Threads per rank: OMP_NUM_THREADS if set, else this process's cores shared among the node's ranks, at least 1.

    A task with its own cores from srun (SLURM_CPUS_PER_TASK) keeps all of them. torchrun sets an unset OMP_NUM_THREADS
    to 1 when it starts several ranks: call this before torchrun, not in its ranks.
    """
    threads = environ.get("OMP_NUM_THREADS", "").strip()
    if threads:
        outermost = threads.split(",")[0].strip()  # it may list one for each nesting level
        if not re.fullmatch(r"[0-9]{1,6}", outermost) or int(outermost) < 1:
            raise LaunchError(f"OMP_NUM_THREADS={shown(threads)} is not a positive integer", "correct or unset it")
        return int(outermost)
    cores = available_cores()
    if "SLURM_CPUS_PER_TASK" in environ and slurm_step(environ) is not None:
        return max(1, min(cores, integer(environ, "SLURM_CPUS_PER_TASK")))
    return max(1, cores // local_world_size)


def available_cores() -> int:
    """Logical CPUs that this process may keep busy: its affinity mask, limited by the cgroup's CPU quota."""
    quota = cgroup_cpu_quota()
    return n_cpus() if quota is None else max(1, min(n_cpus(), math.floor(quota)))


def cgroup_cpu_quota(root: Path = _ROOT) -> float | None:
    """Number of CPUs (a fraction is possible) that this process's control group may use; None = no limit.

    The tightest limit up to the root counts (cgroup v2: `cpu.max`; v1: `cpu.cfs_quota_us / cpu.cfs_period_us`). In a
    container `/proc/self/cgroup` may name a host path that is not mounted: then the mount's root applies.
    """
    quotas: list[float] = []
    for folder, is_v2 in cgroup_folders("cpu", root):
        if is_v2:
            quota, period = [*text_of(folder / "cpu.max").split(), "", ""][:2]
        else:
            quota, period = (text_of(folder / f"cpu.cfs_{field}_us") for field in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):  # -1 and max: no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


VARIABLE = "SHARDKIT_CPUS"
OFF = "off"
_LEAST = 2  # a rank has other threads too: collectives, loaders, saves
_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_UNSET = ("", "none", "false", "disabled")

CpuLocation = tuple[int, ...]
"""(NUMA node, package, core) of a CPU."""


def shares(n_ranks: int, on_gpus: bool, environ: Mapping[str, str], root: Path = Path("/")) -> list[list[int]]:
    """The CPUs of each of `n_ranks` started here; empty if ranks should not be bound.

    A single rank, ranks with fewer than two CPUs each, and ranks whose user binds threads (OpenMP's variables) or asks
    for more threads than a share has are not bound.
    """
    allowed = allowed_cpus()
    if n_ranks < 2 or any(environ.get(name, "").lower() not in _UNSET for name in _OPENMP):
        return []
    beside = gpu_nodes(environ, root) if on_gpus else []
    cpus_by_rank = divide(allowed, n_ranks, topology(root), beside)
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    least = max(_LEAST, int(threads) if threads.isdigit() else 0)
    return cpus_by_rank if min(map(len, cpus_by_rank)) >= least else []


def divide(
    allowed: Sequence[int], n_ranks: int, places: Mapping[int, CpuLocation], beside: Sequence[int | None] = ()
) -> list[list[int]]:
    """Divide `allowed` among ranks: neighbours stay together, no CPU is used twice.

    `allowed`: CPUs that this process may use. `places`: where each CPU is; threads of a core stay together. `beside`:
    the NUMA node of each rank's GPU; a node's ranks share its CPUs. Ignored unless known for every rank.
    """
    ordered = sorted(allowed, key=lambda cpu: (places.get(cpu, (0,)), cpu))
    nodes = {cpu: places.get(cpu, (0,))[0] for cpu in ordered}
    rank_nodes = list(beside[:n_ranks])
    if len(rank_nodes) < n_ranks or any(node not in nodes.values() for node in rank_nodes):
        return [_part(ordered, rank, n_ranks) for rank in range(n_ranks)]
    cpus_by_rank = []
    for rank, node in enumerate(rank_nodes):
        near = [cpu for cpu in ordered if nodes[cpu] == node]
        cpus_by_rank.append(_part(near, rank_nodes[:rank].count(node), rank_nodes.count(node)))
    return cpus_by_rank


def _part(cpus: Sequence[int], index: int, count: int) -> list[int]:
    size = len(cpus) // count
    return list(cpus[index * size : (index + 1) * size])


def bind(env: RankEnv, environ: Mapping[str, str] = os.environ) -> str | None:
    """Bind this rank to its CPUs, before it has threads; returns a message, None if there is nothing to say. The
    launcher's SHARDKIT_CPUS decides. An srun task takes its share itself, unless Slurm bound it (--cpu-bind)."""
    setting = environ.get(VARIABLE, "")
    if setting == OFF:
        return None
    if setting:
        listed = setting.split(":")
        if env.local_rank >= len(listed):
            raise LaunchError(
                f"{VARIABLE}={shown(setting)} has no entry for local rank {env.local_rank}",
                "give one list of CPUs per rank of the node, separated by colons, or set it to off",
            )
        _move(parse(listed[env.local_rank]))
        return None  # the launcher has printed it
    cpus_per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    # Slurm may have bound the task by --cpu-bind, or its cgroup may hold no more CPUs than it asked for.
    is_bound = environ.get("SLURM_CPU_BIND_TYPE", "").rstrip(":").lower() not in _UNSET
    is_bound = is_bound or (cpus_per_task.isdigit() and len(allowed_cpus()) <= int(cpus_per_task))
    if env.source != "slurm" or is_bound:
        return None
    cpus_by_rank = shares(env.local_world_size, bool(pci_addresses(environ)), environ)
    if not cpus_by_rank:
        return None
    _move(cpus_by_rank[env.local_rank])
    return describe(cpus_by_rank)


def describe(cpus_by_rank: Sequence[Sequence[int]]) -> str:
    """`CPUs per rank: 0-7 8-15`."""
    return f"CPUs per rank: {' '.join(render(cpus) for cpus in cpus_by_rank)} ({VARIABLE}=off turns this off)"


def render(cpus: Sequence[int]) -> str:
    """[0, 1, 2, 5] → `0-2,5`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def parse(text: str) -> list[int]:
    """`0-2,5` → [0, 1, 2, 5]."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(f"{VARIABLE}: {shown(text)} is not a list of CPUs", "write them like 0-7,16-23, or off")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(cpus)


def allowed_cpus() -> list[int]:
    """CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def topology(root: Path = Path("/")) -> dict[int, CpuLocation]:
    """The place of each CPU, from the kernel; empty if it does not say."""
    locations: dict[int, CpuLocation] = {}
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in parse(text) if (text := text_of(node / "cpulist")) else []:
            core = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            package, number = (text_of(core / name) for name in ("physical_package_id", "core_id"))
            locations[cpu] = (int(node.name[4:]), int(package or 0), int(number or cpu))
    return locations


def gpu_nodes(environ: Mapping[str, str], root: Path = Path("/")) -> list[int | None]:
    """The NUMA node of each GPU that a process started here would see; None if there is only one, or unknown (−1)."""
    devices = root / "sys/bus/pci/devices"
    texts = [text_of(devices / address.lower() / "numa_node") for address in pci_addresses(environ, root)]
    return [int(text) if text.isdigit() else None for text in texts]


def _move(cpus: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise LaunchError(
            f"{VARIABLE}: this rank may not run on CPUs {render(cpus)}, only on {render(allowed_cpus())}",
            f"correct {VARIABLE}, or set it to off",
        ) from error
