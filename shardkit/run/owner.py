"""One writer per run directory: RUN_DIR/.shardkit/owner.N.json names it, and the highest N is the owner's.

A start becomes the owner by creating the next number's file, which is atomic even on NFS (a hard link): one of several
candidates succeeds. The owner touches its file every 5 s and looks for a higher number; if it finds one, it has been
superseded. An owner counts as dead if it recorded its end, if its process is gone (seen from the same machine), or if
its file did not change in 30 s of looks at it: clocks of different machines are never compared. A later start
of the same job takes over at once, and waits until the earlier one has noticed; where nobody counts a job's starts, it
waits until the earlier one has ended.
"""

from __future__ import annotations

import errno
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
from ..files import open_regular, read_regular, write_whole
from ..launch.failures import job_starts
from ..launch.local import restart
from ..launch.local.run_dir import MARK

FOLDER = MARK

BEAT_S = 5.0
STALE_S = 30.0
"""An owner whose file has not changed for this long (six beats) counts as dead."""
_LOOK_S = 0.25
_NAME = re.compile(r"owner\.(\d+)\.json")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A start of a run.

    Attributes:
        token: random; differs between any two starts.
        host: the machine's name.
        space: the machine's boot and process namespace, in which `pid` is valid.
        born: start time of the process in kernel ticks: another process may get the same `pid` later.
        job: name of the job or torchrun agent, the same after a restart; None for a process by itself.
        restart: how often Slurm or another supervisor has started the job again.
        step: Slurm's number of the step within the job.
        attempt: how often torchrun has restarted the ranks.
        ended: whether the owner recorded its end.
    """

    token: str
    host: str
    pid: int
    space: str = ""
    born: int = 0
    job: str | None = None
    restart: int = 0
    step: str = ""
    attempt: int = 0
    ended: bool = False

    @property
    def name(self) -> str:
        """The start's name in messages: `Slurm job 12 (restart 1), process 4711 on n1`."""
        process = f"process {self.pid} on {self.host}"
        if self.job is None or self.job.startswith("torchrun"):
            return process
        return f"{self.job} (restart {self.restart}), {process}"

    def is_earlier_start(self, later: Record) -> bool:
        """Whether this is an earlier start of the same job, which `other` replaces."""
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
    """This run's right to write to its directory, from `claim` to `close`."""

    def __init__(self, path: Path, number: int, record: Record) -> None:
        self._path, self._number, self._record = path, number, record
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
        """Check ownership now, before something is published.

        Raises:
            SupersededError: another start owns the directory.
        """
        with self._busy:
            self._look()
        if self._lost is not None:
            raise superseded(self._lost)

    def close(self) -> None:
        """Record that this run has ended: the next one need not wait."""
        self._ended.set()
        self._thread.join()
        self._look()
        if self._lost is None:
            with suppress(OSError):  # a full disk: the next start sees that the process is gone, or waits
                _write(self._path, replace(self._record, ended=True))
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
                self._lost = self._why_lost()
                if self._lost is None:
                    now = time.time_ns()
                    os.utime(self._path, ns=(now, now))  # works on a full disk
            except OSError as error:  # a file system that fails for a moment proves nothing
                _LOG.debug("%s: %s", self._path, error)
        self._looked = time.monotonic()

    def _why_lost(self) -> str | None:
        newest = _newest(self._path.parent)
        if newest is not None and newest[0] > self._number:
            newest_record = _read(newest[1])
            return f"{'another start' if newest_record is None else newest_record.name} owns it now"
        record = _read(self._path)
        if record is not None and record.token == self._record.token:
            return None
        return f"{self._path} was deleted"


def superseded(reason: str) -> SupersededError:
    """The error of a run that no longer owns its directory."""
    return SupersededError(
        f"this run may not write to its directory any more: {reason}",
        "nothing to do if a later start of the same job continues there; this one saved nothing after it noticed",
    )


def claim(run_dir: Path, record: Record | None = None, stale_s: float = STALE_S) -> Owner:
    """Become the owner of a run directory.

    Raises:
        ConfigError: another live run owns it.
        SupersededError: a later start of this job owns it.
        OSError: the directory cannot be written.
    """
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    record = this_process() if record is None else record
    while True:
        newest = _newest(folder)
        number = 0 if newest is None else newest[0]
        before = None if newest is None else _read(newest[1])
        if before is not None and record.is_earlier_start(before):
            raise superseded(f"{before.name} owns it")
        inherits = before is not None and before.is_earlier_start(record)
        if newest is not None and not inherits and not _ends(newest[1], before, record, stale_s):
            raise _refusal(run_dir, before)
        path = folder / f"owner.{number + 1}.json"
        if not _create(path, record):
            continue  # another start was faster: check whether it is alive
        highest = _newest(folder)
        if highest is not None and highest[0] > number + 1:  # the listing was stale
            path.unlink(missing_ok=True)
            continue
        owner = Owner(path, number + 1, record)
        if newest is not None and before is not None and inherits:
            while not _is_over(newest[1], before, stale_s, process=False):
                _LOG.warning("waiting until an earlier start of this job has ended: %s", before.name)
        for earlier, file in _starts(folder):
            if earlier < number:
                file.unlink(missing_ok=True)
        return owner


def _ends(path: Path, owner: Record | None, record: Record, stale_s: float) -> bool:
    """Whether the owner is over; an earlier start of the same job gets the time to save that its supervisor gives it.

    A pod may be replaced while it saves. Its supervisor counts no starts, so the new one cannot take the directory
    from it.
    """
    is_same_job = owner is not None and owner.job is not None and owner.job == record.job and not record.step
    deadline = time.monotonic() + (restart.grace_s() + stale_s if is_same_job else 0)
    while not (over := _is_over(path, owner, stale_s)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return over


def _refusal(run_dir: Path, owner: Record | None) -> ConfigError:
    if owner is None:
        return ConfigError(f"run.dir={run_dir} {job_starts.IN_USE} another run", "wait for it, or set another run.dir")
    job = owner.job or ""
    end = f"scancel {job.split()[2]}" if job.startswith("Slurm job ") else f"kill {owner.pid}"
    return ConfigError(
        f"run.dir={run_dir} {job_starts.IN_USE} {owner.name}",
        f"wait until it has ended, end it ({end}), or set another run.dir",
    )


def _is_over(path: Path, owner: Record | None, stale_s: float, process: bool = True) -> bool:
    """Whether an owner has ended or is dead; False as soon as it shows a sign of life.

    Args:
        process: count an existing process as alive; False for a superseded one: it may be stuck, but writes nothing.
    """
    if owner is not None and owner.ended:
        return True
    is_local = owner is not None and owner.space != "" and owner.space == _space()
    if owner is not None and is_local and not _runs(owner):
        return True
    if is_local and process:
        return False
    beat = _beat(path)
    for _ in range(math.ceil(stale_s / _LOOK_S)):  # not by the clock: while this process is suspended, it may be, too
        time.sleep(_LOOK_S)
        now = _read(path)
        if (now is not None and now.ended) or (owner is not None and is_local and not _runs(owner)):
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
        pass  # another user's process
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


def _starts(folder: Path) -> list[tuple[int, Path]]:
    """The number of each start whose file is there, and the file."""
    return [(int(m[1]), folder / name) for name in os.listdir(folder) if (m := _NAME.fullmatch(name))]


def _newest(folder: Path) -> tuple[int, Path] | None:
    return max(_starts(folder), default=None)


def _beat(path: Path) -> tuple[int, int] | None:
    """A value that changes with each sign of life. Opens the file each time: only then does NFS ask its server."""
    try:
        with open_regular(path) as file:
            stat = os.fstat(file.fileno())
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino


def _read(path: Path) -> Record | None:
    """The record in an owner's file; None if the file is missing, damaged or still being written."""
    try:
        stored: dict[str, Any] = json.loads(read_regular(path))
        names = {field.name for field in fields(Record)}  # a later version may write more
        return Record(**{key: value for key, value in stored.items() if key in names})
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None


def _write(path: Path, record: Record) -> None:
    write_whole(path, json.dumps(asdict(record)) + "\n", durable=True)


def _create(path: Path, record: Record) -> bool:
    """Create an owner's file unless it exists: one of several candidates succeeds."""
    draft = path.with_name(f"claim.{record.token}")
    _write(draft, record)
    try:
        os.link(draft, path)
    except FileExistsError:
        return draft.stat().st_nlink > 1  # NFS may lose the first answer and refuse the repeated request
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(path, record)
    finally:
        draft.unlink(missing_ok=True)
    return True


def _create_without_links(path: Path, record: Record) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    _write(path, record)
    return True
