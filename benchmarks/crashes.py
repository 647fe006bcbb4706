"""Runs that are ended anywhere: what is lost, and whether what they said is true.

`python -m benchmarks.crashes` ends small training runs at seeded points, goes on with each, and compares. `--forked`:
processes forked from one that has loaded torch, killed before, in the middle of, or after a change on disk. `--real`:
two ranks under torchrun or on a Slurm cluster of emulated nodes (needs root), with kills, signals, full disks and
second writers. Every word of success ("saved", "queued again", exit code 0) is compared with what is on disk, and the
run that goes on must have each step once, with the losses of a run that nothing disturbed.

Cases that are done are kept in build/crashes.jsonl: started again with the same seed it goes on.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shardkit.checkpoint import manage
from shardkit.checkpoint.native import layout
from shardkit.launch.local import restart
from tests.commands import python_m
from tests.launch.jobs import environment, losses
from tests.slurm.cluster import SCRIPT, Cluster, last_step, running, why_not

from .common import REPO, add_line, read_lines, write_result
from .options import LIMIT, Option, options

PROGRESS = REPO / "build" / "crashes.jsonl"
STEPS, LONG = 6, 60
"""Steps of a forked run, and of a real one."""
PACE_S = 0.05
"""A step of a real run."""
CHANGES = ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "link", "utime", "ftruncate")
"""Functions of `os` through which a run changes what is on disk; files that are opened to be written count as well."""
WHERE = ("before", "torn", "after")
USERS = ("notes.txt", "logs/notes.txt", "checkpoints/README", "wandb/mine")


class Small:
    """A linear model on fixed samples; a step takes `pace` seconds."""

    def __init__(self, config: Any, pace: float = 0.0) -> None:
        self.pace = pace

    def build_model(self) -> nn.Module:
        return nn.Linear(8, 4)

    def dataset(self, split: Literal["train", "val"]) -> list[torch.Tensor] | None:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(8, generator=generator) for _ in range(64)] if split == "train" else None

    def n_targets(self, batch: torch.Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pace)
        return model(batch).square().sum()  # type: ignore[no-any-return]


def settings(run_dir: Path, **extra: Any) -> list[str]:
    values = {
        "run.dir": run_dir, "run.device": "cpu", "task.factory": "benchmarks.crashes:Small", "train.max_steps": STEPS,
        "train.micro_batch_size": 2, "train.grad_accum_steps": 1, "train.deterministic": "true",
        "logging.tensorboard": "false", "memory.interval": 3, "memory.plan": "false", "checkpoint.every_steps": 2,
        "checkpoint.keep_last": 2, **{key.replace("__", "."): value for key, value in extra.items()},
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def newest(run_dir: Path) -> int:
    """The newest checkpoint's step; every folder that looks like a checkpoint must be one."""
    found = layout.checkpoints(run_dir / "checkpoints")
    for path in found:
        problems = manage.verify(path)
        check(not problems, f"{path.name}: {problems[:1]}")
    return max([layout.step_of(path) or 0 for path in found], default=0)


def check_latest(run_dir: Path) -> None:
    """A script that follows `latest` finds a checkpoint."""
    latest = run_dir / "checkpoints" / layout.LATEST
    name = latest.read_text().strip() if latest.exists() else None
    check(name is None or (latest.parent / name / "manifest.json").exists(), f"latest names {name}, which is not there")


# ---- forked processes, killed at a change on disk


def fork(args: list[str], said: Path, crash: tuple[int, str] | None = None) -> int:
    """Train in a forked process; its exit code, −9 for one that was killed at its `crash[0]`-th change on disk.

    What it promises ("saved N"), and the number of changes at a normal end, are lines of the file `said`.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.setsid()
        with said.with_suffix(".out").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        code = _train(args, os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), crash)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(code)


def _train(args: list[str], promises: int, crash: tuple[int, str] | None) -> int:
    from shardkit.checkpoint.save import Checkpointer
    from shardkit.run import directory
    from shardkit.train import main

    directory.environment = dict  # asks git, twice for each case
    write, finished = os.write, Checkpointer._finished

    def promise(self: Checkpointer, report: Any) -> Any:
        report = finished(self, report)
        if report.error is None:
            write(promises, f"saved {report.step}\n".encode())
        return report

    Checkpointer._finished = promise  # type: ignore[method-assign]
    count = _count_changes(crash)
    code = main(args)
    write(promises, f"changes {count[0]}\n".encode())
    write(promises, f"modules {' '.join(sys.modules)}\n".encode())
    return code


def _count_changes(crash: tuple[int, str] | None) -> list[int]:
    """Count what changes the disk from now on, and end this process at the chosen change."""
    count, write, opened = [0], os.write, io.open

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            where = crash[1] if crash is not None and count[0] == crash[0] else None
            if where == "torn" and function is write:
                write(args[0], bytes(args[1])[: len(args[1]) // 2])
            if where in ("before", "torn"):
                end()
            found = function(*args, **kwargs)
            if where == "after":
                end()
            return found

        return call

    def open_counted(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        counted = guarded(opened) if set(mode) & set("wxa+") else opened
        return counted(file, mode, *args, **kwargs)

    for name in CHANGES:
        setattr(os, name, guarded(getattr(os, name)))
    io.open = open_counted  # type: ignore[assignment]  # what pathlib opens files with
    return count


class Scenario:
    """What is there before a run, how it is started, and how somebody goes on after a crash."""

    def __init__(
        self, work: Path, name: str, make: Callable[[Path], None], steps: int, *start: str, **extra: Any
    ) -> None:
        self.name, self.work, self.steps, self.start = name, work / name, steps, start
        self.extra = extra
        self.work.mkdir()
        make(self.work / "template")
        self.changes = 0

    def args(self, run_dir: Path, *more: str) -> list[str]:
        start = [item.replace("TEMPLATE", str(self.work / "template")) for item in (*self.start, *more)]
        return [*settings(run_dir, train__max_steps=self.steps, **self.extra), *start]

    def place(self, number: int | str) -> Path:
        """A run directory with what is there before."""
        run_dir = self.work / f"run{number}"
        if self.name != "from another run" and (self.work / "template").exists():
            shutil.copytree(self.work / "template", run_dir, symlinks=True)
        return run_dir


def scenarios(work: Path) -> list[Scenario]:
    """Each has been run once to its end, for the number of its changes."""

    def nothing(run_dir: Path) -> None:
        pass

    def half(run_dir: Path) -> None:
        check(fork(settings(run_dir, train__max_steps=4), work / "half") == 0, "the first half failed")

    def damaged(run_dir: Path) -> None:
        half(run_dir)
        os.truncate(run_dir / "checkpoints/step_00000004/rank_00000.bin", 100)

    def users(run_dir: Path) -> None:
        half(run_dir)
        for name in USERS:
            (run_dir / name).parent.mkdir(exist_ok=True)
            (run_dir / name).write_text("mine")
        (work / "precious").mkdir(exist_ok=True)
        (work / "precious/rank0.json").write_text("mine")
        (run_dir / "trace").symlink_to(work / "precious")

    fork(settings(work / "first"), work / "first.said")
    _load((work / "first.said").read_text().splitlines()[-1].split()[1:])
    found = [
        Scenario(work, "new", nothing, STEPS),
        Scenario(work, "saved in the background", nothing, STEPS, checkpoint__async_save="true"),
        Scenario(work, "resumed", half, STEPS, "run.resume=true"),
        Scenario(work, "resumed, the newest damaged", damaged, STEPS, "run.resume=true"),
        Scenario(work, "from another run", half, STEPS, "run.resume=TEMPLATE"),
        Scenario(work, "overwritten", users, STEPS, "run.overwrite=true", optim__lr=0.01),
    ]
    for one in found:
        said = one.work / "count"
        code = fork(one.args(one.place("whole")), said)
        check(code == 0, f"{one.name}: exit code {code}: {said.with_suffix('.out').read_text()[-2000:]}")
        lines = said.read_text().splitlines()
        one.changes = int(lines[-2].split()[1])
        _load(lines[-1].split()[1:])
    return found


def _load(modules: list[str]) -> None:
    """Load what a forked run loaded, so that the next ones find it."""
    for name in modules:
        if name not in sys.modules and name != "__main__":
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def forked_case(number: int, seed: int, all_of: list[Scenario]) -> dict[str, Any]:
    chance = random.Random(f"{seed}.{number}")
    one = chance.choice(all_of)
    crash = chance.randint(1, one.changes), chance.choice(WHERE)
    run_dir, said = one.place(number), one.work / f"said{number}"
    began = {"case": number, "seed": seed, "scenario": one.name, "change": crash[0], "where": crash[1]}
    try:
        code = fork(one.args(run_dir), said, crash)
        check(code in (-9, 0), f"exit code {code}")  # a thread that saves counts a little differently each time
        promised = [int(line.split()[1]) for line in said.read_text().splitlines() if line.startswith("saved ")]
        _look(one, run_dir, max(promised, default=0))
        again = _go_on(one, run_dir)
        done = fork(one.args(run_dir, *again), said.with_suffix(".again"))
        out = said.with_suffix(".out").with_stem(f"said{number}")
        check(done == 0, f"went on with exit code {done}: {out.read_text()[-600:]}")
        check(newest(run_dir) == STEPS, "the run went on, and its last checkpoint is not there")
        check(losses(run_dir) == losses(one.work / "runwhole"), "the losses are not those of an undisturbed run")
        _users_files(one, run_dir)
    except (AssertionError, OSError, ValueError, KeyError) as error:
        return {**began, "problem": f"{type(error).__name__}: {error}"}
    shutil.rmtree(run_dir)
    return {**began, "killed": code == -9, "promised": max(promised, default=0)}


def _look(one: Scenario, run_dir: Path, promised: int) -> None:
    """What is on disk right after the crash."""
    damaged = one.name == "resumed, the newest damaged"
    with _aside(run_dir / "checkpoints/step_00000004", damaged and _is_cut(run_dir)):
        found = newest(run_dir)
    check_latest(run_dir)
    check(found >= promised, f"step {promised} was said to be saved, {found} is the newest")
    if one.name == "resumed":
        check(found >= 4, f"the checkpoint of step 4 is lost, {found} is the newest")
    if damaged:
        check(found >= 2, f"the checkpoint of step 2 is lost, {found} is the newest")
    _users_files(one, run_dir)


def _is_cut(run_dir: Path) -> bool:
    path = run_dir / "checkpoints/step_00000004/rank_00000.bin"
    return path.exists() and path.stat().st_size == 100


@contextlib.contextmanager
def _aside(path: Path, wanted: bool) -> Iterator[None]:
    """Without the checkpoint that the scenario itself damaged."""
    if wanted:
        path.rename(path.with_suffix(".mine"))
    yield
    if wanted:
        path.with_suffix(".mine").rename(path)


def _users_files(one: Scenario, run_dir: Path) -> None:
    if one.name == "overwritten":
        check(all((run_dir / name).read_text() == "mine" for name in USERS), "a user's file is lost")
        check((one.work.parent / "precious/rank0.json").read_text() == "mine", "a link was followed")


def _go_on(one: Scenario, run_dir: Path) -> list[str]:
    """How a launcher starts it again; what somebody typed is typed again where no launcher would."""
    if one.name == "overwritten":  # half-way it is still the old run, and said to be one
        own = run_dir / "config.yaml"
        return ["run.overwrite=false", "run.resume=true"] if own.exists() and "lr: 0.01" in own.read_text() else []
    resume = one.name != "from another run" or str(one.work / "template")
    return restart.overrides(str(run_dir), resume, {"TORCHELASTIC_RESTART_COUNT": "1"})


# ---- real ranks


def until(condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < deadline, f"waited {seconds:g} s until {what}")
        time.sleep(0.05)


def saved_word(text: str) -> bool:
    return re.search(r"saved and stopped|saved after USR2", text) is not None


class Real:
    """Runs of two ranks that are disturbed, and go on."""

    scenarios: tuple[str, ...] = ("kill", "kill", "signal", "signal", "full_disk", "second_writer")

    def __init__(self, work: Path, whole: dict[int, float]) -> None:
        self.work, self.whole = work, whole
        self.started: list[subprocess.Popen[str]] = []

    def launch(self, run_dir: Path, *more: str, pace: float = PACE_S) -> subprocess.Popen[str]:
        args = [*long_settings(run_dir, pace), *more]
        argv = [sys.executable, "-m", "shardkit.cli", "launch", "-", "--nproc-per-node", "2", *args]
        process = subprocess.Popen(
            argv, cwd=REPO, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def reference(self) -> None:
        """The losses of a run that nothing disturbs."""
        self.two_ranks(self.work / "whole")
        self.whole.update(losses(self.work / "whole"))

    def two_ranks(self, run_dir: Path, *more: str) -> None:
        """Train to the end in two ranks."""
        done = python_m("shardkit.train", *long_settings(run_dir, 0.0), *more, ranks=2)
        check(done.codes == [0, 0], f"went on with exit codes {done.codes}: {done.stderr[-2000:]}")

    def end(self, run_dir: Path) -> None:
        """End what a case that failed left running."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        self.started.clear()
        for pid in ranks_of(run_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not ranks_of(run_dir), "the ranks have ended")

    def finish(self, run_dir: Path) -> None:
        """Go on to the end; nothing may be missing."""
        self.two_ranks(run_dir, "run.resume=true")
        self.complete(run_dir)

    def complete(self, run_dir: Path) -> None:
        check(losses(run_dir) == self.whole, "the losses are not those of an undisturbed run")
        check(newest(run_dir) == LONG, "the last checkpoint is not there")
        check_latest(run_dir)

    @contextlib.contextmanager
    def small_disk(self, run_dir: Path) -> Iterator[Path]:
        """Checkpoints lie on a small disk of their own, with room for them."""
        disk = run_dir.with_suffix(".disk")
        disk.mkdir()
        run_dir.mkdir()
        (run_dir / "checkpoints").symlink_to(disk)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(disk)], check=True)
        try:
            yield disk
        finally:
            self.end(run_dir)
            subprocess.run(["umount", str(disk)], check=True)

    def kill(self, run_dir: Path, chance: random.Random) -> None:
        """kill −9 of a rank; torchrun starts it again, or the user does."""
        again, step, victim = chance.random() < 0.5, chance.randint(1, 40), chance.randrange(2)
        process = self.launch(run_dir, *(["--max-restarts", "1"] if again else []))
        reach(run_dir, step, process)
        os.kill(ranks_of(run_dir)[victim], signal.SIGKILL)
        said = process.communicate(timeout=180)[0]
        check(process.returncode == (0 if again else 137), f"exit code {process.returncode}: {said[-600:]}")
        check(again or "killed by SIGKILL" in said, said[-600:])
        (self.complete if again else self.finish)(run_dir)

    def signal(self, run_dir: Path, chance: random.Random) -> None:
        """TERM of the launcher, a closed terminal, or Ctrl-C."""
        number = chance.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
        process = self.launch(run_dir)
        reach(run_dir, chance.randint(1, 40), process)
        if number == signal.SIGTERM:
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)  # all that belongs to the terminal hears of these
        said, code = process.communicate(timeout=120)[0], process.returncode
        check(code == (130 if number == signal.SIGINT else 75), f"{number.name}: exit code {code}: {said[-600:]}")
        check((code == 75) == saved_word(said), f"exit code {code}, but it said: {said[-300:]}")
        at, saved = last_step(run_dir), newest(run_dir)
        check(code != 75 or saved == at, f"saved and stopped at step {at}, but the newest checkpoint is {saved}")
        self.finish(run_dir)

    def full_disk(self, run_dir: Path, chance: random.Random) -> None:
        """The disk with the checkpoints is full at some step: saves fail until there is room."""
        told, step, room = chance.random() < 0.5, chance.randint(1, 30), chance.randrange(4)
        with self.small_disk(run_dir) as disk:
            process = self.launch(run_dir, f"checkpoint.async_save={chance.choice(['true', 'false'])}")
            reach(run_dir, step, process)
            fill(disk, room)
            if told:
                process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=120)[0]
            check(process.returncode == 5, f"exit code {process.returncode}: {said[-600:]}")
            unsaved_word(said, last_step(run_dir))
            newest(run_dir)
            (disk / "filler").unlink()
            self.finish(run_dir)

    def second_writer(self, run_dir: Path, chance: random.Random) -> None:
        """Another run is started in the directory."""
        more = chance.choice(["run.resume=auto", "run.overwrite=true"])
        first = self.launch(run_dir, pace=10 * PACE_S)
        reach(run_dir, chance.randint(1, 15), first)
        second = self.launch(run_dir, more)
        said = second.communicate(timeout=120)[0]
        check(second.returncode == 2 and "is being written by process" in said, f"{second.returncode}: {said[-600:]}")
        told = first.communicate(timeout=180)[0]
        check(first.returncode == 0, told[-600:])
        self.complete(run_dir)


def long_settings(run_dir: Path, pace: float) -> list[str]:
    long = settings(run_dir, train__max_steps=LONG, checkpoint__every_steps=7, task__args__pace=pace)
    return [*long, "parallel.strategy=ddp"]


def reach(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    until(lambda: last_step(run_dir) >= step or process.poll() is not None, f"step {step}")
    if process.poll() is not None:
        check(False, f"ended before step {step} with {process.returncode}: {process.communicate()[0][-600:]}")


def fill(disk: Path, pages: int) -> None:
    """Leave so many pages free; a checkpoint needs more."""
    with (disk / "filler").open("wb") as file:
        while True:
            stat = os.statvfs(disk)
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail - pages) * stat.f_frsize)
                return
            except OSError as error:
                if error.errno != errno.ENOSPC:  # a save took some of it meanwhile
                    raise


def unsaved_word(said: str, step: int) -> None:
    check(f"the last save, of step {step}, failed" in said, f"stopped at step {step}: {said[-600:]}")
    check(not saved_word(said), said[-600:])


def ranks_of(run_dir: Path) -> list[int]:
    """Processes that train in `run_dir`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            here = any(word == f"run.dir={run_dir}" or word.startswith(f"{run_dir}/submit/") for word in words)
            if here and words[1:4].count("shardkit.train"):
                found.append(int(path.parent.name))
    return sorted(found)


class OnSlurm(Real):
    """Jobs of a Slurm cluster that are disturbed."""

    scenarios = ("usr2", "usr2", "preempted", "usr2_without_room", "killed", "second_job", "orphans")

    def __init__(self, work: Path, whole: dict[int, float], cluster: Cluster) -> None:
        super().__init__(work, whole)
        self.cluster = cluster
        self.jobs: list[tuple[str, Path]] = []

    def queue(self, run_dir: Path, *more: str, output: str = ".out") -> tuple[str, Path]:
        path = run_dir.with_suffix(output)
        job = self.cluster.sbatch("srun", path, [*long_settings(run_dir, PACE_S), *more], nodes=1, ranks=2)
        self.jobs.append((job, path))
        return job, path

    def end(self, run_dir: Path) -> None:
        for job, path in self.jobs:
            self.cluster.run("scancel", job)
            self.cluster.wait(job, path)
        self.jobs.clear()
        super().end(run_dir)

    def ended(self, job: str, output: Path, wanted: str, code: int) -> str:
        """Its output; the job must have ended so."""
        state = self.cluster.wait(job, output)
        said: str = output.read_text()
        found = self.cluster.field(job, "ExitCode")
        check(state == wanted and found == f"{code}:0", f"{state}, {found}: {said[-600:]}")
        return said

    def usr2(self, run_dir: Path, chance: random.Random, preempt: bool = False) -> None:
        """Slurm's warning before the time limit."""
        job, output = self.queue(run_dir)
        self.cluster.wait_for_step(run_dir, chance.randint(1, 40), output)
        if preempt:
            self.cluster.preempt()
        else:
            self.cluster.call("scancel", "--batch", "--signal=USR2", job)
        said = self.ended(job, output, "COMPLETED", 0)
        restarts = int(self.cluster.field(job, "Restarts"))
        check(restarts == 1 and said.count("saved after USR2: ") == 1, f"{restarts} restarts: {said[-600:]}")
        self.complete(run_dir)

    def preempted(self, run_dir: Path, chance: random.Random) -> None:
        """A job with more rights takes the node."""
        self.usr2(run_dir, chance, preempt=True)

    def usr2_without_room(self, run_dir: Path, chance: random.Random) -> None:
        """The warning, and no room for the save."""
        with self.small_disk(run_dir) as disk:
            job, output = self.queue(run_dir)
            self.cluster.wait_for_step(run_dir, chance.randint(1, 30), output)
            fill(disk, chance.randrange(4))
            self.cluster.call("scancel", "--batch", "--signal=USR2", job)
            said = self.ended(job, output, "FAILED", 5)
            unsaved_word(said, last_step(run_dir))
            restarts, saved = int(self.cluster.field(job, "Restarts")), newest(run_dir)
            check(restarts == said.count("queued again") == (saved > 0), f"{restarts} restarts with {saved} saved")
            (disk / "filler").unlink()
            self.finish(run_dir)

    def killed(self, run_dir: Path, chance: random.Random) -> None:
        """kill −9 of a rank, and the user goes on."""
        job, output = self.queue(run_dir)
        self.cluster.wait_for_step(run_dir, chance.randint(1, 40), output)
        os.kill(ranks_of(run_dir)[chance.randrange(2)], signal.SIGKILL)
        check("killed by SIGKILL" in self.ended(job, output, "FAILED", 137), "said otherwise")
        self.finish(run_dir)

    def second_job(self, run_dir: Path, chance: random.Random) -> None:
        """Another job is queued in the directory."""
        more = chance.choice(["run.resume=auto", "run.overwrite=true"])
        job, output = self.queue(run_dir, f"task.args.pace={10 * PACE_S}")
        self.cluster.wait_for_step(run_dir, chance.randint(1, 15), output)
        said = self.ended(*self.queue(run_dir, more, output=".second"), "FAILED", 2)
        check(f"is being written by Slurm job {job}" in said, said[-600:])
        self.ended(job, output, "COMPLETED", 0)
        self.complete(run_dir)

    def orphans(self, run_dir: Path, chance: random.Random) -> None:
        """slurmd dies, the ranks live on, the job is started elsewhere."""
        job, output = self.queue(run_dir, "train.max_steps=3000", "checkpoint.every_steps=50")
        self.cluster.wait_for_step(run_dir, chance.randint(1, 100), output)
        node = self.cluster.field(job, "NodeList")
        os.kill(int((self.cluster.folder / "pids" / node).read_text()), signal.SIGKILL)
        errors = run_dir / f"logs/slurm-{job}.0/errors"
        try:
            until(lambda: len(list(errors.glob("*.json"))) == 2, "the orphans ended")
        finally:
            self.cluster.call("bash", str(SCRIPT), "start-node", str(self.cluster.folder), node)
        codes = [json.loads(path.read_text())["shardkit"]["exit_code"] for path in errors.glob("*.json")]
        check(codes == [6, 6], f"the orphans ended with {codes}")
        self.cluster.wait_for_step(run_dir, last_step(run_dir) + 5, output)
        self.cluster.call("scancel", job)
        self.cluster.wait(job, output)
        check(sorted(losses(run_dir)) == list(range(1, last_step(run_dir) + 1)), "a step is missing")
        newest(run_dir)


def fork_worker(todo: list[int], seed: int, all_of: list[Scenario], work: Path, until_s: float) -> int:
    """A process that works through these cases; its id."""
    pid = os.fork()
    if pid:
        return pid
    for number in todo:
        if time.monotonic() > until_s:
            break
        keep(forked_case(number, seed, all_of), work)
    sys.stdout.flush()
    os._exit(0)


def real_case(number: int, seed: int, local: Real | None, slurm: OnSlurm | None) -> dict[str, Any] | None:
    """None for a case that is not for these."""
    chance = random.Random(f"real {seed}.{number}")
    on_slurm = chance.random() < 0.3
    where = slurm if on_slurm else local
    if where is None:
        return None
    what = chance.choice(where.scenarios)
    run_dir = where.work / f"real{number}"
    began = {"case": number, "seed": seed, "scenario": f"{'Slurm' if on_slurm else 'torchrun'}: {what}", "real": True}
    try:
        try:
            getattr(where, what)(run_dir, chance)
        finally:
            where.end(run_dir)
    except (AssertionError, OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as error:
        return {**began, "problem": f"{type(error).__name__}: {error}"}
    shutil.rmtree(run_dir)
    return began


@contextlib.contextmanager
def a_cluster(work: Path, whole: dict[int, float], wanted: bool) -> Iterator[OnSlurm | None]:
    missing = why_not() if wanted else "not asked for"
    if missing is not None:
        print(f"without Slurm: {missing}", flush=True)
        yield None
        return
    folder = work / "slurm"
    folder.mkdir()
    with running(folder) as cluster:
        yield OnSlurm(work, whole, cluster)


# ---- both


def known(seed: int) -> dict[tuple[bool, int], dict[str, Any]]:
    """Cases of this seed that are done."""
    return {(bool(one.get("real")), one["case"]): one for one in read_lines(PROGRESS) if one["seed"] == seed}


def keep(one: dict[str, Any], work: Path) -> None:
    if "problem" in one:
        one["problem"] = one["problem"].replace(str(work), "WORK")
        print(f"case {one['case']}, {one['scenario']}: {one['problem']}", flush=True)
    add_line(PROGRESS, one)


def table(found: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    names = sorted({one["scenario"] for one in found})
    of = {name: [one for one in found if one["scenario"] == name] for name in names}
    return {
        name: {"cases": len(cases), "problems": sum("problem" in one for one in cases)} for name, cases in of.items()
    }


def main() -> None:
    args = options(
        __doc__,
        forked=Option(1000, "cases in forked processes"),
        real=Option(100, "cases with real ranks"),
        jobs=Option(2, "forked cases at a time"),
        seed=1,
        only=Option(None, "of the cases with real ranks", among=("torchrun", "slurm")),
        limit=LIMIT,
    )
    until_s, done = time.monotonic() + args.limit, known(args.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="crashes-") as folder:
        work = Path(folder)
        todo = [number for number in range(args.forked) if (False, number) not in done]
        if todo:
            all_of = scenarios(work)
            workers = [fork_worker(todo[n :: args.jobs], args.seed, all_of, work, until_s) for n in range(args.jobs)]
            for pid in workers:
                os.waitpid(pid, 0)
            done = known(args.seed)
        todo = [number for number in range(args.real) if (True, number) not in done]
        if todo and time.monotonic() < until_s:
            local = Real(work, {})
            local.reference()
            with a_cluster(work, local.whole, args.only != "torchrun") as slurm:
                for number in todo:
                    if time.monotonic() > until_s:
                        break
                    one = real_case(number, args.seed, None if args.only == "slurm" else local, slurm)
                    if one is not None:
                        keep(one, work)
            done = known(args.seed)
    kinds = {
        kind: [one for (is_real, _), one in done.items() if is_real == (kind == "real")] for kind in ("forked", "real")
    }
    problems = [one for one in done.values() if "problem" in one]
    write_result("crashes", {
        "seed": args.seed,
        "asked": {"forked": args.forked, "real": args.real},
        **{kind: {"cases": len(found), "by_scenario": table(found)} for kind, found in kinds.items()},
        "problems": problems,
    })  # fmt: skip
    print(f"{len(kinds['forked'])} forked, {len(kinds['real'])} real, {len(problems)} with a problem", flush=True)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
