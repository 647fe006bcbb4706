"""Which CPUs each rank of a node runs on: a share of those allowed, beside its GPU where that is known.

A rank that wanders between sockets reaches its memory, its GPU and its network card over the link between them.
The launcher passes the shares on in SHARDKIT_CPUS: `0-7:8-15`, an entry per local rank; `off` leaves ranks alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import LaunchError
from .env import RankEnv
from .gpus import pci_addresses
from .placement import shown

VARIABLE = "SHARDKIT_CPUS"
OFF = "off"
_LEAST = 2  # a rank has threads beside its own: collectives, loaders, saves
_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_UNSET = ("", "none", "false", "disabled")

Place = tuple[int, ...]
"""(NUMA node, package, core) of a CPU."""


def shares(n_ranks: int, on_gpus: bool, environ: Mapping[str, str], root: Path = Path("/")) -> list[list[int]]:
    """The CPUs of each of `n_ranks` started here; empty where ranks are better left alone.

    That is: a single rank, fewer than two CPUs each, or a user who binds threads (OpenMP's variables) or asks for more
    threads than a share has.
    """
    allowed = allowed_cpus()
    if n_ranks < 2 or any(environ.get(name, "").lower() not in _UNSET for name in _OPENMP):
        return []
    beside = gpu_nodes(environ, root) if on_gpus else []
    found = divide(allowed, n_ranks, topology(root), beside)
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    least = max(_LEAST, int(threads) if threads.isdigit() else 0)
    return found if min(map(len, found)) >= least else []


def divide(
    allowed: Sequence[int], n_ranks: int, places: Mapping[int, Place], beside: Sequence[int | None] = ()
) -> list[list[int]]:
    """Share `allowed` out: neighbours together, none twice.

    Args:
        allowed: CPUs that this process may use.
        places: where each CPU is; threads of a core stay together.
        beside: each rank's GPU's NUMA node: its ranks share the node's CPUs. Ignored unless known for every rank.
    """
    ordered = sorted(allowed, key=lambda cpu: (places.get(cpu, (0,)), cpu))
    nodes = {cpu: places.get(cpu, (0,))[0] for cpu in ordered}
    wanted = list(beside[:n_ranks])
    if len(wanted) < n_ranks or any(node not in nodes.values() for node in wanted):
        return [_part(ordered, rank, n_ranks) for rank in range(n_ranks)]
    found = []
    for rank, node in enumerate(wanted):
        near = [cpu for cpu in ordered if nodes[cpu] == node]
        found.append(_part(near, wanted[:rank].count(node), wanted.count(node)))
    return found


def _part(cpus: Sequence[int], index: int, count: int) -> list[int]:
    size = len(cpus) // count
    return list(cpus[index * size : (index + 1) * size])


def bind(env: RankEnv, environ: Mapping[str, str] | None = None) -> str | None:
    """Move this rank to its CPUs, before it has threads; what to say about it, None if nothing changed.

    The launcher's word counts. A task of srun takes its share itself, unless Slurm bound it (--cpu-bind).

    Raises:
        LaunchError: SHARDKIT_CPUS has no CPUs for this rank, or some that it may not use.
    """
    environ = os.environ if environ is None else environ
    given = environ.get(VARIABLE, "")
    if given == OFF:
        return None
    if given:
        listed = given.split(":")
        if env.local_rank >= len(listed):
            raise LaunchError(
                f"{VARIABLE}={shown(given)} has no entry for local rank {env.local_rank}",
                "give one list of CPUs per rank of the node, separated by colons, or set it to off",
            )
        _move(parse(listed[env.local_rank]))
        return None  # the launcher has said it
    if env.source != "slurm" or _bound_by_slurm(environ):
        return None
    found = shares(env.local_world_size, bool(pci_addresses(environ)), environ)
    if not found:
        return None
    _move(found[env.local_rank])
    return describe(found)


def _bound_by_slurm(environ: Mapping[str, str]) -> bool:
    """Whether this task has CPUs of its own already: by --cpu-bind, or because it may use no more than it asked for."""
    if environ.get("SLURM_CPU_BIND_TYPE", "").rstrip(":").lower() not in _UNSET:
        return True
    own = environ.get("SLURM_CPUS_PER_TASK", "")
    return own.isdigit() and len(allowed_cpus()) <= int(own)


def describe(found: Sequence[Sequence[int]]) -> str:
    """`CPUs per rank: 0-7 8-15`."""
    return f"CPUs per rank: {' '.join(render(cpus) for cpus in found)} ({VARIABLE}=off leaves them alone)"


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
    """`0-2,5` → [0, 1, 2, 5].

    Raises:
        LaunchError: anything else.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(f"{VARIABLE}: {shown(text)} is no list of CPUs", "write them like 0-7,16-23, or off")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(cpus)


def allowed_cpus() -> list[int]:
    """CPUs this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def topology(root: Path = Path("/")) -> dict[int, Place]:
    """Where each CPU is, as the kernel tells; empty where it does not."""
    found: dict[int, Place] = {}
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in parse(text) if (text := _text(node / "cpulist")) else []:
            core = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            package, number = (_text(core / name) for name in ("physical_package_id", "core_id"))
            found[cpu] = (int(node.name[4:]), int(package or 0), int(number or cpu))
    return found


def gpu_nodes(environ: Mapping[str, str], root: Path = Path("/")) -> list[int | None]:
    """The NUMA node of each GPU that a process started here would see; None where unknown."""
    return [_numa_node(address, root) for address in pci_addresses(environ, root)]


def _numa_node(address: str, root: Path) -> int | None:
    """The node a PCI device hangs on; None where the machine has but one, or does not say (−1)."""
    text = _text(root / "sys/bus/pci/devices" / address.lower() / "numa_node")
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _move(cpus: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise LaunchError(
            f"{VARIABLE}: this rank may not run on CPUs {render(cpus)}, only on {render(allowed_cpus())}",
            f"correct {VARIABLE}, or set it to off",
        ) from error
