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
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), clean["PATH"]])
    return {**clean, "PATH": path, "PYTHONPATH": str(REPO), "XDG_CACHE_HOME": str(folder / "cache")}


def run(script: str, folder: Path) -> str:
    """What it prints, on both streams."""
    done = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=folder, env=environment(folder), timeout=400,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_an_example_prints_what_the_page_shows(folder: Path) -> None:
    [(script, shown)] = EXAMPLES
    rest = printed = run(script, folder)
    for line in (line for line in shown.splitlines() if line != "…"):
        assert line in rest, f"{line}\nis not, or not in this order, in\n{printed}"
        rest = rest.partition(line)[2]


OWN_SCRIPT = PAGE.partition("\n## Launch your own script\n")[2].partition("\n## ")[0]


@pytest.mark.slow
@pytest.mark.dist
def test_the_examples_of_ones_own_script_print_what_the_page_shows(folder: Path) -> None:
    bash, text = (
        re.findall(rf"^```{kind}\n(.*?)^```", OWN_SCRIPT, re.MULTILINE | re.DOTALL) for kind in ("bash", "text")
    )
    assert len(bash) == len(text) == 2
    for script, shown in zip(bash, text, strict=True):
        printed = run(script, folder)
        assert re.search(".*".join(re.escape(piece) for piece in shown.split("…")), printed, re.DOTALL), printed
    assert "rank 1: step" not in printed


@pytest.mark.slow
def test_the_python_example_runs(folder: Path) -> None:
    (code,) = re.findall(r"^```python\n(from shardkit.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-eu", "-c", FILES], cwd=folder, check=True)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(folder), timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits ")
