"""The CPUs of this process, and its control groups in both versions of the kernel's interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_V1_UNLIMITED = 2**60
"""v1 writes "no limit" as the largest multiple of the page size that fits 63 bits."""


def n_cpus() -> int:
    """The number of logical CPUs in this process's affinity mask; all of the machine's where there are none."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's control group with a controller and of its ancestors, and whether each is of v2.

    Every mount is searched, from the group to the mount's root. In a container without its own namespace of groups the
    process's path does not exist under the mount, but the mount's root does. Folders may lack any file.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in _mounts(controllers, controller, root):
            yield from ((mount.joinpath(*parts[:depth]), not controllers) for depth in range(len(parts), -1, -1))


def _mounts(controllers: str, controller: str, root: Path) -> list[Path]:
    """Where the groups of a controller are mounted; of v2 without `controllers`."""
    mounts = []
    for line in text_of(root / "proc/self/mounts").splitlines():
        _, mount, kind, options = [*line.split(), "", "", "", ""][:4]
        if kind == ("cgroup" if controllers else "cgroup2") and (not controllers or controller in options.split(",")):
            mounts.append(root / mount.replace("\\040", " ").lstrip("/"))
    usual = root / "sys/fs/cgroup"
    return mounts or ([usual / controllers, usual / controller] if controllers else [usual])


def memory_limits(root: Path = Path("/")) -> list[tuple[int, Path]]:
    """(bytes, folder) of each limit on the memory of this process's control groups."""
    limits = []
    for folder, is_v2 in cgroup_folders("memory", root):
        text = text_of(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if text.isdigit() and int(text) < _V1_UNLIMITED:
            limits.append((int(text), folder))
    return limits


def text_of(path: Path) -> str:
    """A file's text, stripped; empty if this kernel or container lacks the file."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
