"""How many CPU threads each rank should use."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ...errors import LaunchError
from .placement import integer, shown, slurm_step

_ROOT = Path("/")


def default_omp_threads(local_world_size: int, environ: Mapping[str, str] | None = None) -> int:
    """Threads per rank: OMP_NUM_THREADS if set, else this process's cores shared among the node's ranks, at least 1.

    A task that srun gave its own cores (SLURM_CPUS_PER_TASK) keeps all of them. torchrun sets OMP_NUM_THREADS=1 itself
    when it starts several ranks and the variable is unset, so call this before torchrun, not in its ranks.

    Raises:
        LaunchError: OMP_NUM_THREADS or SLURM_CPUS_PER_TASK is not a positive integer.
    """
    if local_world_size < 1:
        raise ValueError(f"local_world_size={local_world_size}, expected at least 1")
    environ = os.environ if environ is None else environ
    asked = environ.get("OMP_NUM_THREADS", "").strip()
    if asked:
        return _outermost(asked)
    cores = available_cores()
    if "SLURM_CPUS_PER_TASK" in environ and slurm_step(environ) is not None:
        return max(1, min(cores, integer(environ, "SLURM_CPUS_PER_TASK")))
    return max(1, cores // local_world_size)


def available_cores() -> int:
    """Logical CPUs this process may keep busy: its affinity mask, cut to the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cgroup_cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time this process's control group may use; None = no limit.

    The tightest limit on the way up counts (cgroup v2: `cpu.max`; v1: `cpu.cfs_quota_us / cpu.cfs_period_us`). Inside a
    container `/proc/self/cgroup` may name a path of the host that is not mounted: then the mount's top is what applies.
    """
    quotas: list[float] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        mount = root / "sys/fs/cgroup"
        if controllers:
            mount = next((m for m in (mount / controllers, mount / "cpu") if m.is_dir()), mount)
        for directory in _upwards(mount, path):
            quota = _v1_quota(directory) if controllers else _v2_quota(directory)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _v2_quota(directory: Path) -> float | None:
    quota, period = [*_text(directory / "cpu.max").split(), "", ""][:2]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _v1_quota(directory: Path) -> float | None:
    quota, period = (_text(directory / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None  # -1: no limit


def _text(path: Path) -> str:
    """A file's text; empty where this kernel or container does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _outermost(asked: str) -> int:
    """OMP_NUM_THREADS may list a number for each nesting level: the first is the outermost."""
    first = asked.split(",")[0].strip()
    if not re.fullmatch(r"[0-9]{1,6}", first) or int(first) < 1:
        raise LaunchError(
            f"OMP_NUM_THREADS={shown(asked)} is not a positive integer", "correct or unset OMP_NUM_THREADS"
        )
    return int(first)
