"""Talking to the test cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.launch.jobs import REPO, environment, losses

SCRIPT = Path(__file__).with_name("cluster.sh")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")


def why_not() -> str | None:
    """Why there can be no cluster here; None once the packages are installed."""
    if os.geteuid() != 0:
        return "needs root to start a Slurm cluster of emulated nodes"
    done = subprocess.run(["bash", str(SCRIPT), "install"], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


class Cluster:
    """Two nodes of 4 CPUs; partition `high` preempts `batch`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment(
            SLURM_CONF=str(folder / "slurm.conf"),
            SHARDKIT_PYTHON=sys.executable,
            PATH=f"{os.environ['PATH']}:/usr/sbin",
        )

    def run(self, *argv: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=120)

    def call(self, *argv: str) -> str:
        done = self.run(*argv)
        assert done.returncode == 0, (argv, done.stdout, done.stderr)
        return done.stdout

    def shardkit(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "shardkit.cli", *args)

    def sbatch(self, style: str, output: Path, args: list[str], *options: str, config: str = "-") -> str:
        """Submit a template on 2 nodes × 2 ranks without GPUs; the job's id."""
        template = {"torchrun": "train.sbatch", "srun": "train_srun.sbatch"}[style]
        sizes = {"torchrun": ["--cpus-per-task=2"], "srun": ["--ntasks-per-node=2", "--cpus-per-task=1"]}[style]
        return self.call(
            "sbatch", "--parsable", "--nodes=2", "--gpus-per-node=0", *sizes, f"--output={output}",
            "--export=ALL,NPROC_PER_NODE=2", *options, str(REPO / "slurm" / template), config, *args,
        ).strip()  # fmt: skip

    def field(self, job: str, name: str) -> str:
        match = re.search(rf"(?:^| ){name}=(\S*)", self.call("scontrol", "show", "job", job, "-o"))
        assert match is not None, name
        return match[1]

    def wait(self, job: str, output: Path, seconds: float = 120) -> str:
        """The state that the job ended in."""

        def ended() -> bool:
            return self.field(job, "JobState") in _ENDED

        until(ended, seconds, lambda: f"{self.call('scontrol', 'show', 'job', job)}\n{read(output)}")
        return self.field(job, "JobState")

    def wait_for_step(self, run_dir: Path, step: int, output: Path) -> None:
        until(lambda: max(_losses(run_dir), default=0) >= step, 90, lambda: read(output))


def until(condition: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else f"{path}: no output yet"


def _losses(run_dir: Path) -> dict[int, float]:
    try:
        return losses(run_dir)
    except (OSError, ValueError):  # not there yet, or a line half written
        return {}
