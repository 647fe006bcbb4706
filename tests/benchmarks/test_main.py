"""`python -m benchmarks` knows every benchmark."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks
from benchmarks import __main__ as entry

NO_BENCHMARKS = {"bare"}  # one side of another's comparison


def with_a_main() -> set[str]:
    folder = Path(benchmarks.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "\ndef main() -> None:" in path.read_text()}
    return modules | {path.parent.name for path in folder.glob("*/__main__.py")}


def test_every_benchmark_is_listed_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert {*entry.ON_CPU, *entry.ON_GPU} == with_a_main() - NO_BENCHMARKS
    assert entry.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*entry.ON_CPU, *entry.ON_GPU):
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line.split()) > 4


def test_a_name_becomes_that_module_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: begun.append((path, argv)))
    entry.main(["plan", "--rounds", "3"])
    assert begun == [(sys.executable, [sys.executable, "-m", "benchmarks.plan", "--rounds", "3"])]


@pytest.mark.parametrize("argv", [["plann"], ["all", "--rounds", "3"]])
def test_what_is_not_there_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(argv) == 2
    assert "fix: python -m benchmarks lists what there is" in capsys.readouterr().err


def test_all_goes_on_after_one_that_fails_and_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(argv: list[str], cwd: Path) -> SimpleNamespace:
        ran.append(argv[2].removeprefix("benchmarks."))
        return SimpleNamespace(returncode=int(ran[-1] == "peers"))

    monkeypatch.setattr("subprocess.run", run)
    assert entry.main(["all"]) == 1
    assert ran == [*entry.ON_CPU, "report"]
    assert "failed: peers" in capsys.readouterr().err
