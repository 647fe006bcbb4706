"""How much host memory this process may use, its cgroup's limit or what the machine has, and how much is in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

# v1 writes "no limit" as the largest multiple of the page size that fits 63 bits.
_V1_UNLIMITED = 2**62


@dataclass(frozen=True)
class HostLimit:
    """A limit on host memory.

    Attributes:
        n_bytes: the most there is.
        folder: the cgroup that sets it; `None`: the machine.
    """

    n_bytes: int
    folder: Path | None = None

    def in_use(self) -> int:
        """Bytes that all processes under this limit hold and the kernel cannot take back; caches of files do not count.

        50 µs, 70 µs for a cgroup. A cgroup that is gone counts as empty.
        """
        if self.folder is None:
            memory = psutil.virtual_memory()
            return int(memory.total - memory.available)
        usage, caches = _COUNTERS[(self.folder / "memory.current").exists()]
        try:
            held = int((self.folder / usage).read_text())
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        except OSError:
            return 0
        return max(0, held - sum(int(stat.get(name, 0)) for name in caches))


# By whether it is a cgroup of version 2: what it holds, and what of that the kernel can take back.
_COUNTERS = {
    True: ("memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
    False: ("memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def tightest_limit() -> HostLimit:
    """The tightest cgroup limit above this process, or the machine's memory where that is less."""
    machine = HostLimit(int(psutil.virtual_memory().total))
    return min([*cgroup_limits(), machine], key=lambda limit: limit.n_bytes)


def host_limit() -> int:
    """Bytes: the tightest cgroup limit above this process, else the machine's memory."""
    return tightest_limit().n_bytes


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Bytes: the tightest of `cgroup_limits`; `None` without one."""
    return min((limit.n_bytes for limit in cgroup_limits(root)), default=None)


def cgroup_limits(root: Path = Path("/")) -> list[HostLimit]:
    """The memory limits of this process's cgroup and its ancestors.

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
        return []
    limits: list[HostLimit] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(root, mounts, "cgroup2", "memory.max", path)
        elif "memory" in controllers.split(","):
            limits += _limits(root, mounts, "cgroup", "memory.limit_in_bytes", path)
    return limits


def _limits(root: Path, mounts: str, kind: str, file: str, path: str) -> Iterator[HostLimit]:
    for mount in _mounts(mounts, kind):
        base = root / mount.lstrip("/")
        group = PurePosixPath(path)
        for ancestor in (group, *group.parents):
            folder = base / str(ancestor).lstrip("/")
            try:
                text = (folder / file).read_text().strip()
            except OSError:  # not under this mount, or the root group, which has no limit file
                continue
            if text != "max" and int(text) < _V1_UNLIMITED:
                yield HostLimit(int(text), folder)


def _mounts(mounts: str, kind: str) -> Iterator[str]:
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[2] == kind and (kind == "cgroup2" or "memory" in fields[3].split(",")):
            yield fields[1].replace("\\040", " ")
