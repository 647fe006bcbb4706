"""Talking to the test cluster, and the runs that tests put on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.guard import MARK
from tests.launch.jobs import REPO, environment, losses, settings

SCRIPT = Path(__file__).with_name("cluster.sh")
KILL_WAIT_S = 30
"""The cluster's KillWait, for all tests that set no other."""
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")


def why_not() -> str | None:
    """Why there can be no cluster here; None once the packages are installed."""
    if os.geteuid() != 0:
        return "needs root to start a Slurm cluster of emulated nodes"
    process = subprocess.run(["bash", str(SCRIPT), "install"], capture_output=True, text=True)
    return None if process.returncode == 0 else process.stderr.strip().splitlines()[-1]


class Cluster:
    """Two nodes of 4 CPUs; partition `high` preempts `batch`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment(
            SLURM_CONF=str(folder / "slurm.conf"),
            SHARDKIT_PYTHON=sys.executable,
            PATH=f"{os.environ['PATH']}:/usr/sbin",
        )
        self.env.pop(MARK, None)  # what Slurm starts ends with the cluster, not with a test

    def run(self, *argv: str, cwd: Path = REPO, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=timeout)

    def call(self, *argv: str) -> str:
        process = self.run(*argv)
        assert process.returncode == 0, (argv, process.stdout, process.stderr)
        return process.stdout

    def shardkit(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "shardkit.cli", *args)

    def submit(self, *args: str) -> tuple[str, str]:
        """The id of the job that `shardkit submit` queues, and what it prints."""
        process = self.shardkit("submit", *args)
        assert process.returncode == 0, process.stderr
        return process.stdout.split()[2], process.stdout

    def sbatch(self, style: str, output: Path, args: list[str], *options: str, nodes: int = 2, ranks: int = 2) -> str:
        """Submit a template on `nodes` × `ranks` without GPUs; the job's id."""
        template = {"torchrun": "train.sbatch", "srun": "train_srun.sbatch"}[style]
        sizes = {"torchrun": ["--cpus-per-task=2"], "srun": [f"--ntasks-per-node={ranks}", "--cpus-per-task=1"]}[style]
        return self.call(
            "sbatch", "--parsable", f"--nodes={nodes}", "--gpus-per-node=0", *sizes, f"--output={output}",
            f"--export=ALL,NPROC_PER_NODE={ranks}", *options, str(REPO / "slurm" / template), "-", *args,
        ).strip()  # fmt: skip

    def field(self, job: str, name: str) -> str:
        match = re.search(rf"(?:^| ){name}=(\S*)", self.call("scontrol", "show", "job", job, "-o"))
        assert match is not None, name
        return match[1]

    def set_kill_wait(self, seconds: int) -> None:
        """Change KillWait of the running cluster."""
        path = self.folder / "slurm.conf"
        path.write_text(re.sub(r"^KillWait=\d+", f"KillWait={seconds}", path.read_text(), flags=re.MULTILINE))
        self.call("scontrol", "reconfigure")

    def preempt(self) -> str:
        """Run a job of partition `high` on all nodes for a moment; its id."""
        options = ["-p", "high", "--nodes=2", "--exclusive", "-o", "/dev/null", "--wrap=true"]
        return self.call("sbatch", "--parsable", *options).strip()

    def wait(self, job: str, output: Path, seconds: float = 240) -> str:
        """The state that the job ended in."""

        def ended() -> bool:
            return self.field(job, "JobState") in _ENDED

        until(ended, seconds, lambda: f"{self.call('scontrol', 'show', 'job', job)}\n{read(output)}")
        return self.field(job, "JobState")

    def wait_for_start(self, job: str, restart: int, output: Path) -> bool:
        """Until the job runs for the `restart`-th time; False if it ended before."""
        state = ""

        def running() -> bool:
            nonlocal state
            shown = self.call("scontrol", "show", "job", job, "-o")  # in one look: it may be queued again any moment
            state = re.findall(r" JobState=(\S+)", shown)[0]
            return state in _ENDED or (state == "RUNNING" and f" Restarts={restart} " in shown)

        until(running, 180, lambda: f"{self.call('scontrol', 'show', 'job', job)}\n{read(output)}")
        return state == "RUNNING"

    def wait_for_step(self, run_dir: Path, step: int, output: Path) -> None:
        until(lambda: last_step(run_dir) >= step, 180, lambda: read(output))


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster that is started and stopped, with its files in an empty folder."""
    cluster = Cluster(folder)
    start = ["bash", str(SCRIPT), "start", str(folder), "2"]
    started = subprocess.run(start, env=cluster.env, stdout=subprocess.DEVNULL)
    try:
        assert started.returncode == 0, "the cluster did not come up, see above"
        yield cluster
    finally:
        subprocess.run(["bash", str(SCRIPT), "stop", str(folder)], check=False)


def until(condition: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else f"{path}: no output yet"


def last_step(run_dir: Path) -> int:
    """The last step in metrics.jsonl; 0 where there is none yet, or a line is half written."""
    try:
        return max(losses(run_dir), default=0)
    except (OSError, ValueError):
        return 0


def steady(run_dir: Path, steps: int = 60, **extra: Any) -> list[str]:
    """Overrides of a run whose steps take 50 ms, the same bits each time."""
    return settings(run_dir, "wait", train__max_steps=steps, train__deterministic="true", **extra)


def with_task(run_dir: Path, factory: str, **extra: Any) -> list[str]:
    """Overrides of a tiny run of a task of tests/slurm/tasks.py."""
    args = settings(run_dir, task__factory=f"tests.slurm.tasks:{factory}", **extra)
    return [item for item in args if not item.startswith("task.args.how=")]


def tiny(run_dir: Path, text: Path, strategy: str) -> list[str]:
    """Overrides of a small language model for five steps of 8 samples, whatever the number of ranks."""
    values = {
        "run.dir": run_dir, "run.device": "cpu", "data.path": text, "data.cache_dir": text / ".cache",
        "train.max_steps": 5, "train.seq_len": 32, "train.micro_batch_size": 2, "train.global_batch_size": 8,
        "train.eval_samples": 0, "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "optim.lr": 0.01,
        "parallel.strategy": strategy, "logging.tensorboard": "false",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def record(run_dir: Path) -> list[dict[str, Any]]:
    """restarts.jsonl."""
    return [json.loads(line) for line in (run_dir / "logs/restarts.jsonl").read_text().splitlines()]


def reasons(run_dir: Path) -> list[str]:
    """Why each start that could say so ended."""
    return [event["reason"] for event in record(run_dir) if event["event"] == "end"]
