"""A child process parses for its parent, within limits of memory and time."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkit.cli.__main__ import main
from shardkit.errors import ConfigError, DataError
from shardkit.files import bounded
from shardkit.files.bounded import LIMITS, VARIABLE, in_child
from tests.report.samples import add, write_run


def parsed(function: Any) -> Any:
    return in_child("run directory", "file", [], function, DataError)


def cpu_s() -> float:
    """Seconds of CPU time of this process and of the children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def test_results_and_errors_are_those_of_the_function() -> None:
    assert parsed(lambda: {"pid": os.getpid()})["pid"] != os.getpid()
    assert parsed(lambda: bytes(1 << 22)) == bytes(1 << 22)

    def refuse() -> None:
        raise ConfigError("x=1", "set x=2")

    with pytest.raises(ConfigError, match=r"x=1\n  fix: set x=2"):
        parsed(refuse)
    with pytest.raises(DataError, match=r"file cannot be read: ZeroDivisionError: division by zero"):
        parsed(lambda: 1 / 0)
    with pytest.raises(DataError, match="ended by signal 11"):
        parsed(lambda: os.kill(os.getpid(), signal.SIGSEGV))

    assert parsed(lambda: os.write(2, bytes(1 << 20)) + len(bytes(1 << 22))) == (1 << 20) + (1 << 22)
    assert parsed(lambda: print("x" * (1 << 20), file=sys.__stderr__)) is None


def test_a_disk_without_room_takes_only_the_words_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bounded.tempfile, "TemporaryFile", full)
    assert parsed(lambda: print("x" * (1 << 20), file=sys.__stderr__)) is None
    with pytest.raises(DataError, match="file cannot be read: "):
        parsed(lambda: 1 / 0)


def test_a_child_writes_no_file_beyond_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_pieces() -> None:
        with (tmp_path / "large").open("wb", buffering=0) as file:
            for _ in range(16):
                file.write(bytes(1 << 20))

    # Not by the variable, which would shorten the time too: a busy machine may leave the child waiting.
    monkeypatch.setitem(LIMITS, "run directory", LIMITS["run directory"]._replace(n_bytes=8 << 20))
    with pytest.raises(DataError, match=r"file cannot be read: OSError: .*File too large"):
        parsed(write_pieces)
    assert (tmp_path / "large").stat().st_size <= 8 << 20
    with pytest.raises(DataError, match="file cannot be read: "):
        parsed(lambda: [os.write(2, bytes(1 << 20)) for _ in range(16)])


def test_memory_and_time_are_bounded_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(DataError, match=r"file takes more than 0\.75 GiB of memory.*\n  fix: .*SHARDKIT_FILE_LIMITS=4"):
        parsed(lambda: bytes(1 << 30))
    monkeypatch.setenv(VARIABLE, "4")
    assert parsed(lambda: len(bytes(1 << 30))) == 1 << 30
    monkeypatch.setenv(VARIABLE, "0.01")
    with pytest.raises(DataError, match=r"file takes more than 0\.2 s,"):
        parsed(signal.pause)  # a child that only waits is ended, too

    def compute() -> None:
        while True:
            pass

    with pytest.raises(DataError, match=r"file takes more than 0\.2 s,"):
        parsed(compute)
    assert before.issuperset(psutil.Process().children())
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(ConfigError, match="SHARDKIT_FILE_LIMITS='much' is not a positive number"):
        parsed(int)


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize(
    "words", ["std::bad_alloc", "fail to memory allocation", "memory allocation of 16 bytes failed"]
)
def test_a_library_that_says_in_its_own_words_that_memory_ended_is_understood(words: str, aborts: bool) -> None:
    def fail() -> None:
        if aborts:
            os.write(2, bytes(1 << 20) + f"{words}\n".encode())
            os.abort()
        raise RuntimeError(words)

    with pytest.raises(DataError, match=r"file takes more than 0\.75 GiB of memory"):
        parsed(fail)


@pytest.mark.parametrize("kind", ["holes", "a link to a large file"])
def test_what_takes_no_space_raises_no_limit(kind: str, tmp_path: Path) -> None:
    """An archive of a few KB can hold a file of holes, and a link to any file of the machine's."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
        file.write(b"line\n")
    (tmp_path / "link").symlink_to("large")
    with pytest.raises(DataError, match=r"takes more than 0\.75 GiB of memory"):
        in_child("run directory", "run", [tmp_path / ("large" if kind == "holes" else "link")],
                 lambda: len(bytes(1 << 30)), DataError)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", ["many losses", "a large trace", "a deep config"])
def test_a_report_of_a_stranger_is_bounded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    if case == "many losses":
        names = ", ".join(f'"val_loss_{i}": 1.0' for i in range(20_000))
        (run / "metrics.jsonl").write_text("".join(f'{{"step": {i}, {names}}}\n' for i in range(9)))
    elif case == "a large trace":
        add(run, {f"trace/rank{rank}.json": {"timeline": [[0, 0]] * 4000, "stack": {str(i): [] for i in range(9)}}
                  for rank in range(300)})  # fmt: skip
    else:
        (run / "config.yaml").write_text("a: " + "[" * 400_000)
    monkeypatch.setenv(VARIABLE, "0.1")
    began = cpu_s()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert cpu_s() - began < 20
    assert ended.value.code in (0, 2)
    err = capsys.readouterr().err
    assert "Traceback" not in err and (ended.value.code == 0 or err.startswith("error: ")), err


@pytest.mark.parametrize("arguments", [["profile"], ["checkpoint", "ls"], ["checkpoint", "verify"]], ids=" ".join)
def test_json_that_is_large_in_memory_is_bounded(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Objects take 24 bytes for each byte of the file; the limit is 2, and what this process has freed and kept.
    content = "[" + "{}," * 6_000_000 + "{}]"
    for name in ("profile/rank0_summary.json", "checkpoints/step_00000001/manifest.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setenv(VARIABLE, "0.02")
    with pytest.raises(SystemExit) as ended:
        main([*arguments, str(tmp_path)])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and ", the limit for a" in err, err  # of memory, or of time on a busy machine


def test_the_limits_are_documented() -> None:
    text = (Path(__file__).parents[1] / "SECURITY.md").read_text()
    for kind, limit in LIMITS.items():
        row = rf"\| {kind} \|.*\| {limit.n_bytes >> 20} MiB \+ {limit.times} × size \| {limit.seconds:g} s"
        assert re.search(row, text), row
    names = re.findall(r"`(test_\w+)`", text)
    tests = "".join(file.read_text() for file in Path(__file__).parent.rglob("test_*.py"))
    assert len(names) > 8 and not [name for name in names if f"def {name}(" not in tests]
