"""The operating system's part: whole files on full or failing disks, locks, child processes, control groups."""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import json
import logging
import math
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, Any, BinaryIO

from ..errors import ConfigError

STORAGE_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}
"""The error numbers of a full or failing disk."""
TAIL = 1 << 16
"""Bytes at the end of a file of JSON lines that hold its last ones."""
_LOG = logging.getLogger(__name__)
_warned: set[str] = set()


class _Lossy(io.FileIO):
    """A file that accepts every write and drops the bytes that do not fit on the disk. A pipe without a reader raises
    at the first write only: the flush at the interpreter's end would print a traceback."""

    _has_reader = True

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            if self._has_reader:
                self._has_reader = False
                raise
        except OSError as error:
            if error.errno not in STORAGE_TROUBLE:
                raise
        return memoryview(data).nbytes


def outlive_full_disks() -> None:
    """Let `print` and logging survive a full disk and a closed terminal; call it once when a process starts.

    Launchers redirect stdout and stderr to files in the run directory. Without this, a line that does not fit raises in
    the training loop, and again when the interpreter ends. Streams that are not files are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            buffered = io.BufferedWriter(_Lossy(stream.fileno(), "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=True))


def write_whole(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Create or replace a file: a reader, now or after a crash, finds either the old or the new one, complete.

    Its mode is that of a new file. With several writers at once, the last one wins. A killed writer leaves its draft,
    `NAME.part…`, behind. `durable`: sync the content to disk before the rename; for the rename itself, sync the folder.
    """
    data = content.encode() if isinstance(content, str) else content
    # A shared folder has writers on several nodes: a process id would not tell them apart.
    draft = path.with_name(f"{path.name}.part{os.urandom(6).hex()}")
    file = draft.open("xb")
    try:
        with file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the caller must see the first error
            draft.unlink()
        raise


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/shardkit (default ~/.cache/shardkit), shared by this user's jobs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardkit"


@contextmanager
def locked(path: Path, optional: bool = False) -> Iterator[IO[str] | None]:
    """Hold an exclusive lock on a file, which is created and kept; it is released when the process ends.

    `optional`: on a file system without locks, continue and yield None instead of the file, which is open for reading
    and appending.
    """
    with path.open("a+") as file:
        lock_file: IO[str] | None = file
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if not optional:
                raise
            _LOG.debug("no lock on %s (%s): going on without", path, error)
            lock_file = None
        yield lock_file


def mode_like(sources: Iterable[Path], group: int) -> int:
    """The mode of a folder whose files derive from `sources`: open only to those who may read all of these. A source
    that another group than the new folder's may read is closed to this one, unless everybody may read it."""
    mode, folders = 0o777, set[Path]()
    for path in sources:
        mode &= _shared(path.stat(), group, 0o4)
        folders |= set(path.resolve().parents)
    for folder in folders:
        mode &= _shared(folder.stat(), group, 0o1)
    return mode


def _shared(status: os.stat_result, group: int, permission: int) -> int:
    """The mode without the bits of the group and of others, where these lack `permission` (4: read, 1: enter)."""
    others_may = bool(status.st_mode & permission)
    members = bool(status.st_mode & permission << 3) and (others_may or status.st_gid == group)
    return 0o700 | 0o070 * members | 0o007 * others_may


def group_of_new_files(folder: Path) -> int:
    """The id of the group that a file made in `folder` will have."""
    status = folder.stat()
    return status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Open a file for reading without ever waiting, as a pipe would: OSError for all but regular files. `flags`:
    further ones of `os.open`, such as O_NOFOLLOW."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    """The content of a file that another program may have written; OSError if it is not regular, or above a GiB."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > 1 << 30:
            raise OSError(errno.EFBIG, f"larger than {1 << 30:,} bytes", str(path))
        return file.read()


def read_at(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out` with a file's bytes from `offset` on; returns their number, which is less if the file ends before."""
    n_read = 0
    while n_read < len(out) and (count := os.preadv(descriptor, [out[n_read:]], offset + n_read)):
        n_read += count
    return n_read


def append_jsonl(path: str | Path, *objects: Mapping[str, Any]) -> bool:
    """Append one line per object, each in one write; returns whether all were written.

    A full or failing disk (ENOSPC, EDQUOT, EFBIG, EIO, ESTALE) does not end a run that only wanted to log something:
    there is one warning per file, and a partly written line is removed. ValueError if a number is not finite.
    """
    lines = [json.dumps(obj, allow_nan=False).encode() + b"\n" for obj in objects]
    try:
        append_lines(path, lines)
    except OSError as error:
        if error.errno not in STORAGE_TROUBLE:
            fix = "choose a run.dir that exists and is writable"
            raise ConfigError(f"cannot write {path}: {error.strerror}", fix) from error
        if str(path) not in _warned:
            _warned.add(str(path))
            _LOG.warning("cannot write %s: %s; the run goes on without these lines", path, error.strerror)
        return False
    return True


def append_lines(path: str | Path, lines: Iterable[bytes]) -> None:
    """Append lines, each in one write: lines of several processes do not mix, and a partly written one is removed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for line in lines:
            size = os.fstat(descriptor).st_size
            written = os.write(descriptor, line)
            try:
                while written < len(line):  # the disk filled up midway: writing the rest raises the reason
                    written += os.write(descriptor, line[written:])
            except OSError:
                os.ftruncate(descriptor, size)
                raise
    finally:
        os.close(descriptor)


def extend_last_line(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Add fields to the last object of a file of JSON lines, in one write: a reader finds the old line or the new one.

    A file that is missing or ends in no such line is left alone; so is one on a full or failing disk, with a warning.
    """
    addition = b", " + json.dumps(fields, allow_nan=False).encode()[1:] + b"\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "make the run directory writable") from error
    try:
        size = os.fstat(descriptor).st_size
        if size < 3 or os.pread(descriptor, 2, size - 2) != b"}\n":
            return
        try:
            if os.pwrite(descriptor, addition, size - 2) == len(addition):
                return
        except OSError as error:
            if error.errno not in STORAGE_TROUBLE:
                raise
        os.pwrite(descriptor, b"}\n", size - 2)  # these two bytes have their place already
        os.ftruncate(descriptor, size)
        _LOG.warning("cannot write %s: the disk is full or fails; its last line lacks %s", path, ", ".join(fields))
    finally:
        os.close(descriptor)


def read_objects(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The objects on a file's lines; damaged lines are skipped, and a file that cannot be read has none. `last_bytes`:
    read only the complete lines among this many bytes at the end."""
    try:
        with open_regular(path) as file:
            start = 0 if last_bytes is None else max(0, file.seek(0, os.SEEK_END) - last_bytes)
            file.seek(start)
            lines = file.read().splitlines()
    except OSError:
        return []
    return [content for line in lines[1 if start else 0 :] if (content := parsed(line))]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file cannot be read or holds anything else."""
    try:
        return parsed(read_regular(path))
    except OSError:
        return {}


def parsed(line: str | bytes) -> dict[str, Any]:
    """The object on a line; empty for one that a kill cut short."""
    try:
        content = parse_json(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that another program may have written; impossible numbers, such as 1e999 and NaN, become None."""

    def finite(digits: str) -> float | None:
        number = float(digits)
        return number if math.isfinite(number) else None

    try:
        return json.loads(
            text, parse_int=lambda digits: int(digits) if len(digits) < 19 else None, parse_float=finite,
            parse_constant=lambda _: None,
        )  # fmt: skip
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


# Child processes that run nothing which lies in the current directory.

_ROOT = str(Path(__file__).resolve().parents[2])
_WITHOUT_CURRENT_DIRECTORY = "import sys; sys.path[:] = [path for path in sys.path if path]\n"
RUN_MODULE = Path(__file__).resolve().with_name("run_module.py")
"""A program that runs a module safely where a command line should be short, and the file is there at the start."""
_RUN_MODULE = f"""sys.path.append({_ROOT!r})
import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"""
"""Takes the module's name from the arguments, where `ps` shows it."""


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """The start of a command line that runs a module of shardkit as `python -m` would, arguments to follow.

    `python -m` searches the current directory first. In a folder that somebody else filled, that would run their
    `typing.py` instead of Python's. Python 3.10 has no option against it (`-P` came with 3.11), so the child removes
    the directory from its path before it imports anything. A task of the user's own is still found there:
    `shardkit.tasks.load` adds the directory when a config names one. A `python` without shardkit finds this copy.
    """
    return [*code_command(_RUN_MODULE, python), module]


def code_command(code: str, python: str = sys.executable) -> list[str]:
    """A command line that runs Python code which imports nothing from the current directory, unlike `python -c`."""
    return [python, "-c", _WITHOUT_CURRENT_DIRECTORY + code]


@contextmanager
def fork_without_garbage() -> Iterator[None]:
    """Processes forked in this block never collect what is garbage in this one.

    Destructors of process groups and stores join threads, which a fork does not have: a worker would wait for ever.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


_OFF = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "diff.external=")
"""Settings of a repository that name programs, and the values with which git starts none."""
_OPTIONS = {
    "diff": ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "--submodule=short"),
    "status": ("--ignore-submodules=dirty",),
}
"""Options that keep git from starting programs. Submodules have settings of their own: git may not enter them."""


def read_git(*arguments: str, cwd: Path | None = None) -> str | None:
    """The output of a git command that only reads, stripped; None without git or a repository that can be asked safely.

    A repository's own `.git/config` may name programs for git to run: a file-system monitor, diff drivers, filters, and
    whatever fetches the objects that a partial clone lacks. A downloaded repository is a stranger's, so none of its
    programs runs. Filters and diff drivers in the user's own settings do.
    """
    subcommand, *options = arguments
    query = ["config", "--includes", "--show-scope", "--name-only", "-z", "--get-regexp", r"^filter\."]
    words = (_git(query, cwd) or "").split("\0")
    filters = [name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in ("local", "worktree")]
    if any("=" in name for name in filters):  # `-c` would switch another one off
        return None
    off = [*_OFF, *(f"{name}={'false' if name.endswith('.required') else ''}" for name in filters)]
    words = [word for setting in off for word in ("-c", setting)]
    return _git([*words, subcommand, *_OPTIONS.get(subcommand, ()), *options], cwd)


def _git(words: list[str], cwd: Path | None) -> str | None:
    env = {**os.environ, "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}
    try:
        output = subprocess.check_output(["git", *words], cwd=cwd, env=env, stderr=DEVNULL, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return output.strip()


# The CPUs of this process, and its control groups in both versions of the kernel's interface.

_V1_UNLIMITED = 2**60
"""v1 writes "no limit" as the largest multiple of the page size that fits 63 bits."""


def n_cpus() -> int:
    """The number of logical CPUs in this process's affinity mask; all of the machine's where there are none."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's control group with a controller and of its ancestors, and whether each is of v2.

    Every mount is searched, from the group to the mount's root. In a container without its own namespace of groups the
    process's path does not exist under the mount, but the mount's root does. Folders may lack any file.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in _mounts(controllers, controller, root):
            yield from ((mount.joinpath(*parts[:depth]), not controllers) for depth in range(len(parts), -1, -1))


def _mounts(controllers: str, controller: str, root: Path) -> list[Path]:
    """Where the groups of a controller are mounted; of v2 without `controllers`."""
    mounts = []
    for line in text_of(root / "proc/self/mounts").splitlines():
        _, mount, kind, options = [*line.split(), "", "", "", ""][:4]
        if kind == ("cgroup" if controllers else "cgroup2") and (not controllers or controller in options.split(",")):
            mounts.append(root / mount.replace("\\040", " ").lstrip("/"))
    usual = root / "sys/fs/cgroup"
    return mounts or ([usual / controllers, usual / controller] if controllers else [usual])


def memory_limits(root: Path = Path("/")) -> list[tuple[int, Path]]:
    """(bytes, folder) of each limit on the memory of this process's control groups."""
    limits = []
    for folder, is_v2 in cgroup_folders("memory", root):
        text = text_of(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if text.isdigit() and int(text) < _V1_UNLIMITED:
            limits.append((int(text), folder))
    return limits


def text_of(path: Path) -> str:
    """A file's text, stripped; empty if this kernel or container lacks the file."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
