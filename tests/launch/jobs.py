"""Starting `shardkit launch` in tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
_LAUNCHERS = re.compile(r"^(RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|TORCHELASTIC_|GROUP_|OMPI_|PMI|SHARDKIT_)")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher sets, ranks with one thread."""
    clean = {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}
    path = os.pathsep.join([str(REPO), *filter(None, [clean.get("PYTHONPATH")])])
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra}


def settings(run_dir: Path, how: str = "nothing", **extra: Any) -> list[str]:
    """Overrides of a tiny run of the task in tests/launch/tasks.py."""
    values = {
        "run.dir": run_dir, "run.device": "cpu", "train.max_steps": 6,
        "train.micro_batch_size": 2, "train.grad_accum_steps": 1,
        "task.factory": "tests.launch.tasks:Troubled", "task.args.how": how, "logging.tensorboard": "false",
        **{key.replace("__", "."): value for key, value in extra.items()},
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def command(*args: str, config: Path | None = None) -> list[str]:
    """`shardkit launch CONFIG ARGS`."""
    return [sys.executable, "-m", "shardkit.cli", "launch", str(config or REPO / "configs/ddp.yaml"), *args]


def run(
    argv: list[str], cwd: Path = REPO, timeout: float = 120, code: int | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; with `code` it must end with that exit code."""
    done = subprocess.run(argv, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout)
    assert code is None or done.returncode == code, f"exit code {done.returncode}, not {code}:\n{done.stderr}"
    return done


def started(argv: list[str], **env: str) -> subprocess.Popen[str]:
    """A command under way; all that it writes comes from its stdout."""
    return subprocess.Popen(
        argv, cwd=REPO, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def until_line(process: subprocess.Popen[str], start: str) -> None:
    """Read what a process writes until a line begins so."""
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith(start):
            return
    raise AssertionError(seen)


def losses(run_dir: Path) -> dict[int, float]:
    """Step → loss of metrics.jsonl; a step that stands there twice is an error."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len({r["step"] for r in records}) == len(records), [r["step"] for r in records]
    return {r["step"]: r["loss"] for r in records}


def with_marker(marker: str) -> list[int]:
    """Ids of the processes that have `marker` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if marker.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return [pid for pid in found if pid != os.getpid()]
