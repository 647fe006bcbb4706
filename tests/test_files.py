"""Files stay whole, whoever is killed or out of space while writing; locks exclude; output outlives a full disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.files import append_jsonl, append_lines, extend_last_line, locked, read_objects, write_whole
from tests.faults.test_memory import small_disk  # noqa: F401 - a fixture
from tests.launch.jobs import REPO

FULL = Path("/dev/full")
CODE = """
import logging, sys
from shardkit.files import outlive_full_disks
if sys.argv[1] == "outlive":
    outlive_full_disks()
for step in range(2000):
    print("a line for the log", flush=step % 2 == 0)
    print("another", file=sys.stderr)
logging.getLogger("x").warning("and a warning")
sys.exit(7)
"""


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("outlive", [True, False])
def test_a_process_outlives_a_full_disk_under_its_output(outlive: bool, unbuffered: bool) -> None:
    with FULL.open("wb") as full:
        argv = [sys.executable, *(["-u"] if unbuffered else []), "-c", CODE, "outlive" if outlive else "die"]
        done = subprocess.run(argv, stdout=full, stderr=full, cwd=REPO, timeout=60)
    assert (done.returncode == 7) == outlive


def test_output_that_fits_arrives_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        done = subprocess.run([sys.executable, "-c", CODE, "outlive"], stdout=file, stderr=file, cwd=REPO, timeout=60)
    assert done.returncode == 7
    assert path.read_text() == "a line for the log\nanother\n" * 2000 + "and a warning\n"


def started(code: str, *argv: object) -> subprocess.Popen[str]:
    """A process that runs `code` after the imports that it needs."""
    needed = "import os, signal, sys, time\nfrom pathlib import Path\nfrom shardkit.files import *\n"
    argv = ("-c", f"{needed}path = Path(sys.argv[1])\n{code}", *argv)
    return subprocess.Popen([sys.executable, *map(str, argv)], stdout=subprocess.PIPE, text=True, cwd=REPO)


def ended(*processes: subprocess.Popen[str]) -> list[int]:
    for process in processes:
        process.communicate(timeout=60)
    return [process.returncode for process in processes]


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


def is_whole(text: str, size: int) -> bool:
    return len(text) == size and len(set(text)) == 1


def test_a_reader_finds_a_whole_file_while_its_writer_works_and_after_it_is_killed(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 1 << 20
    write_whole(path, "-" * size)
    code = f"print(flush=True)\nwhile True:\n    for letter in 'abcdef':\n        write_whole(path, letter * {size})"
    for number in range(5):
        writer = started(code, path)
        writer.stdout.readline()
        seen = set[str]()
        until = time.monotonic() + 0.2 + 0.013 * number
        while time.monotonic() < until or len(seen) < 3:  # the writer may be late to begin
            text = path.read_text()
            assert is_whole(text, size), "while it is written"
            seen.add(text[0])
        kill(writer)
        assert is_whole(path.read_text(), size), "after its writer was killed"


def test_a_writer_killed_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    code = "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nwrite_whole(path, 'new')"
    assert ended(started(code, path)) == [-signal.SIGKILL]
    assert path.read_text() == "old"
    drafts = [other for other in tmp_path.iterdir() if other != path]
    assert [draft.read_text() for draft in drafts] == ["new"] and ".part" in drafts[0].name
    write_whole(path, b"newer", durable=True)
    assert path.read_bytes() == b"newer"


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[bool]()
    monkeypatch.setattr("os.fsync", lambda _: synced.append((tmp_path / "file").exists()))
    write_whole(tmp_path / "file", "x", durable=True)
    write_whole(tmp_path / "other", "x")
    assert synced == [False]


def test_a_full_disk_leaves_the_old_file_and_no_draft(small_disk: Path) -> None:  # noqa: F811
    path = small_disk / "file"
    write_whole(path, "old")
    with pytest.raises(OSError) as error:
        write_whole(path, b"x" * (5 << 20))
    assert error.value.errno == errno.ENOSPC
    assert path.read_text() == "old" and list(small_disk.iterdir()) == [path]


def test_a_name_that_cannot_be_taken_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "x")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "absent" / "file", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_of_two_that_write_at_once_one_whole_file_is_left(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 1 << 18
    code = f"for _ in range(150):\n    write_whole(path, sys.argv[2] * {size})"
    assert ended(started(code, path, "a"), started(code, path, "b")) == [0, 0]
    assert is_whole(path.read_text(), size) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_modes_are_those_of_a_new_file(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "file", "x")
        append_lines(tmp_path / "lines", [b"x\n"])
        with locked(tmp_path / "lock"):
            pass
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_a_lock_excludes_others_until_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = started("with locked(path):\n    print(flush=True)\n    time.sleep(60)", path)
    holder.stdout.readline()
    waiting = started("with locked(path):\n    pass", path)
    time.sleep(0.3)
    assert waiting.poll() is None, "it waits"
    kill(holder)
    assert ended(waiting) == [0]
    with locked(path) as file:
        assert file is not None


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locked(tmp_path / "lock", optional=True) as file:
        assert file is None
    with pytest.raises(OSError, match="No locks"), locked(tmp_path / "lock"):
        pass


def test_lines_of_several_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    code = "for n in range(300):\n    append_jsonl(path, {'who': sys.argv[2], 'n': n, 'text': sys.argv[2] * n})"
    assert ended(started(code, path, "a"), started(code, path, "b")) == [0, 0]
    found = read_objects(path)
    assert all(one["text"] == one["who"] * one["n"] for one in found)
    assert [one["n"] for one in found if one["who"] == "a"] == list(range(300)) and len(found) == 600


def test_a_line_that_does_not_fit_is_taken_back(small_disk: Path) -> None:  # noqa: F811
    path = small_disk / "lines"
    line = b'{"a": "' + b"x" * 99_991 + b'"}\n'
    with pytest.raises(OSError, match="No space left"):
        append_lines(path, [line] * 50)
    written = path.read_bytes()
    assert written and written == line * (len(written) // len(line))


def test_damaged_lines_are_passed_over_and_the_end_can_be_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert read_objects(path) == []
    path.write_bytes(b'{"n": 1}\n[2]\n{"n\xff": \n{"n": 3}\n{"n": 4}\n{"n": ')
    assert read_objects(path) == [{"n": 1}, {"n": 3}, {"n": 4}]
    assert read_objects(path, last_bytes=20) == [{"n": 4}]
    assert read_objects(path, last_bytes=1000) == read_objects(path)


def test_the_last_line_of_a_file_gets_more_fields(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_jsonl(path, {"step": 1}, {"step": 2})
    extend_last_line(path, {"late": 0.5})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2, "late": 0.5}]
    path.write_bytes(b'{"step": 1}\n{"st')
    extend_last_line(path, {"late": 0.5})
    assert path.read_bytes() == b'{"step": 1}\n{"st'


def test_a_full_disk_leaves_the_last_line_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    append_jsonl(path, {"step": 1})
    before, write = path.read_bytes(), os.pwrite

    def half(descriptor: int, data: bytes, at: int) -> int:
        return write(descriptor, data[: max(2, len(data) // 2)], at)

    monkeypatch.setattr(os, "pwrite", half)
    extend_last_line(path, {"late": 0.5})
    assert path.read_bytes() == before
