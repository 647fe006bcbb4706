"""Run a command on emulated GPUs until it has done its steps, and end everything that it started."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ..errors import LaunchError, gib, printable
from ..hardware.cards import Gpu
from ..launch.local import processes
from .build import built
from .environment import OF_A_REHEARSAL, torch_of
from .ranks import RehearsedWorld
from .verdict import (  # fmt: skip
    CARDS,
    DOES_NOT_FIT,
    EXIT_CODES,
    FAILED,
    FITS,
    GIVEN,
    NOT_KNOWN,
    Finish,
    Verdict,
    judge,
    read_cards,
    read_records,
)

SANDBOX = Path(__file__).with_name("sandbox.py")
START_LIVE = Path(__file__).with_name("start_live.py")
REFUSED = 125
"""Exit code of the sandbox where the kernel gives it no namespaces."""
STALLED_S = 30.0
"""How long the other ranks may do nothing once the first has done its steps."""
LATE_S = 10.0
"""How long the other ranks may do nothing once the first has all that it waits for, and they have their steps."""
LAST_WORDS_S = 5.0
"""How long a program may go on after a rank's exception, to print it."""
UNLIMITED = 1 << 42
"""Bytes of the card on which the need of a program is measured that does not fit: 4 TiB."""
TRACKERS_OFF = {
    "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug", "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip
"""MLflow, which has no such variable, is given a folder of the rehearsal."""


WAITING = ("TORCH_DIST_INIT_BARRIER", "TORCH_DISTRIBUTED_DEBUG", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")
"""Variables by which torch would wait for ranks, or for a launcher, that are not there."""


@dataclass(frozen=True)
class AssumedNumber:
    """A number for a program's line: each integer that it reads, and how many values it finds true or distinct."""

    path: str  # of the file, or its last parts
    line: int  # from 1
    number: int

    def is_at(self, source_line: str) -> bool:
        """Whether it is for a line, `PATH:LINE: TEXT`."""
        path, line, *_ = [*source_line.split(":", 2), "", ""]
        return line == str(self.line) and f"/{path}".endswith(f"/{self.path}")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}={self.number}"


def parse_assumed(texts: Iterable[str]) -> tuple[AssumedNumber, ...]:
    numbers: dict[tuple[str, int], AssumedNumber] = {}
    for text in texts:
        match = re.fullmatch(r"(?:\./)?([^:=]+):([1-9][0-9]{0,8})\s*=\s*([0-9]{1,18})", text.strip())
        if match is None:
            raise LaunchError(f"--assume {text!r} is no line with a number", "--assume 'train.py:88=512'")
        assumed = AssumedNumber(match[1], int(match[2]), int(match[3]))
        if numbers.setdefault((assumed.path, assumed.line), assumed) != assumed:
            raise LaunchError(f"--assume gives {assumed.path}:{assumed.line} two numbers", "give the larger one")
    return tuple(numbers.values())


def unused(numbers: Sequence[AssumedNumber], verdict: Verdict) -> list[str]:
    """A note on each number that no line asked for, of a program that came to its end."""
    if verdict.kind in (FAILED, NOT_KNOWN) or verdict.at_least:
        return []
    source_lines = [assumption.source_line for assumption in verdict.assumptions if assumption.kind == GIVEN]
    return [
        f"--assume {number}: that line read nothing that nobody computed"
        for number in numbers
        if not any(map(number.is_at, source_lines))
    ]


@dataclass(frozen=True)
class Limits:
    """When a rehearsal ends, and what it may touch."""

    steps: int = 3  # optimizer steps of each rank
    until: str = ""  # "save" or "evaluation": it ends once a step follows the first of them, whatever `steps`
    time_limit_s: float = 600.0  # seconds from the program's start
    allow_writes: bool = False  # the program's writes are real
    network: bool = False  # the program may use the network
    keep: Path | None = None  # a new folder for the records and for what the program wrote; None: they are deleted
    assumed: tuple[AssumedNumber, ...] = ()  # the user's numbers for lines that read what nobody computed


@dataclass(frozen=True)
class Machine:
    card: Gpu
    gpus: int  # of the machine
    package: Path  # the folder of the built emulation
    # the live ones, which the rehearsal starts; None: the command starts its ranks, all of them
    ranks: RehearsedWorld | None = None


def rehearse(
    command: Sequence[str], card: Gpu, gpus: int, limits: Limits, ranks: RehearsedWorld | None = None
) -> Verdict:
    """The verdict on a command; where it does not fit, it is run again on cards without a limit to find its need.

    With `ranks` the command is started once for each live rank. A pretended rank that is asked for what nobody can
    invent becomes live, and the rehearsal begins again.
    """
    machine = Machine(card, gpus, built(torch_of(command, os.environ)), ranks)
    verdict = _run(command, machine, limits)
    while ranks is not None and verdict.pretended is not None and ranks.may_grow(verdict.pretended):
        ranks = ranks.with_live(verdict.pretended)
        print(f"{verdict.reason}\nrehearsing again with ranks {ranks.numbers} live", file=sys.stderr)
        machine, limits = replace(machine, ranks=ranks), replace(limits, keep=_next_folder(limits.keep))
        verdict = _run(command, machine, limits)
    if verdict.kind == DOES_NOT_FIT and verdict.at_least:
        print("it ran out of memory: rehearsing on cards without a limit, to find its need", file=sys.stderr)
        unlimited = replace(machine, card=replace(card, memory=UNLIMITED))
        need = _run(command, unlimited, replace(limits, keep=None))
        if need.needed is not None and not need.at_least and need.kind != FAILED:
            reason = f"needs {gib(need.needed)} of {card.name} ({gib(card.memory)}); {verdict.reason}"
            return replace(
                verdict, reason=reason, ranks=need.ranks, needed=need.needed, at_least=False, notes=need.notes,
                assumptions=need.assumptions, cards=need.cards,
            )  # fmt: skip
    return verdict


def _next_folder(keep: Path | None) -> Path | None:
    """Where a rehearsal that begins again keeps what it wrote: `DIR-2`, `DIR-3` and so on."""
    if keep is None:
        return None
    name, _, number = keep.name.rpartition("-")
    return keep.with_name(f"{name}-{int(number) + 1}" if name and number.isdecimal() else f"{keep.name}-2")


def _run(command: Sequence[str], machine: Machine, limits: Limits) -> Verdict:
    with scratch_folder(limits.keep) as folder:
        records = folder / "records"
        records.mkdir()
        words = list(command)
        if machine.ranks is not None:
            (folder / "ranks.json").write_text(json.dumps(machine.ranks.variables()))
            words = [sys.executable, "-I", "-S", str(START_LIVE), str(folder / "ranks.json"), *command]
        process = start_in_sandbox(words, folder, _environ(machine, limits, folder), limits)
        n_live = None if machine.ranks is None else len(machine.ranks.live)
        try:
            finish = _watch(process, records, limits, n_live)
        finally:
            processes.stop(process, signal.SIGKILL, 0.5)  # nothing that it could still write is kept
        refuse_without_sandbox(process, folder, limits)
        verdict = judge(
            read_records(records), machine.card, limits.steps, finish, machine.ranks, read_cards(records), limits.until
        )
        if verdict is None:
            raise without_cuda(command)
        if limits.keep is not None:
            write_report_files(folder, command, read_records(records), verdict)
        return replace(verdict, notes=(*verdict.notes, *unused(limits.assumed, verdict), *summary(folder)))


def start_in_sandbox(
    command: Sequence[str], folder: Path, environ: dict[str, str], limits: Limits, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command whose writes and network are its own, as far as the limits want it.

    `output`: takes what it prints; default: our stderr.
    """
    settings = {
        "overlay": not limits.allow_writes, "network": limits.network, "folder": str(folder),
        "records": str(folder / "records"), "refusal": str(folder / "refusal"),
    }  # fmt: skip
    (folder / "sandbox.json").write_text(json.dumps(settings))
    processes.adopt_orphans()
    words = [sys.executable, "-I", "-S", str(SANDBOX), str(folder / "sandbox.json"), *command]
    return processes.start(words, environ, sys.stderr.buffer if output is None else output)


def _environ(machine: Machine, limits: Limits, folder: Path) -> dict[str, str]:
    """The command's environment: this one's, with the emulated cards in it and trackers off."""
    environ = emulated_environ(machine, limits, folder)
    if machine.ranks is not None:
        for name in WAITING:
            environ.pop(name, None)
        environ.setdefault("OMP_NUM_THREADS", "1")
        environ["SHARDKIT_REHEARSAL_LIVE"] = machine.ranks.numbers
        environ["TORCH_NCCL_RANKS_PER_ROOT"] = "1000000"  # above 128 ranks torch waits for the id of a second root
        environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # a pretended rank's part names a live one's card
    environ["SHARDKIT_REHEARSAL_LINES"] = "1"
    environ["SHARDKIT_REHEARSAL_UNTIL"] = limits.until
    if limits.assumed:
        environ["SHARDKIT_REHEARSAL_ASSUME"] = json.dumps(list(map(astuple, limits.assumed)))
    return {
        **environ, "EMUCUDA_COMPUTE": "0", "SHARDKIT_REHEARSAL": str(folder / "records"),
        "SHARDKIT_REHEARSAL_STEPS": str(limits.steps),
    }  # fmt: skip


def emulated_environ(machine: Machine, limits: Limits, folder: Path) -> dict[str, str]:
    """This process's environment with a machine's emulated cards in it, whose kernels compute, and with trackers off.

    `folder`: of the rehearsal, where MLflow writes.
    """
    environ, card = dict(os.environ), machine.card
    for name in (*OF_A_REHEARSAL, "CUDA_VISIBLE_DEVICES"):  # the last chooses among cards that are not emulated
        environ.pop(name, None)
    paths = [str(machine.package), environ.get("PYTHONPATH", "")]
    return {
        **environ, **TRACKERS_OFF,
        **({} if limits.network else {"HF_HUB_OFFLINE": "1"}),
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "EMUCUDA": "1", "EMUCUDA_COMPUTE": "1", "EMUCUDA_DEVICES": str(machine.gpus),
        "EMUCUDA_NAME": card.device_name, "EMUCUDA_ACCOUNT": str(folder / "records" / CARDS),
        "EMUCUDA_MEMORY": str(card.memory), "EMUCUDA_CONTEXT": str(card.context),
        "EMUCUDA_WORKSPACE": str(card.blas_workspace), "EMUCUDA_SM": ".".join(map(str, card.capability)),
        "EMUCUDA_MULTIPROCESSORS": str(card.multiprocessors),
        "EMUCUDA_THREADS": str(card.threads_per_multiprocessor),
    }  # fmt: skip


def _watch(process: subprocess.Popen[bytes], records: Path, limits: Limits, n_live: int | None = None) -> Finish:
    """Wait until the program ends, has done its steps, fails, or may not go on; show how far it is.

    `n_live`: ranks that are processes; None: those of the world.
    """
    started, shown, changed_at = time.monotonic(), "", time.monotonic()
    failed_at: float | None = None
    while True:
        now = time.monotonic()
        current = read_records(records)
        ranks = [record for record in current if record["devices"]]
        line = _progress(ranks, None if limits.until else limits.steps)
        if line != shown:
            print(line, file=sys.stderr, flush=True)
            shown, changed_at = line, now
        if process.poll() is not None:
            return Finish("program", process.returncode)
        stopped = [record for record in ranks if record["end"].get("kind") == "steps"]
        if stopped and len({record["rank"] for record in stopped}) == (n_live or stopped[0]["world_size"]):
            return Finish("steps")
        is_saving = any(record["phase"] == "save" for record in ranks)
        # Some ranks may be done before others: not all take part in a save, or look for an optimizer's first step.
        have_enough = bool(limits.until) or all(record["steps"] >= limits.steps for record in ranks)
        if stopped and have_enough and not is_saving and now - changed_at > LATE_S:
            return Finish("steps")
        if any(record["end"].get("kind") == "exception" for record in ranks):
            failed_at = failed_at or now
        if failed_at and now - failed_at > LAST_WORDS_S:
            return Finish("a rank failed")
        if stopped and now - changed_at > STALLED_S:
            return Finish(f"the other ranks did nothing for {STALLED_S:.0f} s after rank {stopped[0]['rank']} was done")
        if now - started > limits.time_limit_s:
            return Finish(f"the time limit of {limits.time_limit_s:g} s came")
        if host_memory_is_short():
            return Finish("this machine's memory was nearly exhausted")
        time.sleep(0.1)


def _progress(ranks: Sequence[dict[str, Any]], steps: int | None) -> str:
    if not ranks:
        return "rehearsing: the program starts"
    slowest = min(ranks, key=lambda record: int(record["steps"]))
    steps_done = f"{slowest['steps']} steps" if steps is None else f"{slowest['steps']} of {steps} steps"
    return f"rehearsing: {len(ranks)} ranks, {steps_done}, {slowest['phase']}"


def host_memory_is_short() -> bool:
    """Whether less than 3 % of this machine's memory is left: the kernel would soon end a process of its choice."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines}
    return kib["MemAvailable:"] < 0.03 * kib["MemTotal:"]


def refuse_without_sandbox(
    process: subprocess.Popen[bytes], folder: Path, limits: Limits, command: str = "rehearse"
) -> None:
    """Refuse to run a program whose writes, or whose network, could not be kept from the machine."""
    if process.returncode != REFUSED or not (folder / "refusal").exists():
        return
    reason = (folder / "refusal").read_text()
    options = [] if limits.allow_writes else ["--allow-writes"]
    options += [] if limits.network else ["--network"]
    local = "set TMPDIR to a folder on a local disk or in memory (/dev/shm)"
    raise LaunchError(
        f"the program cannot be kept from the machine's files and network: {reason}",
        f"{local}, or accept them: shardkit {command} {' '.join(options)}",
    )


def without_cuda(command: Sequence[str]) -> LaunchError:
    """The error of a command that used no GPU."""
    fix = "check that it runs on a GPU by these words, and that no Python in it is started with -I, -E or -S"
    return LaunchError(f"{command[0]} ended without using CUDA", fix)


@contextmanager
def scratch_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for one run. SIGTERM ends it as Ctrl-C does, so that nothing stays behind."""

    def interrupt(*_: int | FrameType | None) -> None:
        raise KeyboardInterrupt

    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except OSError as error:
            raise LaunchError(f"--keep {keep}: {error.strerror}", "name a folder that is not there yet") from error
    folder = (keep or Path(tempfile.mkdtemp(prefix="rehearsal-"))).resolve()
    try:
        with processes.handling([signal.SIGTERM], interrupt):
            yield folder
    finally:
        for name in ("root", "work") if keep else ("",):
            delete(folder / name)


def delete(folder: Path) -> None:
    """Delete a folder, if it is there, with those in it that an overlay has made unreadable."""
    if not folder.exists():
        return
    for path, _, _ in os.walk(folder, topdown=True, onerror=lambda error: os.chmod(str(error.filename), 0o700)):
        os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


_PHASES = {"building": "init", "forward": "forward", "backward": "backward", "update": "update"}
"""A rehearsal's phases, and those of a run."""
_STATE = {"parameters": "params", "gradients": "grads", "optimizer states": "optimizer"}


def write_report_files(
    folder: Path, command: Sequence[str], records: Sequence[dict[str, Any]], verdict: Verdict
) -> None:
    """Write what `shardkit report` reads into a folder of `--keep`, in the forms of a run's files (docs/memory.md)."""
    ranks = {int(record["rank"]): record for record in records if record["devices"]}
    if (folder / "records" / "trace").is_dir():
        (folder / "records" / "trace").rename(folder / "trace")
    comment = f"# shardkit rehearse -- {shlex.join(command)}".replace("\n", " ")
    (folder / "config.yaml").write_text(f"{comment}\n")
    reason = verdict.reason if verdict.kind == FITS else f"{verdict.kind}: {verdict.reason}"
    about = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": list(command),
        "rehearsed": {"fits": verdict.kind == FITS, "reason": reason},
    }  # fmt: skip
    (folder / "env.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").touch()  # losses mean nothing
    with open(folder / "memory.jsonl", "w") as file:
        for step in sorted({sample["step"] for record in ranks.values() for sample in record["over_time"]}):
            rows = [
                (record, sample)
                for _, record in sorted(ranks.items())
                for sample in record["over_time"]
                if sample["step"] == step
            ]
            gather = {
                "schema": 2, "step": step, "time": round(max(sample["time"] for _, sample in rows), 3),
                "ranks": [_row(record, sample, verdict.card) for record, sample in rows],
            }  # fmt: skip
            file.write(json.dumps(gather) + "\n")


def _row(record: dict[str, Any], sample: dict[str, Any], card: Gpu) -> dict[str, Any]:
    """A rank's row at the end of a step; phases are known of the rank that tells its allocator's history."""
    resident = {"rss": sample["rss"], "peak_rss": sample["peak_rss"]}
    sizes = ("allocated", "peak_allocated", "reserved", "peak_reserved")
    phases: dict[str, dict[str, Any]] = {}
    for phase in record["phases"]:
        name = _PHASES.get(phase["phase"])
        if name is None or phase["step"] not in (sample["step"], 0):
            continue
        before = phases.get(name, {})
        peaks = {key: max(phase[key], before.get(key, 0)) for key in sizes if key.startswith("peak")}
        phases[name] = {**{key: phase[key] for key in sizes}, **peaks, **resident}
    device = next(iter(record["devices"]), "0")
    return {
        "rank": int(record["rank"]), "host": "rehearsal", "local_rank": int(device), "device": card.device_name,
        "step_time_s": None, "data_wait_s": None, "busy_s": None,
        "host_mem": {
            **resident, "uss": None, "children_rss": None,
            "limit": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "device_mem": {**{key: sample[key] for key in sizes}, "total": card.memory},
        "state": {
            kind: {"device": record["at_update"][name], "host": 0}
            for name, kind in _STATE.items() if name in record["at_update"]
        } or None,
        "phases": phases, "alloc_retries": None, "overhead_s": 0.0,
        "ooms": sum(int(peaks["ooms"]) for peaks in record["devices"].values()),
    }  # fmt: skip


SHOWN_PATHS = 5
"""Of each kind that a line names; further ones are counted."""
PASSING = ("/tmp/", "/run/", "/var/tmp/")
"""Folders of temporary files: new ones there are not told, unless they are in the program's own."""


def summary(folder: Path) -> list[str]:
    """Lines on what the program wrote and is thrown away; none where the writes were real."""
    layout = folder / "overlays.json"
    if not layout.exists():
        return []
    writes = list(_writes(folder, json.loads(layout.read_text())["overlays"]))
    lines = []
    for kind, words in (("replaced", "would have been overwritten"), ("deleted", "would have been deleted")):
        if paths := [path for path, write_kind, _ in writes if write_kind == kind]:
            lines.append(f"{words}: {_listed(paths)}")
    if new := sorted((-n_bytes, path) for path, kind, n_bytes in writes if kind == "new"):
        size = gib(-sum(n_bytes for n_bytes, _ in new))
        lines.append(f"{len(new)} new files, {size}, went to an overlay: {_listed([path for _, path in new])}")
    return lines


def _listed(paths: list[str]) -> str:
    further = f" and {len(paths) - SHOWN_PATHS} more" if len(paths) > SHOWN_PATHS else ""
    return printable(", ".join(paths[:SHOWN_PATHS])) + further


def _writes(folder: Path, overlays: list[str]) -> Iterator[tuple[str, str, int]]:
    """Path, kind (`new`, `replaced` or `deleted`) and bytes of what lies in the upper parts of the overlays."""
    program_folder = os.path.join(os.getcwd(), "")
    for number, lower in enumerate(overlays):
        upper = folder / "upper" / str(number)
        for parent, _, names in os.walk(upper):
            for name in names:
                path = Path(parent, name)
                status = path.lstat()
                original = os.path.join(lower, path.relative_to(upper))
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                    yield original, "deleted", 0
                elif stat.S_ISREG(status.st_mode) and not name.endswith(".pyc"):
                    kind = "replaced" if os.path.lexists(original) else "new"
                    is_passing = original.startswith(PASSING) and not original.startswith(program_folder)
                    if kind == "replaced" or not is_passing:
                        yield original, kind, status.st_blocks * 512


# Kernels that compute: tests that need GPUs, on a machine without one.

LATE_US = 5000
"""How long each asynchronous copy waits before it begins, where waits are to be missed."""
PASSED = "passed"


@dataclass(frozen=True)
class ComputedRun:
    kind: str  # `PASSED`, `FAILED`, or `NOT_KNOWN` if it was ended
    reason: str
    code: int  # the command's own exit code; negative: the signal that ended it
    n_processes: int  # processes that used a GPU
    notes: tuple[str, ...]  # what its writes would have changed

    @property
    def exit_code(self) -> int:
        return 0 if self.kind == PASSED else EXIT_CODES[self.kind]

    def text(self) -> str:
        return "\n".join([*(f"note      {note}" for note in self.notes), f"verdict   {self.reason}"])

    def as_json(self) -> dict[str, object]:
        return {
            "verdict": self.kind, "reason": self.reason, "exit_code": self.exit_code, "program_exit_code": self.code,
            "processes_with_gpus": self.n_processes, "notes": list(self.notes),
        }  # fmt: skip


def run_computed(
    command: Sequence[str],
    card: Gpu,
    gpus: int,
    limits: Limits,
    late_copies: bool,  # copies begin late, so that a program that does not wait for them reads old bytes
    poison: bool,  # memory new from the driver is NaN
) -> ComputedRun:
    """Run a command to its end on emulated cards that compute."""
    machine = Machine(card, gpus, built(torch_of(command, os.environ), computing=True))
    with scratch_folder(limits.keep) as folder:
        records = folder / "records"
        records.mkdir()
        environ = {**emulated_environ(machine, limits, folder), "SHARDKIT_COMPUTED": str(records)}
        environ |= {"EMUCUDA_COPY_DELAY_US": str(LATE_US)} if late_copies else {}
        environ |= {"EMUCUDA_POISON": "1"} if poison else {}
        process = start_in_sandbox(command, folder, environ, limits)
        try:
            reason = _wait(process, limits.time_limit_s)
        finally:
            processes.stop(process, signal.SIGKILL, 0.5)
        refuse_without_sandbox(process, folder, limits)
        n_processes = len([path for path in records.iterdir() if not path.name.startswith(CARDS)])
        notes = tuple(summary(folder))
    code = process.returncode
    if reason is not None:
        return ComputedRun(NOT_KNOWN, f"not known: {reason}", code, n_processes, notes)
    if code:
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return ComputedRun(FAILED, f"the program ended with {how}", code, n_processes, notes)
    if not n_processes:
        raise without_cuda(command)
    return ComputedRun(PASSED, f"passed on {gpus} emulated {card.name}", code, n_processes, notes)


def _wait(process: subprocess.Popen[bytes], time_limit_s: float) -> str | None:
    """Wait for the end of a process; the reason if it has to be ended."""
    deadline = time.monotonic() + time_limit_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            return f"the time limit of {time_limit_s:g} s came"
        if host_memory_is_short():
            return "this machine's memory was nearly exhausted"
        time.sleep(0.1)
    return None
