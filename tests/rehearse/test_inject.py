"""The file that Python loads at its start runs the one that it hides, and does nothing without a rehearsal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shardkit.rehearse.build import INJECT
from tests.rehearse import injected


def test_the_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.flag_of_mine = __name__\n")
    env = {**os.environ, "PYTHONPATH": f"{INJECT}{os.pathsep}{tmp_path}"}
    env.pop("SHARDKIT_REHEARSAL", None)
    code = "import sys; print(sys.flag_of_mine, 'shardkit_rehearsal' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sitecustomize", "False", "False"]
    assert not done.stderr


def test_an_exception_is_recorded_and_printed_as_before(tmp_path: Path) -> None:
    (tmp_path / "emucuda.py").write_text("def preload(): pass\n")
    program = tmp_path / "train.py"
    program.write_text("def train():\n    raise ValueError('bad batch')\n\n\ntrain()\n")
    (tmp_path / "records").mkdir()
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{INJECT}", "RANK": "1", "WORLD_SIZE": "2"}
    env.update(SHARDKIT_REHEARSAL=str(tmp_path / "records"), SHARDKIT_REHEARSAL_STEPS="3")
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: bad batch" in done.stderr
    from shardkit.rehearse.verdict import first_error, read_records

    error = first_error(read_records(tmp_path / "records"))
    assert error is not None and error["rank"] == 1
    assert error["end"]["type"] == "ValueError"
    assert error["end"]["where"] == f"{program}:2: raise ValueError('bad batch')"


def test_a_rank_ends_after_a_step_more_than_the_first_that_saved(tmp_path: Path) -> None:
    """A save is there for all ranks as soon as one has made it, while another may still be in the step before."""
    saving, late = (injected("shardkit_rehearsal").Recording(str(tmp_path), 3, until="save") for _ in range(2))
    saving.steps = 1
    assert not saving.is_past("save")
    saving.note("save", saving.steps)
    late.steps = 1
    assert not saving.is_past("save") and not late.is_past("save")
    late.note("save", 2)
    saving.steps = late.steps = 2
    assert saving.is_past("save") and late.is_past("save")
