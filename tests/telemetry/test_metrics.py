"""Trackers beside metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.telemetry import catalog
from shardkit.telemetry.metrics import MetricsWriter
from tests import generated
from tests.memory.samples import gpu_row


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


def test_tensorboard_gets_every_gathers_memory(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write({"step": 1, "loss": 2.0})
    writer.write_memory(1, [gpu_row(0, 2**30), gpu_row(1, 3 * 2**30)])
    writer.write_memory(5, [gpu_row(0, 2**30), gpu_row(1, 5 * 2**30)])
    writer.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    series = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert series["memory/peak_allocated/max"] == [(1, 3 * 2**30), (5, 5 * 2**30)]
    assert series["memory/peak_allocated/min"] == [(1, 2**30), (5, 2**30)]
    assert series["memory/peak_allocated/skew"] == [(1, 1.5), (5, pytest.approx(5 / 3))]
    assert series["memory_of_rank/peak_allocated/1"] == [(1, 3 * 2**30), (5, 5 * 2**30)]
    assert series["train/loss"] == [(1, 2.0)]


def test_a_save_finds_every_step_before_it_on_disk(tmp_path: Path) -> None:
    """A run that is killed and goes on from a checkpoint does not repeat the steps before it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def steps() -> list[int]:
        return [event.step for event in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")]

    writer = MetricsWriter(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        writer.write({"step": step, "loss": 1.0})
    writer.flush()
    assert steps() == [1, 2, 3]
    writer.write({"step": 4, "loss": 1.0})
    writer.flush()
    writer.flush()
    assert steps() == [1, 2, 3, 4]
    writer.close()


def test_a_large_world_has_no_series_per_rank(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write_memory(1, [gpu_row(rank, 2**30) for rank in range(64)])
    writer.close()
    assert b"memory_of_rank" not in next((tmp_path / "tensorboard").iterdir()).read_bytes()


def test_the_documented_metrics_are_the_declared_ones() -> None:
    assert generated.is_current("metrics"), "run: python -m tests.generated"
    assert len({metric.key for metric in catalog.METRICS}) == len(catalog.METRICS)
