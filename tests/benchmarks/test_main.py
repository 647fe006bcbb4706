"""`python -m benchmarks` knows every benchmark."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("argv", [["plann"], ["all", "--rounds", "3"]])
def test_what_is_not_there_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(argv) == 2
    assert "fix: python -m benchmarks lists what there is" in capsys.readouterr().err
