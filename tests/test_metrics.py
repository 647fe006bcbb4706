"""Trackers beside metrics.jsonl."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardkit import capability
from shardkit.config_io import load_config
from shardkit.errors import ConfigError
from shardkit.metrics import MetricsWriter


def test_wandb_gets_every_step_and_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, False, step - 1, "project", {"train": {"seed": 0}})
        writer.write({"step": step, "loss": 1.0 / step})
        writer.close()
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_wandb_that_is_not_installed_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(capability.importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    config = load_config(overrides={"logging.wandb_project": "project"}).config
    with pytest.raises(ConfigError, match="needs wandb") as error:
        capability.check(config, device="cpu", world_size=2, local_world_size=2)
    assert "pip install" in error.value.fix
