"""Trainings of two real ranks, under torchrun or on a Slurm cluster of emulated nodes, that are disturbed and go on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.commands import python_m
from tests.launch.jobs import environment, losses
from tests.slurm import cluster as slurm
from tests.slurm.cluster import SCRIPT, Cluster, last_step, running, why_not

from .common import REPO
from .crashes_runs import LONG, check, check_latest, long_settings, newest

PACE_S = 0.05
"""Seconds of a step."""


def until(condition: Callable[[], bool], event: str) -> None:
    slurm.until(condition, 180, lambda: f"waited for long until {event}")


def saved_word(text: str) -> bool:
    return re.search(r"stopped by \S+ after step .*: saved |saved after USR2", text) is not None


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
        output = process.communicate(timeout=180)[0]
        check(process.returncode == (0 if again else 137), f"exit code {process.returncode}: {output[-600:]}")
        check(again or "killed by SIGKILL" in output, output[-600:])
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
        output, code = process.communicate(timeout=120)[0], process.returncode
        check(code == (130 if number == signal.SIGINT else 75), f"{number.name}: exit code {code}: {output[-600:]}")
        check((code == 75) == saved_word(output), f"exit code {code}, but it said: {output[-300:]}")
        at, saved = last_step(run_dir), newest(run_dir)
        check(code != 75 or saved == at, f"saved and stopped at step {at}, but the newest checkpoint is {saved}")
        self.finish(run_dir)

    def full_disk(self, run_dir: Path, chance: random.Random) -> None:
        """The disk with the checkpoints is full at some step: saves fail until there is room."""
        is_signalled, step, room = chance.random() < 0.5, chance.randint(1, 30), chance.randrange(4)
        with self.small_disk(run_dir) as disk:
            process = self.launch(run_dir, f"checkpoint.async_save={chance.choice(['true', 'false'])}")
            reach(run_dir, step, process)
            fill(disk, room)
            if is_signalled:
                process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=120)[0]
            check(process.returncode == 5, f"exit code {process.returncode}: {output[-600:]}")
            unsaved_word(output, last_step(run_dir))
            newest(run_dir)
            (disk / "filler").unlink()
            self.finish(run_dir)

    def second_writer(self, run_dir: Path, chance: random.Random) -> None:
        """Another run is started in the directory."""
        more = chance.choice(["run.resume=auto", "run.overwrite=true"])
        first = self.launch(run_dir, pace=10 * PACE_S)
        reach(run_dir, chance.randint(1, 15), first)
        second = self.launch(run_dir, more)
        refused = second.communicate(timeout=120)[0]
        is_refused = second.returncode == 2 and "is being written by process" in refused
        check(is_refused, f"{second.returncode}: {refused[-600:]}")
        finished = first.communicate(timeout=180)[0]
        check(first.returncode == 0, finished[-600:])
        self.complete(run_dir)


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


def unsaved_word(output: str, step: int) -> None:
    check(f"the last save, of step {step}, failed" in output, f"stopped at step {step}: {output[-600:]}")
    check(not saved_word(output), output[-600:])


def ranks_of(run_dir: Path) -> list[int]:
    """Processes that train in `run_dir`."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            here = any(word == f"run.dir={run_dir}" or word.startswith(f"{run_dir}/submit/") for word in words)
            if here and words[1:4].count("shardkit.train"):
                pids.append(int(path.parent.name))
    return sorted(pids)


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

    def ended(self, job: str, output: Path, expected: str, code: int) -> str:
        """Its output; the job must have ended so."""
        state = self.cluster.wait(job, output)
        text: str = output.read_text()
        exit_code = self.cluster.field(job, "ExitCode")
        check(state == expected and exit_code == f"{code}:0", f"{state}, {exit_code}: {text[-600:]}")
        return text

    def usr2(self, run_dir: Path, chance: random.Random, preempt: bool = False) -> None:
        """Slurm's warning before the time limit."""
        job, output = self.queue(run_dir)
        self.cluster.wait_for_step(run_dir, chance.randint(1, 40), output)
        if preempt:
            self.cluster.preempt()
        else:
            self.cluster.call("scancel", "--batch", "--signal=USR2", job)
        text = self.ended(job, output, "COMPLETED", 0)
        restarts = int(self.cluster.field(job, "Restarts"))
        check(restarts == 1 and text.count("saved after USR2: ") == 1, f"{restarts} restarts: {text[-600:]}")
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
            text = self.ended(job, output, "FAILED", 5)
            unsaved_word(text, last_step(run_dir))
            restarts, saved = int(self.cluster.field(job, "Restarts")), newest(run_dir)
            check(restarts == text.count("queued again") == (saved > 0), f"{restarts} restarts with {saved} saved")
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
        text = self.ended(*self.queue(run_dir, more, output=".second"), "FAILED", 2)
        check(f"is being written by Slurm job {job}" in text, text[-600:])
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
def a_cluster(work: Path, whole: dict[int, float], is_used: bool) -> Iterator[OnSlurm | None]:
    missing = why_not() if is_used else "not asked for"
    if missing is not None:
        print(f"without Slurm: {missing}", flush=True)
        yield None
        return
    folder = work / "slurm"
    folder.mkdir()
    with running(folder) as cluster:
        yield OnSlurm(work, whole, cluster)
