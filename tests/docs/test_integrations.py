"""docs/integrations.md: every example runs as it stands there and prints what stands below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.report.read import read_run
from tests.commands import Done, python_m
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


SECTION = ONE_LINE.findall(WHOLE)[0]
SCRIPTS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
ROWS = dict(re.findall(r"^\| (\w+) \| `[^|]*` \| (`rank .*) \|$", SECTION, re.MULTILINE))
TOOLS = {
    "own_loop": ("own", 0, None, "16MiB"),
    "trainer": ("trainer", 0, "transformers", "96MiB"),
    "accelerated": ("accelerated", 2, "accelerate", "6MiB"),
    "deepspeed_loop": ("deepspeed", 2, "deepspeed", "8MiB"),
    "lightning_loop": ("lightning", 0, "lightning", "6MiB"),
}
NO_BUILD = 'import deepspeed\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of compiling\n'


def run_example(name: str, folder: Path, cap: str = "") -> Done:
    ranks, library = TOOLS[name][1:3]
    if library is not None:
        pytest.importorskip(library, reason=f"needs {library}")
    limit = f', cap="{cap}")' if cap else ")"
    code = re.sub(r'(run_dir="runs/\w+")\)', rf"\1{limit}", SCRIPTS[name])
    (folder / f"{name}.py").write_text(NO_BUILD * (library == "deepspeed") + code)
    return python_m(f"{name}.py", ranks=ranks, cwd=folder, env={"DS_ACCELERATOR": "cpu"})


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_an_example_is_watched(name: str, tmp_path: Path) -> None:
    assert set(SCRIPTS) == set(TOOLS)
    done = run_example(name, tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_run(tmp_path / "runs" / TOOLS[name][0])
    assert found.notes == [] and len(found.last_rows) == max(1, TOOLS[name][1])
    assert all(line["loss"] >= 0 for line in found.metrics) and len(found.metrics) in (4, 10, 20)
    assert all(
        row.state is not None and set(row.phases) >= {"forward", "backward", "update"} for row in found.last_rows
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_an_example_that_runs_out_of_memory_says_what_the_page_shows(name: str, tmp_path: Path) -> None:
    done = run_example(name, tmp_path, TOOLS[name][3])
    assert done.returncode != 0
    lines = re.sub(r"^\[rank\d\]: ", "", done.stderr, flags=re.MULTILINE)
    said = re.findall(r"^shardkit: (rank \d ran out.*)\n  (fix: .*)$", lines, re.MULTILINE)
    assert said, done.stderr
    shown = re.search(r"`fix: set ([^`;,(]*)", ROWS[TOOLS[name][0]])[1].strip()
    assert any(shown in fix for _, fix in said), said
