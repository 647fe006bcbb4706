"""A plan reads no run; where training would be refused, a note on stderr says so, and the plan goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.cli.plan import _note_refused_start
from shardkit.config.load import load_config


def noted(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What the command says on stderr before it plans the defaults with these overrides."""
    _note_refused_start(load_config(None, overrides).config.run)
    return capsys.readouterr().err


def test_a_resume_that_would_be_refused_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    there = f"run.dir={tmp_path}"
    for overrides, cause in (
        ([f"{there}/runs", "run.resume=true"], f"run.resume=true, but {there}/runs does not exist"),
        ([f"run.resume={tmp_path}/runs"], f"run.resume={tmp_path}/runs does not exist"),
        ([f"{there}/base"], f"{there}/base is a model folder (config.json)"),
        ([f"{there}/notes/x"], f"{there}/notes/x lies below {tmp_path}/notes, which is a file"),
    ):
        said = noted(capsys, *overrides)
        assert said.startswith(f"note: training would be refused here, which a plan does not depend on: {cause}")
        assert said.count("\n") == 1


def test_a_start_that_is_fine_is_not_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert noted(capsys, f"run.dir={tmp_path}/new") == ""
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    for resume in ("true", "auto", f"{tmp_path}/run"):
        assert noted(capsys, f"run.dir={tmp_path}/run", f"run.resume={resume}") == ""
