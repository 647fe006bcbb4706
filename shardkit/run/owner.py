"""One writer per run directory: the lock RUN_DIR/.shardkit/owner.json names its job, host, process and start.

Locks of the kernel are optional on NFS and do not say who holds them. This one is a file: `O_EXCL` lets one of several
starts create it, and its owner touches it every 5 s. An owner counts as dead if it recorded its end, if its process is
gone (seen from the same machine), or if its file did not change in 30 s of looks at it: clocks of machines are not
compared. A later start of the same job replaces the lock at once, and waits until the earlier start has noticed;
where nobody counts a job's starts, it waits until the earlier one has ended.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SupersededError
from ..files import open_regular, read_regular
from ..launch.failures import job_starts
from ..launch.local import restart
from ..launch.local.restart import MARK

FOLDER = MARK
LOCK = "owner.json"
_NUMBERED = re.compile(r"owner\.(\d+)\.json")
"""The locks of versions up to 0.2, whose highest number was the owner's."""

BEAT_S = 5.0
STALE_S = 30.0
"""An owner whose file has not changed for this long (six beats) counts as dead."""
_LOOK_S = 0.25
_SETTLE_S = 0.5
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A start of a run."""

    token: str  # random; differs between any two starts
    host: str  # the machine's name
    pid: int
    space: str = ""  # the machine's boot and process namespace, in which `pid` is valid
    born: int = 0  # start time of the process in kernel ticks: another process may get the same `pid` later
    job: str | None = None  # name of the job or torchrun agent, the same after a restart; None for a process by itself
    restart: int = 0  # how often Slurm or another supervisor has started the job again
    step: str = ""  # Slurm's number of the step within the job
    attempt: int = 0  # how often torchrun has restarted the ranks
    ended: bool = False  # whether the owner recorded its end

    @property
    def name(self) -> str:
        """The start's name in messages: `Slurm job 12 (restart 1), process 4711 on n1`."""
        process = f"process {self.pid} on {self.host}"
        if self.job is None or self.job.startswith("torchrun"):
            return process
        return f"{self.job} (restart {self.restart}), {process}"

    def is_gone(self) -> bool:
        """Whether the process is known to be gone, which only shows on its machine, in its process namespace."""
        return self.is_local and not _runs(self)

    @property
    def is_local(self) -> bool:
        return self.space != "" and self.space == _space()

    def is_earlier_start(self, later: Record) -> bool:
        """Whether this is an earlier start of the same job, which `later` replaces."""
        if self.job is None or self.job != later.job:
            return False
        if self.restart != later.restart:
            return self.restart < later.restart
        return self.step == later.step and self.attempt < later.attempt


def this_process(environ: Mapping[str, str] = os.environ) -> Record:
    """The record of this process, with the job that its environment names."""
    start, host, pid = restart.this_start(environ), platform.node(), os.getpid()
    process = (os.urandom(8).hex(), host, pid, _space(), _born(pid))
    return Record(*process, start.name, start.restart, start.step, start.attempt)


class Owner:
    """This run's right to write to its directory, from `claim` to `close`.

    It beats and records its end through the open file, never by the path: the lock there may be another start's by now.
    """

    def __init__(self, path: Path, file: int, record: Record) -> None:
        self._path, self._file, self._record = path, file, record
        self._lost: str | None = None
        self._looked = time.monotonic()
        self._busy, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="owner", daemon=True)
        self._thread.start()

    def lost(self) -> str | None:
        """The reason why this run may no longer write; None while it may. Costs one reading of the clock.

        This is the thread's last answer. An old answer means that the process was suspended: then look again.
        """
        if time.monotonic() - self._looked > 2 * BEAT_S and self._busy.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._busy.release()
        return self._lost

    def fence(self) -> None:
        """Check ownership now, before something is published."""
        with self._busy:
            self._look()
        if self._lost is not None:
            raise superseded(self._lost)

    def close(self) -> None:
        """Record that this run has ended: the next one need not wait."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError):  # a full disk: the next start sees that the process is gone, or waits
            _write(self._file, replace(self._record, ended=True))
        with suppress(OSError):
            os.close(self._file)
        self._lost = self._lost or "this run has ended"

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            with self._busy:
                self._look()

    def _look(self) -> None:
        """Check whether this run still owns the directory, and touch its file if so."""
        if self._lost is None:
            try:
                now = time.time_ns()
                os.utime(self._file, ns=(now, now))  # works on a full disk
                holder = _read(self._path)
                if holder is None:
                    self._lost = f"{self._path} was deleted"
                elif holder.token != self._record.token:
                    self._lost = f"{holder.name} owns it now"
            except OSError as error:  # a file system that fails for a moment proves nothing
                _LOG.debug("%s: %s", self._path, error)
        self._looked = time.monotonic()


def superseded(reason: str) -> SupersededError:
    """The error of a run that no longer owns its directory."""
    return SupersededError(
        f"this run may not write to its directory any more: {reason}",
        "nothing to do if a later start of the same job continues there; this one saved nothing after it noticed",
    )


def claim(run_dir: Path, record: Record | None = None, stale_s: float = STALE_S) -> Owner:
    """Become the owner of a run directory."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    record = this_process() if record is None else record
    lock, draft = folder / LOCK, folder / f"claim.{record.token}"
    numbered = [(int(match[1]), folder / name) for name in os.listdir(folder) if (match := _NUMBERED.fullmatch(name))]
    if numbered and not lock.exists():  # a run of 0.2 holds the directory, or held it
        _give_way(run_dir, max(numbered)[1], record, stale_s)
    earlier: Record | None = None
    while True:
        try:
            file = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            earlier = _give_way(run_dir, lock, record, stale_s)
        else:
            _write_first(file, record, lock)
            break
        # The lock is replaced, not deleted and made anew: two starts that find a dead owner at the same moment would
        # delete each other's. The last one to replace it wins, and the others see that once it has settled.
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _write_first(file, record, draft)
        if _read(lock) != earlier:  # another start was faster: check whether it is alive
            os.close(file)
            draft.unlink()
            continue
        draft.replace(lock)
        time.sleep(_SETTLE_S)
        holder = _read(lock)
        if holder is not None and holder.token == record.token:
            break
        os.close(file)
    for _, path in numbered:
        path.unlink(missing_ok=True)
    owner = Owner(lock, file, record)
    if earlier is not None and earlier.is_earlier_start(record) and not earlier.ended and not earlier.is_gone():
        _LOG.warning("waiting until an earlier start of this job has ended: %s", earlier.name)
        for _ in range(math.ceil(stale_s / _LOOK_S)):  # it looks every 5 s, and stops writing then
            time.sleep(_LOOK_S)
            if earlier.is_gone():
                break
    return owner


def _give_way(run_dir: Path, path: Path, record: Record, stale_s: float) -> Record | None:
    """Return the record of a lock that `record`'s start may replace."""
    holder = _read(path)
    if holder is not None and record.is_earlier_start(holder):
        raise superseded(f"{holder.name} owns it")
    if holder is not None and holder.is_earlier_start(record):
        return holder
    # A pod may be replaced while it saves. Its supervisor counts no starts, so the new one cannot take the directory
    # from it: an earlier start of the same job gets the time to save that its supervisor gives it.
    is_same_job = holder is not None and holder.job is not None and holder.job == record.job and not record.step
    deadline = time.monotonic() + (restart.grace_s() + stale_s if is_same_job else 0)
    while not _is_over(path, holder, stale_s):
        if time.monotonic() >= deadline:
            raise _refusal(run_dir, holder)
        time.sleep(_LOOK_S)
    return _read(path)


def _refusal(run_dir: Path, owner: Record | None) -> ConfigError:
    if owner is None:
        return ConfigError(f"run.dir={run_dir} {job_starts.IN_USE} another run", "wait for it, or set another run.dir")
    job = owner.job or ""
    end = f"scancel {job.split()[2]}" if job.startswith("Slurm job ") else f"kill {owner.pid}"
    return ConfigError(
        f"run.dir={run_dir} {job_starts.IN_USE} {owner.name}",
        f"wait until it has ended, end it ({end}), or set another run.dir",
    )


def _is_over(path: Path, owner: Record | None, stale_s: float) -> bool:
    """Whether an owner has ended or is dead; False as soon as it shows a sign of life."""
    if owner is not None and (owner.ended or owner.is_gone()):
        return True
    if owner is not None and owner.is_local:
        return False
    beat = _beat(path)
    for _ in range(math.ceil(stale_s / _LOOK_S)):  # not by the clock: while this process is suspended, it may be, too
        time.sleep(_LOOK_S)
        now = _read(path)
        if now is not None and now.ended:
            return True
        if _beat(path) != beat:
            return False
    return True


def _runs(owner: Record) -> bool:
    """Whether the owner's process exists; only valid on the same machine and process namespace."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # The kernel knows it, but another user owns it: it exists.
    born = _born(owner.pid)
    return born != -1 and (0 in (born, owner.born) or born == owner.born)


def _born(pid: int) -> int:
    """Start time of a process in ticks since boot; 0 if the kernel does not say, -1 if the process is dead."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return -1 if words[0] in "ZX" else int(words[19])


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _beat(path: Path) -> tuple[int, int] | None:
    """A value that changes with each sign of life. Opens the file each time: only then does NFS ask its server."""
    try:
        with open_regular(path) as file:
            stat = os.fstat(file.fileno())
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino


def _read(path: Path) -> Record | None:
    """The record in a lock; None if the file is missing, damaged or still being written."""
    try:
        stored: dict[str, Any] = json.loads(read_regular(path))
        names = {field.name for field in fields(Record)}  # a later version may write more
        return Record(**{key: value for key, value in stored.items() if key in names})
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None


def _write(file: int, record: Record) -> None:
    text = json.dumps(asdict(record)) + "\n"
    os.pwrite(file, text.encode(), 0)
    os.ftruncate(file, len(text.encode()))
    os.fsync(file)


def _write_first(file: int, record: Record, path: Path) -> None:
    try:
        _write(file, record)
    except OSError:  # a full disk: an empty lock would keep the next start waiting
        os.close(file)
        path.unlink(missing_ok=True)
        raise
