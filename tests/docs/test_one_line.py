"""docs/integrations.md, "One line in your loop": each example runs as it is, and runs out of memory as told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardkit.report.read import read_run
from tests.commands import Done, python_m
from tests.docs.test_integrations import ONE_LINE, WHOLE

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
slow = pytest.mark.slow
CASES = [
    "own_loop", pytest.param("trainer", marks=slow), pytest.param("accelerated", marks=slow),
    pytest.param("deepspeed_loop", marks=[slow, pytest.mark.deepspeed]), pytest.param("lightning_loop", marks=slow),
]  # fmt: skip


def run(name: str, folder: Path, cap: str = "") -> Done:
    ranks, library = TOOLS[name][1:3]
    if library is not None:
        pytest.importorskip(library, reason=f"needs {library}")
    limit = f', cap="{cap}")' if cap else ")"
    code = re.sub(r'(run_dir="runs/\w+")\)', rf"\1{limit}", SCRIPTS[name])
    (folder / f"{name}.py").write_text(NO_BUILD * (library == "deepspeed") + code)
    return python_m(f"{name}.py", ranks=ranks, cwd=folder, env={"DS_ACCELERATOR": "cpu"})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_an_example_is_watched(name: str, tmp_path: Path) -> None:
    assert set(SCRIPTS) == set(TOOLS)
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_run(tmp_path / "runs" / TOOLS[name][0])
    assert found.notes == [] and len(found.last_rows) == max(1, TOOLS[name][1])
    assert all(line["loss"] >= 0 for line in found.metrics) and len(found.metrics) in (4, 10, 20)
    assert all(
        row.state is not None and set(row.phases) >= {"forward", "backward", "update"} for row in found.last_rows
    )


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", list(TOOLS))
def test_an_example_that_runs_out_of_memory_says_what_the_page_shows(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path, TOOLS[name][3])
    assert done.returncode != 0
    lines = re.sub(r"^\[rank\d\]: ", "", done.stderr, flags=re.MULTILINE)
    said = re.findall(r"^shardkit: (rank \d ran out.*)\n  (fix: .*)$", lines, re.MULTILINE)
    assert said, done.stderr
    shown = re.search(r"`fix: set ([^`;,(]*)", ROWS[TOOLS[name][0]])[1].strip()
    assert any(shown in fix for _, fix in said), said
