"""Trainings forked from one process that has loaded torch, each killed at a change on disk."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardkit.launch.local import restart
from tests.launch.jobs import losses

from .crashes_runs import STEPS, check, check_latest, newest, settings

CHANGES = ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "link", "utime", "ftruncate")
"""Functions of `os` through which a run changes what is on disk; files that are opened to be written count as well."""
WHERE = ("before", "torn", "after")
USERS = ("notes.txt", "logs/notes.txt", "checkpoints/README", "wandb/mine")


def fork(args: list[str], promises_file: Path, crash: tuple[int, str] | None = None) -> int:
    """Train in a forked process; its exit code, −9 for one that was killed at its `crash[0]`-th change on disk.

    What it promises ("saved N"), and the number of changes at a normal end, are lines of the file `promises_file`.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.setsid()
        with promises_file.with_suffix(".out").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        code = _train(args, os.open(promises_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), crash)
    except BaseException:
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
            returned = function(*args, **kwargs)
            if where == "after":
                end()
            return returned

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
    made = [
        Scenario(work, "new", nothing, STEPS),
        Scenario(work, "saved in the background", nothing, STEPS, checkpoint__async_save="true"),
        Scenario(work, "resumed", half, STEPS, "run.resume=true"),
        Scenario(work, "resumed, the newest damaged", damaged, STEPS, "run.resume=true"),
        Scenario(work, "from another run", half, STEPS, "run.resume=TEMPLATE"),
        Scenario(work, "overwritten", users, STEPS, "run.overwrite=true", optim__lr=0.01),
    ]
    for scenario in made:
        promises_file = scenario.work / "count"
        code = fork(scenario.args(scenario.place("whole")), promises_file)
        check(code == 0, f"{scenario.name}: exit code {code}: {promises_file.with_suffix('.out').read_text()[-2000:]}")
        lines = promises_file.read_text().splitlines()
        scenario.changes = int(lines[-2].split()[1])
        _load(lines[-1].split()[1:])
    return made


def _load(modules: list[str]) -> None:
    """Load what a forked run loaded, so that the next ones find it."""
    for name in modules:
        if name not in sys.modules and name != "__main__":
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def forked_case(number: int, seed: int, all_of: list[Scenario]) -> dict[str, Any]:
    chance = random.Random(f"{seed}.{number}")
    scenario = chance.choice(all_of)
    crash = chance.randint(1, scenario.changes), chance.choice(WHERE)
    run_dir, promises_file = scenario.place(number), scenario.work / f"said{number}"
    began = {"case": number, "seed": seed, "scenario": scenario.name, "change": crash[0], "where": crash[1]}
    try:
        code = fork(scenario.args(run_dir), promises_file, crash)
        check(code in (-9, 0), f"exit code {code}")  # a thread that saves counts a little differently each time
        promises = promises_file.read_text().splitlines()
        promised = [int(line.split()[1]) for line in promises if line.startswith("saved ")]
        _look(scenario, run_dir, max(promised, default=0))
        again = _go_on(scenario, run_dir)
        done = fork(scenario.args(run_dir, *again), promises_file.with_suffix(".again"))
        out = promises_file.with_suffix(".out").with_stem(f"said{number}")
        check(done == 0, f"went on with exit code {done}: {out.read_text()[-600:]}")
        check(newest(run_dir) == STEPS, "the run went on, and its last checkpoint is not there")
        check(losses(run_dir) == losses(scenario.work / "runwhole"), "the losses are not those of an undisturbed run")
        _users_files(scenario, run_dir)
    except (AssertionError, OSError, ValueError, KeyError) as error:
        return {**began, "problem": f"{type(error).__name__}: {error}"}
    shutil.rmtree(run_dir)
    return {**began, "killed": code == -9, "promised": max(promised, default=0)}


def _look(scenario: Scenario, run_dir: Path, promised: int) -> None:
    """What is on disk right after the crash."""
    damaged = scenario.name == "resumed, the newest damaged"
    with _aside(run_dir / "checkpoints/step_00000004", damaged and _is_cut(run_dir)):
        step = newest(run_dir)
    check_latest(run_dir)
    check(step >= promised, f"step {promised} was said to be saved, {step} is the newest")
    if scenario.name == "resumed":
        check(step >= 4, f"the checkpoint of step 4 is lost, {step} is the newest")
    if damaged:
        check(step >= 2, f"the checkpoint of step 2 is lost, {step} is the newest")
    _users_files(scenario, run_dir)


def _is_cut(run_dir: Path) -> bool:
    path = run_dir / "checkpoints/step_00000004/rank_00000.bin"
    return path.exists() and path.stat().st_size == 100


@contextlib.contextmanager
def _aside(path: Path, is_damaged: bool) -> Iterator[None]:
    """Without the checkpoint that the scenario itself damaged."""
    if is_damaged:
        path.rename(path.with_suffix(".mine"))
    yield
    if is_damaged:
        path.with_suffix(".mine").rename(path)


def _users_files(scenario: Scenario, run_dir: Path) -> None:
    if scenario.name == "overwritten":
        check(all((run_dir / name).read_text() == "mine" for name in USERS), "a user's file is lost")
        check((scenario.work.parent / "precious/rank0.json").read_text() == "mine", "a link was followed")


def _go_on(scenario: Scenario, run_dir: Path) -> list[str]:
    """How a launcher starts it again; what somebody typed is typed again where no launcher would."""
    if scenario.name == "overwritten":  # half-way it is still the old run, and said to be one
        config_file = run_dir / "config.yaml"
        is_new = config_file.exists() and "lr: 0.01" in config_file.read_text()
        return ["run.overwrite=false", "run.resume=auto"] if is_new else []
    resume = scenario.name != "from another run" or str(scenario.work / "template")
    return restart.overrides(str(run_dir), resume, {"TORCHELASTIC_RESTART_COUNT": "1"})
