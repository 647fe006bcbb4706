"""How much host memory this process may use: its cgroup's limit, and what the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

# v1 writes "no limit" as the largest multiple of the page size that fits 63 bits.
_V1_UNLIMITED = 2**62


def host_limit() -> int:
    """Bytes: the tightest cgroup limit above this process, else the machine's memory."""
    total = int(psutil.virtual_memory().total)
    limit = cgroup_limit()
    return total if limit is None else min(limit, total)


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The tightest memory limit of this process's cgroup and its ancestors; `None` without one.

    Reads /proc/self/cgroup and the controllers' files under every place they are mounted (v2: memory.max, v1:
    memory.limit_in_bytes). In a container without its own cgroup namespace the process's path does not exist under the
    mount; its ancestors that do exist are read, the mount's root included.

    Args:
        root: where /proc and the mounts are looked up.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text()
        mounts = (root / "proc/self/mounts").read_text()
    except OSError:  # no Linux
        return None
    limits: list[int] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(root, mounts, "cgroup2", "memory.max", path)
        elif "memory" in controllers.split(","):
            limits += _limits(root, mounts, "cgroup", "memory.limit_in_bytes", path)
    return min(limits, default=None)


def _limits(root: Path, mounts: str, kind: str, file: str, path: str) -> Iterator[int]:
    for mount in _mounts(mounts, kind):
        base = root / mount.lstrip("/")
        group = PurePosixPath(path)
        for ancestor in (group, *group.parents):
            try:
                text = (base / str(ancestor).lstrip("/") / file).read_text().strip()
            except OSError:  # not under this mount, or the root group, which has no limit file
                continue
            if text != "max" and int(text) < _V1_UNLIMITED:
                yield int(text)


def _mounts(mounts: str, kind: str) -> Iterator[str]:
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[2] == kind and (kind == "cgroup2" or "memory" in fields[3].split(",")):
            yield fields[1].replace("\\040", " ")
