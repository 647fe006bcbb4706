"""A child process parses for its parent, within limits of memory and time."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkit.cli.__main__ import main
from shardkit.errors import ConfigError, DataError
from shardkit.files.bounded import LIMITS, VARIABLE, in_child
from tests.report.samples import add, write_run


def parsed(function: Any) -> Any:
    return in_child("run directory", "file", [], function, DataError)


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


def test_memory_and_time_are_bounded_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().children()
    with pytest.raises(DataError, match=r"file takes more than 0\.75 GiB of memory.*\n  fix: .*SHARDKIT_FILE_LIMITS=4"):
        parsed(lambda: bytes(1 << 30))
    monkeypatch.setenv(VARIABLE, "4")
    assert parsed(lambda: len(bytes(1 << 30))) == 1 << 30
    monkeypatch.setenv(VARIABLE, "0.01")
    began = time.monotonic()
    with pytest.raises(DataError, match=r"file takes more than 0\.2 s to read"):
        parsed(signal.pause)
    assert time.monotonic() - began < 20, "a child that only waits is ended, too"

    def compute() -> None:
        while True:
            pass

    with pytest.raises(DataError, match=r"file takes more than 0\.2 s to read"):
        parsed(compute)
    assert psutil.Process().children() == before
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(ConfigError, match="SHARDKIT_FILE_LIMITS='much' is not a positive number"):
        parsed(int)


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
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert time.monotonic() - began < 20
    assert ended.value.code in (0, 2)
    err = capsys.readouterr().err
    assert "Traceback" not in err and (ended.value.code == 0 or err.startswith("error: ")), err


def test_the_limits_are_documented() -> None:
    text = (Path(__file__).parents[1] / "SECURITY.md").read_text()
    for kind, limit in LIMITS.items():
        row = rf"\| {kind} \|.*\| {limit.n_bytes >> 20} MiB \+ {limit.times} × size \| {limit.seconds:g} s"
        assert re.search(row, text), row
