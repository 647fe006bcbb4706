"""Why ranks failed: each writes a small file, and the launcher finds the rank that failed first.

The file is torchelastic's (TORCHELASTIC_ERROR_FILE), with a `shardkit` entry beside torch's own; ranks that srun
starts get a directory instead (SHARDKIT_ERROR_DIR). Programs that leave no file are judged by their stderr.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from ...errors import ShardkitError, gib, listed, printable_lines
from ...files import open_regular, parse_json, read_object, read_regular, write_whole
from . import exit_codes

TORCHRUN_LOG = "torchrun.log"
"""torchrun's own output, in a launcher's log directory."""

# Messages of a rank that lost a peer: never the first cause while another rank reports something else.
_LOST_PEER = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|socket (closed|timeout)|Socket Timeout"
    r"|DistBackendError|DistNetworkError|DistStoreError|NCCL (communicator was aborted|remote|unhandled system error)"
    r"|timed? ?out waiting|Timed out after|not all ranks|not all \d+ ranks|cannot reach rank 0|Gloo .*failed"
    r"|it waits for its peers",
    re.IGNORECASE,
)
# The watchdog's message about stopped or lost peers: the cause, unless a rank was killed or raised an error before.
_MISSES_PEER = re.compile(r"rank\(s\) .* did not even answer")
_TORCHRUN_ENTRY = re.compile(
    r"^\s*time\s*: (\S+)\s*\n\s*host\s*:.*\n\s*rank\s*: (\d+) \(local_rank: (\d+)\)\s*\n"
    r"\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)",
    re.MULTILINE,
)
# torchrun ends the ranks that still run when it sees the first failure: these processes are no culprits.
_TOLD_TO_END = re.compile(r"Sending process (\d+) closing signal|Unable to shutdown process (\d+) via")
# Last lines of NCCL's watchdog and CUDA's libraries before they abort a process, which then writes no error file.
_LAST_WORDS = re.compile(
    r"Watchdog caught collective operation timeout.*|Operation timed out after \d+ ms"
    r"|(?:CUDA|NCCL) error: .*|CUDA failure.*"
)
_GPU_FAILED = re.compile(
    r"CUDA error: (unknown error|unspecified launch failure|no CUDA-capable device|uncorrectable|hardware)"
    r"|NCCL error: unhandled cuda error|GPU is lost|fallen off the bus",
    re.IGNORECASE,
)
_GPU_FULL = re.compile(r"(CUDA|HIP) (error: )?out of memory", re.IGNORECASE)
_GPU_FULL_CAUSE = (
    "  likely cause: the GPU's memory is full",
    "  fix: a smaller micro-batch with more accumulation, or activation checkpointing; `shardkit rehearse -- COMMAND` "
    "tells what fits",
)
_GPU_CAUSE = (
    "  likely cause: its GPU failed, or an earlier kernel did and left the device unusable",
    "  fix: look for Xid in dmesg and at nvidia-smi on that rank's machine; if both are clean, find the kernel with "
    "CUDA_LAUNCH_BLOCKING=1",
)


Groups = Sequence[tuple[str, Sequence[int], int]]
"""(name, ranks, number of collectives that this rank has begun) of each of a rank's process groups."""
UNSURE = 5
"""The first kind of `Failure.order` that does not name the culprit."""


@dataclass(frozen=True)
class Failure:
    """One rank's end."""

    rank: int
    exit_code: int  # Python's exit code; negative for a signal
    when: float = 0.0  # seconds since the epoch; 0 if unknown
    message: str = ""  # one line, or cause and fix for an error that the user can correct
    trace: str = ""  # the whole traceback; empty for user errors and signals
    fix: str = ""  # for user errors
    is_error: bool = False
    node: str = ""  # Slurm's name of the node; empty elsewhere
    local_rank: int | None = None  # the rank's number on its machine, if torchrun reported it
    forced: bool = False  # torchrun or srun told it to end, or killed it, after another rank's failure
    raised: bool = False  # its stderr ends with an exception's traceback
    groups: list[Any] = field(default_factory=list)  # the rank's `Groups`, as far as known

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key, likely origin first: ends that cannot be a consequence of another rank's end, then by time. From
        `UNSURE` on, the rank ended because of another one, of which nothing is known here."""
        signum = exit_codes.signal_of(self.exit_code)
        misses_peer = bool(_MISSES_PEER.search(self.message))
        if self.is_error and not self.lost_peer and not misses_peer:
            kind = -1  # before a rank that torchrun killed because it did not end
        elif self.forced:
            # It may have raised its exception just before: its peers then lose it while it ends.
            kind = 3 if self.raised and not self.lost_peer else UNSURE + 1
        elif self.exit_code == exit_codes.OK:
            kind = 4
        elif self.lost_peer:
            kind = UNSURE
        elif misses_peer or (signum is not None and signum.name != "SIGABRT"):
            kind = 0
        else:  # NCCL's watchdog aborts a rank that waited too long for another one
            kind = 1 if signum is None else 2
        return kind, self.when, self.rank

    @property
    def lost_peer(self) -> bool:
        """Whether the message looks like the consequence of another rank's end."""
        return bool(_LOST_PEER.search(self.message))


def record(error: BaseException, environ: Mapping[str, str] = os.environ, groups: Groups = ()) -> Path | None:
    """Write this rank's error to the launcher's file; returns its path, None if no launcher asked for it."""
    path = _error_file(environ)
    if path is None or getattr(error, "recorded_at", None) == path:  # keep the time of the first record
        return path
    message = error.cause if isinstance(error, ShardkitError) else _in_one_line(error)
    entry: dict[str, Any] = {
        "rank": _rank(environ),
        "exit_code": exit_code_after(error),
        "when": time.time(),
        "message": message,
        "trace": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "fix": error.fix if isinstance(error, ShardkitError) else "",
        "is_error": isinstance(error, ShardkitError),
        "node": environ.get("SLURMD_NODENAME", ""),
        "groups": groups,
    }
    if not _write(path, entry):
        return None
    with suppress(AttributeError):  # an exception with slots
        error.recorded_at = path  # type: ignore[attr-defined]
    return path


def exit_code_after(error: BaseException) -> int:
    """The exit code of a rank that an exception ends. A rank that calls sys.exit(0) in the middle has failed, too."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else exit_codes.FAILED
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    return error.exit_code if isinstance(error, ShardkitError) else exit_codes.FAILED


def _in_one_line(error: BaseException) -> str:
    """The exception's last line; a group's also has its members."""
    if isinstance(error, SystemExit):
        return f"it ended early, by sys.exit({'' if error.code is None else repr(error.code)})"
    members = getattr(error, "exceptions", None)  # of an ExceptionGroup, which Python has since 3.11
    line = f"{type(error).__name__}: {error}"
    if not isinstance(members, tuple):
        return line
    return _with_members(line, [_in_one_line(member) for member in members])


def _with_members(line: str, members: list[str]) -> str:
    """A group's line; a member that only lost its peer is left out beside one that did not."""
    causes = [member for member in members if not _LOST_PEER.search(member)] or members
    return f"{line}: {'; '.join(causes)}" if causes else line


def record_for(folder: Path, rank: int, message: str, trace: str = "") -> None:
    """Write the error of a rank that cannot do it itself, into its folder of an attempt's logs."""
    entry = {"rank": rank, "exit_code": exit_codes.FAILED, "when": time.time(), "message": message, "trace": trace}
    _write(folder / "error.json", entry)


_RESERVE_BYTES = 2**16


@contextmanager
def reserved(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Reserve disk space for this rank's error file while it runs: many of its errors are full disks."""
    path = _error_file(environ)
    reserve = None if path is None else _reserve(path)
    if reserve is not None:
        with suppress(OSError):  # the disk is already full
            reserve.parent.mkdir(parents=True, exist_ok=True)
            reserve.write_bytes(bytes(_RESERVE_BYTES))
    try:
        yield
    finally:
        if reserve is not None:
            reserve.unlink(missing_ok=True)


def _reserve(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


def record_stop(exit_code: int, signal_name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Record that this rank saved and stopped on request; False without shardkit's own launcher."""
    path = _error_file(environ)
    if path is None or "SHARDKIT_KEEP" not in environ:
        return False
    message = f"saved and stopped for {signal_name}"
    return _write(path, {"rank": _rank(environ), "exit_code": exit_code, "when": time.time(), "message": message})


def _write(path: Path, entry: Mapping[str, Any]) -> bool:
    message = entry["message"]
    # torchrun prints `py_callstack` for every rank: cause and fix of an error that the user can correct.
    shown = f"{message}\n  fix: {entry['fix']}" if entry.get("is_error") else entry.get("trace", "")
    extra = {"py_callstack": shown, "timestamp": str(int(entry["when"]))}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _reserve(path).unlink(missing_ok=True)
        write_whole(path, json.dumps({"message": {"message": message, "extraInfo": extra}, "shardkit": entry}))
    except OSError:  # a full disk must not hide the error itself, which goes to stderr next
        return False
    return True


def read(paths: Iterable[Path]) -> list[Failure]:
    """The failures in these files, likely origin first; other programs' files count by torch's entry."""
    failures = []
    for path in paths:
        data = read_object(path)  # empty while it is being written, or if it is not ours
        if recorded := _own_record(data.get("shardkit")):
            failures.append(recorded)
        elif isinstance(message := data.get("message"), dict):
            extra = message.get("extraInfo")
            extra = extra if isinstance(extra, dict) else {}
            seconds, local_rank = str(extra.get("timestamp", "")), path.parent.name
            rank = int(local_rank) if local_rank.isdecimal() else 0
            when = float(seconds) if seconds.isdecimal() and len(seconds) < 19 else 0.0
            text, trace = str(message.get("message", "")), str(extra.get("py_callstack", ""))
            failures.append(Failure(rank, exit_codes.FAILED, when, text, trace))
    return _in_order(failures)


def _in_order(failures: Iterable[Failure]) -> list[Failure]:
    """The failures, likely origin first."""
    ordered = sorted(failures, key=lambda failure: failure.order)
    if ordered and _MISSES_PEER.search(ordered[0].message):
        # A rank that ends because of its own exception does not answer the watchdog either.
        raised = [failure for failure in ordered if failure.order[0] == 1 and failure.when < ordered[0].when]
        ordered = raised + [failure for failure in ordered if failure not in raised]
    return ordered


def in_torchrun_log(text: str) -> list[Failure]:
    """Failed ranks from torchrun's report, the only trace of a rank that a signal ended."""
    told = {pid for pids in _TOLD_TO_END.findall(text) for pid in pids}
    return [
        Failure(
            rank=int(m[2]), exit_code=int(m[4]), when=_local(m[1]), message=exit_codes.describe(int(m[4])),
            local_rank=int(m[3]), forced=m[5] in told,
        )
        for m in _TORCHRUN_ENTRY.finditer(text)
    ]  # fmt: skip


_SRUN_ENTRY = re.compile(
    r"^srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(Out Of Memory)|(.+?)(?: \(core dumped\))?)$",
    re.MULTILINE,
)
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals}


def in_srun_log(text: str) -> list[Failure]:
    """Failed tasks in srun's log, in order. A task that a signal ended leaves no other trace. srun ends those that
    still run after the first failure, by SIGTERM and SIGKILL."""
    failures: list[Failure] = []
    for tasks, code, out_of_memory, ended in _SRUN_ENTRY.findall(text):
        number = signal.SIGKILL if out_of_memory else _SIGNALS.get(ended)
        if not code and number is None:
            continue
        exit_code = int(code) if code else 128 + int(number or 0)
        message, place = exit_codes.describe(exit_code), len(failures)
        forced = place > 0 and number in (signal.SIGTERM, signal.SIGKILL) and not out_of_memory
        failures += [Failure(task, exit_code, place, message, forced=forced) for task in tasks_in(tasks)]
    return failures


def tasks_in(text: str) -> list[int]:
    """Slurm's `0,2-3` → [0, 2, 3]."""
    bounds = (part.partition("-") for part in text.split(","))
    return [task for low, _, high in bounds for task in range(int(low), int(high or low) + 1)]


def oom_kills_in_srun_log(text: str) -> int:
    """Number of OOM kills in the step's cgroups, as far as slurmstepd and srun report them."""
    counted = sum(int(count) for count in re.findall(r"Detected (\d+) oom_kill event", text))
    return max(counted, text.count(": Out Of Memory"))


def of_launcher(log_dir: Path, recorded: list[Failure] | None = None) -> list[Failure]:
    """The failures of a launcher's last attempt, likely origin first: from its ranks' files and torchrun's log."""
    last_attempt = attempts(log_dir)[-1:]
    if recorded is None:
        recorded = [failure for folder in last_attempt for failure in in_attempt(folder)]
    try:
        reported = in_torchrun_log(read_regular(log_dir / TORCHRUN_LOG).decode(errors="replace"))
    except OSError:  # the run was deleted
        reported = []
    for folder in last_attempt:
        reported = with_last_words(reported, folder)
    failures = merged(recorded, reported)
    numbers = {failure.local_rank: failure.rank for failure in reported if failure.local_rank is not None}
    if numbers and failures[0].order[0] >= UNSURE:  # torchrun does not report a rank that exited with 0
        first = min(rank - local for local, rank in numbers.items())
        silent = [local for folder in last_attempt for local in silent_in(folder) if local not in numbers]
        failures = merged(failures, [ended_early(first + local, local) for local in silent])
    return failures


def ended_early(rank: int, local_rank: int | None = None) -> Failure:
    """The end of a rank that exited with 0 while its peers were waiting for it."""
    return Failure(rank, exit_codes.OK, message="it ended early, with exit code 0", local_rank=local_rank)


def has_record(attempt: Path, local_rank: int) -> bool:
    """Whether the rank wrote an error file in this attempt."""
    return (attempt / str(local_rank) / "error.json").exists()


def silent_in(attempt: Path) -> list[int]:
    """Local ranks of an attempt that wrote no error file."""
    names = [path.parent.name for path in attempt.glob("*/stderr.log")]
    return sorted(int(name) for name in names if name.isdecimal() and not has_record(attempt, int(name)))


def with_last_words(failures: Iterable[Failure], attempt: Path) -> list[Failure]:
    """The failures, with the last lines of libraries that aborted a rank added to its message."""
    return [
        failure
        if failure.local_rank is None
        else with_traceback(failure, attempt / str(failure.local_rank) / "stderr.log")
        for failure in failures
    ]


def with_traceback(failure: Failure, log: Path) -> Failure:
    """The failure with the traceback in the rank's stderr, else Python's stacks, else the last lines."""
    if failure.trace:
        return failure
    text = tail(log)
    signum = exit_codes.signal_of(failure.exit_code)
    exception, trace = last_traceback(text)
    if signum is None:
        message = exception or failure.message
        return replace(failure, message=message, trace=trace or last_lines(text), raised=bool(exception))
    if signum.name == "SIGINT" and exception:
        return replace(failure, message=f"{failure.message}: {exception}", trace=trace, raised=True)
    if failure.forced and exception and _is_last(trace, text):  # it was ending already when it was told to
        code = exit_codes.INTERRUPTED if exception.startswith("KeyboardInterrupt") else exit_codes.FAILED
        return replace(failure, message=exception, trace=trace, exit_code=code, raised=True)
    last_words = _LAST_WORDS.search(text) if signum.name == "SIGABRT" else None
    message = failure.message if last_words is None else f"{failure.message}: {last_words[0].strip()}"
    return replace(failure, message=message, trace=stacks(text))


def _is_last(trace: str, text: str) -> bool:
    """Whether only warnings of torch follow a traceback: one that the program caught and wrote does not count."""
    after = text.rpartition(trace.splitlines()[-1])[2]
    return all(not line.strip() or line.startswith("[W") for line in after.splitlines())


def _local(text: str) -> float:
    """torchrun's `2026-01-01_10:00:01` in seconds since the epoch; 0 for any other text."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%d_%H:%M:%S"))
    except ValueError:
        return 0.0


def ended_in_torchrun_log(text: str) -> list[tuple[int, str]]:
    """(local rank, `killed by SIGKILL (exit code -9)`) of the rank that torchrun blames in each attempt, in order.
    torchrun compares times in whole seconds, and a rank's record of a lost peer may be dated before the peer's end."""
    matches = re.finditer(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", text)
    return [(int(match[2]), exit_codes.describe(int(match[1]))) for match in matches]


def attempts(log_dir: Path) -> list[Path]:
    """The folders of a launcher's attempts, in order of time."""
    numbers = {path: path.name.removeprefix("attempt_") for path in log_dir.glob("*/attempt_*")}
    return sorted((path for path in numbers if numbers[path].isdecimal()), key=lambda path: int(numbers[path]))


def in_attempt(folder: Path) -> list[Failure]:
    """The failures that an attempt's ranks recorded, likely origin first."""
    return read(folder.glob("*/error.json"))


def merged(recorded: list[Failure], reported: list[Failure]) -> list[Failure]:
    """One failure per rank, likely origin first: a rank's own file says more than torchrun."""
    by_rank = {failure.rank: failure for failure in reversed(recorded)}
    all_ranks = {**{failure.rank: failure for failure in reported}, **by_rank}
    return _in_order(all_ranks.values())


def explain(
    failures: list[Failure], log_dir: str, oom_kills: int = 0, memory: Mapping[int, list[str]] | None = None
) -> str:
    """The text to show: the first failing rank in full, the others in one line.

    `failures`: likely origin first; at least one. `oom_kills`: the kernel's, while the job ran. `memory`: rank → lines
    from its memory post-mortem, which replace the general fix.
    """
    origin, consequences = failures[0], failures[1:]
    memory_lines = (memory or {}).get(origin.rank, [])
    if origin.is_error:
        lines = [f"error: {origin.message}"] + (memory_lines or ([f"  fix: {origin.fix}"] if origin.fix else []))
        if origin.exit_code == exit_codes.USER_ERROR:
            return printable_lines("\n".join(lines))
    else:
        cause, fix = exit_codes.likely_cause(origin.exit_code, oom_kills)
        lines = [f"error: rank {origin.rank} failed: {origin.message or exit_codes.describe(origin.exit_code)}"]
        lines = ([origin.trace.rstrip()] if origin.trace else []) + lines
        gpu_cause = _GPU_CAUSE if _GPU_FAILED.search(origin.message) else _GPU_FULL_CAUSE
        if gpu_cause is _GPU_CAUSE or _GPU_FULL.search(origin.message):
            lines += gpu_cause
            cause = fix = ""
        if origin.message.startswith("bdb.BdbQuit") or origin.message.startswith("BdbQuit"):
            cause = "breakpoint() found no terminal: the ranks of `shardkit launch` read from /dev/null"
            fix = "call torch.distributed.breakpoint(), and start the script by torchrun itself, or by python alone"
        lines += [f"  likely cause: {cause}"] if cause else []
        lines += memory_lines or ([f"  fix: {fix}"] if fix else [])
        if origin.order[0] >= UNSURE:
            end = "lost a peer" if origin.lost_peer else "was told to end"
            lines.append(f"  this rank {end}: the first error is on another node, or was not recorded")
    same = [failure for failure in consequences if failure.exit_code == origin.exit_code == exit_codes.OUT_OF_MEMORY]
    # Ends like the origin's, of which only torchrun's whole seconds, or nothing, tell the order.
    has_no_time = exit_codes.signal_of(origin.exit_code) is not None or origin.exit_code == exit_codes.OK
    alike = [failure for failure in consequences if failure.exit_code == origin.exit_code and has_no_time]
    together = [failure for failure in alike if failure.order[0] == origin.order[0] < UNSURE]
    if together:
        ranks = ", ".join(str(failure.rank) for failure in together)
        lines.append(f"  rank(s) {ranks} ended in the same way: which was the first is not known")
        consequences = [failure for failure in consequences if failure not in together]
    if same:
        lines.append(f"  out of memory as well: rank(s) {', '.join(str(failure.rank) for failure in same)}")
        consequences = [failure for failure in consequences if failure not in same]
    if consequences:
        ranks = ", ".join(str(failure.rank) for failure in sorted(consequences, key=lambda f: f.rank))
        why = " because of it" if origin.order[0] < UNSURE else ""
        lines.append(f"  {len(consequences)} other rank(s) ended{why}: {ranks}")
    if origin.order[0] < UNSURE:
        lines += [
            f"  in the group {name} (ranks {listed(sorted(begun))}) rank {listed(waiting)} waited for it"
            for name, begun in uneven_groups({failure.rank: failure.groups for failure in failures})
            if origin.rank in begun and (waiting := sorted(rank for rank, n in begun.items() if n > begun[origin.rank]))
        ]
    return printable_lines("\n".join([*lines, f"  logs: {log_dir}"]))


def uneven_groups(groups: Mapping[int, Groups]) -> list[tuple[str, dict[int, int]]]:
    """(name, collectives begun by each rank) of the groups in which these differ. `groups`: by rank."""
    begun_by_group: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, progress in groups.items():
        for name, ranks, begun in progress:
            begun_by_group.setdefault((name, tuple(ranks)), {})[rank] = begun
    return [(name, begun) for (name, _), begun in begun_by_group.items() if len(set(begun.values())) > 1]


def exit_code_of(failures: list[Failure]) -> int:
    """The job's exit code: the first failing rank's, or 1 after one that ended early with 0."""
    return exit_codes.shell_code(failures[0].exit_code) or exit_codes.FAILED


def _own_record(data: object) -> Failure | None:
    """A rank's record, without fields that a later version adds; None if it is invalid."""
    if not isinstance(data, dict):
        return None
    kinds = get_type_hints(Failure)
    fields = {name: data[name] for name in kinds if name in data}
    is_valid = all(
        isinstance(value, (int, float) if kinds[name] is float else get_origin(kinds[name]) or kinds[name])
        for name, value in fields.items()
    )
    return Failure(**fields) if is_valid and "rank" in fields and "exit_code" in fields else None


def _error_file(environ: Mapping[str, str]) -> Path | None:
    if environ.get("TORCHELASTIC_ERROR_FILE"):
        return Path(environ["TORCHELASTIC_ERROR_FILE"])
    if environ.get("SHARDKIT_ERROR_DIR"):
        return Path(environ["SHARDKIT_ERROR_DIR"]) / f"rank-{_rank(environ)}.json"
    return None


def _rank(environ: Mapping[str, str]) -> int:
    text = environ.get("RANK") or environ.get("SLURM_PROCID") or "0"
    return int(text) if text.isdecimal() else 0


_TAIL_BYTES = 1 << 18
_LINES = 20
_MOST_LINES = 200
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_BEGIN = "Traceback (most recent call last):"
_GROUP_BEGIN = "  + Exception Group Traceback (most recent call last):"
_GROUP_MEMBER = re.compile(r"^(?:  )+\| (?!Traceback \()(\w[\w.]*(?:: .*)?)$")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FATAL = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)
_WAITS = re.compile(r"torch/(distributed/|autograd/|nn/parallel/distributed\.py)")
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python3[\d.]*)/|^<")


def tail(path: Path) -> str:
    """The end of a rank's stderr, without torch's `[rank1]:` marks; empty if there is no file, or a link to another."""
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:  # the run may be a stranger's, and reports are shared
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return _PREFIX.sub("", file.read().decode(errors="replace"))
    except OSError:  # it is a link, is on another machine, or was deleted
        return ""


def last_traceback(text: str) -> tuple[str, str]:
    """(the exception's line, the last traceback with the ones that it was raised from); empty without a traceback."""
    lines = text.splitlines()
    begins = [index for index, line in enumerate(lines) if line in (_BEGIN, _GROUP_BEGIN)]
    if not begins:
        return "", ""
    chain = begins[-1:]
    for begin in reversed(begins[:-1]):
        if next((line for line in reversed(lines[: chain[0]]) if line.strip()), "") not in _CHAINED:
            break
        chain.insert(0, begin)
    first_line, last_begin = chain[0], chain[-1]
    after = range(last_begin + 1, len(lines))
    if lines[last_begin] == _GROUP_BEGIN:
        end = next((i for i in after if not lines[i].startswith("  ")), len(lines)) - 1
        members = [match[1] for line in lines[last_begin:end] if (match := _GROUP_MEMBER.match(line))]
        exception = _with_members(members[0], members[1:]) if members else ""
    else:
        end = next((i for i in after if lines[i] and not lines[i].startswith(" ")), -1)
        exception = lines[end]
    if end < 0 or not exception:  # cut short: the process died while it wrote
        return "", ""
    shown = lines[first_line : end + 1]
    if len(shown) > _MOST_LINES:
        shown = [*shown[: _MOST_LINES // 2], "  …", *shown[-_MOST_LINES // 2 :]]
    return exception, "\n".join(shown)


def stacks(text: str) -> str:
    """The stacks that Python wrote when a signal ended it (PYTHONFAULTHANDLER=1); empty if there is none."""
    headers = list(_FATAL.finditer(text))
    if not headers:
        return ""
    block = text[headers[-1].start() :].partition("\nExtension modules:")[0].rstrip()
    if not _FRAME.search(block):  # it died while Python was ending
        return ""
    return "\n".join(block.splitlines()[:_MOST_LINES])


def locate(stack: str) -> tuple[str, bool]:
    """Returns the line of the user's code that the current thread ran, and whether the thread waited for its peers."""
    current = stack.partition("Current thread")[2].partition("\n\n")[0] or stack
    frames = _FRAME.findall(current)
    user_frame = next((frame for frame in frames if not _LIBRARY.search(frame[0])), frames[0] if frames else None)
    location = "" if user_frame is None else f"{user_frame[0]}:{user_frame[1]} in {user_frame[2]}"
    return location, any(_WAITS.search(frame[0]) for frame in frames)


def last_lines(text: str) -> str:
    """The last lines of a rank that ended without a traceback."""
    return "\n".join(text.rstrip().splitlines()[-_LINES:])


OOM_FOLDER = "oom"
_BEST = 3
_SCHEMA = 1


def read_post_mortems(run_dir: Path, since: float) -> dict[int, dict[str, Any]]:
    """Rank → post-mortem, if written after `since` (seconds since the epoch): earlier attempts left older ones."""
    post_mortems: dict[int, dict[str, Any]] = {}
    for path in (run_dir / OOM_FOLDER).glob("rank*.json"):
        try:
            record = parse_json(read_regular(path))
            if record["schema"] == _SCHEMA and record["time"] >= since:
                post_mortems[int(record["rank"])] = {**record, "path": str(path)}
        except (OSError, ValueError, KeyError, TypeError):  # cut short by a full disk, or not ours
            continue
    return post_mortems


def memory_words(failures: Iterable[Failure], post_mortems: Mapping[int, Mapping[str, Any]]) -> dict[int, list[str]]:
    """Rank → lines about its memory, for ranks that ran out of it or were killed when the host almost had."""
    lines: dict[int, list[str]] = {}
    for failure in failures:
        record = post_mortems.get(failure.rank)
        if failure.exit_code == exit_codes.OUT_OF_MEMORY and record is not None and record["kind"] != "host-risk":
            lines[failure.rank] = [*_changes(record), f"  post-mortem: {record['path']}"]
        signum = exit_codes.signal_of(failure.exit_code)
        if signum is not None and signum.name == "SIGKILL":
            # Any rank of the host may have noticed; the rank's own record counts first.
            near = record or next((r for r in post_mortems.values() if r["kind"] == "host-risk"), None)
            if near is not None and near["kind"] == "host-risk":
                memory, row = near["memory"], near["row"]["host_mem"]
                workers = f", its loader processes {gib(row['children_rss'], 1)}" if row["children_rss"] else ""
                pressure = (
                    f"  the host's memory was almost used up at step {near['step']}: "
                    f"{gib(memory['limit'] - memory['free'], 1)} of {gib(memory['limit'], 1)} on {near['host']}; rank "
                    f"{near['rank']} held {gib(row['rss'], 1)}{workers}"
                )
                lines[failure.rank] = [pressure, *_changes(near), f"  post-mortem: {near['path']}"]
    return lines


def _changes(record: Mapping[str, Any]) -> list[str]:
    """The best changes, one line each; a change that would not have been enough says so."""
    best = record["advice"][:_BEST]
    if not best:
        return []
    missing = record["memory"]["missing"] or 0
    width = max(len(change["change"]) for change in best)
    return ["  what would help, and what it costs:"] + [_change(change, width, missing) for change in best]


def _change(change: Mapping[str, Any], width: int, missing: int) -> str:
    saving = change["saving_bytes"]
    amount = "saves memory" if saving is None else f"saves {gib(saving, 1)}"
    short = " (not enough alone)" if saving is not None and saving < missing else ""
    return f"    {change['change']:<{width}}  {amount}{short}: {change['cost']}"
