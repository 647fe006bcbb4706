"""docs/integrations.md: every example runs as it stands there and prints what stands below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.texts import write_program

REPO = Path(__file__).resolve().parents[2]
WHOLE = (REPO / "docs" / "integrations.md").read_text(encoding="utf-8")
ONE_LINE = re.compile(r"^## One line in your loop$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PAGE = ONE_LINE.sub("", WHOLE)
EXAMPLES = re.findall(r"^```bash\n((?:(?!```).*\n)+)```\n\n```text\n((?:(?!```).*\n)+)```", PAGE, re.MULTILINE)
FILES = EXAMPLES[0][0].rpartition("shardkit plan")[0]
"""What the first example writes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the examples run one after the other, with a `shardkit` of this checkout."""
    folder = tmp_path_factory.mktemp("integrations")
    write_program(folder / "bin" / "shardkit", f'#!/bin/sh\nexec "{sys.executable}" -m shardkit.cli "$@"\n')
    return folder


def environment(folder: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{folder / 'bin'}{os.pathsep}{clean['PATH']}"
    return {**clean, "PATH": path, "PYTHONPATH": str(REPO), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0], ids=["plan"])
def test_an_example_prints_what_the_page_shows(number: int, folder: Path) -> None:
    assert len(EXAMPLES) == 1
    script, shown = EXAMPLES[number]
    done = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=folder, env=environment(folder), timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    rest = done.stdout
    for line in (line for line in shown.splitlines() if line != "…"):
        assert line in rest, f"{line}\nis not, or not in this order, in\n{done.stdout}"
        rest = rest.partition(line)[2]


@pytest.mark.slow
def test_the_python_example_runs(folder: Path) -> None:
    (code,) = re.findall(r"^```python\n(from shardkit.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-eu", "-c", FILES], cwd=folder, check=True)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(folder), timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits ")
