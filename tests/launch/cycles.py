"""Start and stop two ranks again and again: `python -m tests.launch.cycles COUNT FOLDER` prints what was left behind.

One launcher process throughout, as `shardkit launch` runs it; the ranks join, sum a number and leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def rank() -> None:
    from shardkit.config.load import load_config
    from shardkit.parallel.world import process_groups, rank_env

    config = load_config(None, ["run.device=cpu"]).config
    with process_groups(config, rank_env()) as world:
        assert world.sum([1.0]) == [world.size]
    print(f"pid {os.getpid()}", flush=True)


def drive(count: int, folder: Path) -> dict[str, Any]:
    """`count` cycles; what this process holds and what the machine shows before and after."""
    from shardkit.launch.local import launcher
    from shardkit.launch.spec import JobSpec

    build = launcher.build_argv
    launcher.build_argv = lambda spec: [*build(spec)[:-2], "-m", "tests.launch.cycles"]  # type: ignore[assignment]
    tmp = folder / "tmp"
    tmp.mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp)}
    found: dict[str, Any] = {"codes": []}
    for number in range(count + 1):
        if number == 1:  # the first one fills caches
            found["before"] = held(tmp)
        spec = JobSpec(config=None, run_dir=str(folder / f"run-{number}"), nproc_per_node=2, python=sys.executable)
        found["codes"].append(launcher.launch(spec, environ))
    return {**found, "after": held(tmp)}


def held(tmp: Path) -> dict[str, Any]:
    from shardkit.launch.local.processes import descendants

    return {
        "processes": len(descendants()), "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")), "listening": len(_listening()),
        "temporary files": sorted(path.name for path in tmp.rglob("*")), "shared memory": _unused_shared_memory(),
    }  # fmt: skip


def _listening() -> set[str]:
    """Inodes of this process's listening sockets."""
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def _unused_shared_memory() -> list[str]:
    """Entries of /dev/shm that no process uses: other programs on this machine have theirs open."""
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names -= {line.split()[-1] for line in (process / "maps").read_text().splitlines()}
            names -= {os.readlink(link) for link in (process / "fd").iterdir()}
        except OSError:  # it has ended, or is somebody else's
            continue
    return sorted(names)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(drive(int(sys.argv[1]), Path(sys.argv[2]))))
    else:
        rank()
