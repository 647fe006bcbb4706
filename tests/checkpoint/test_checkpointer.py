"""When it saves, what it reports, and that training may go on meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint import save as save_module
from shardkit.checkpoint.native import layout
from shardkit.checkpoint.native import writer as writer_module
from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.errors import CheckpointError
from shardkit.strategies.base import Shard
from tests.checkpoint import fakes


@pytest.fixture
def make(alone: None, tmp_path: Path) -> Iterator[Any]:
    made: list[Checkpointer] = []

    def build(strategy: fakes.Plain, **config: Any) -> Checkpointer:
        made.append(fakes.checkpointer(tmp_path, strategy, **config))
        return made[-1]

    yield build
    for checkpoints in made:
        checkpoints.close()


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"every_steps": 3, "at_end": False}, [3, 6, 9]),
        ({"every_steps": 3}, [3, 6, 9, 10]),
        ({}, [10]),
        ({"every_steps": 5}, [5, 10]),
        ({"at_end": False}, []),
    ],
)
def test_due(config: dict[str, Any], steps: list[int], make: Any) -> None:
    checkpoints = make(fakes.Plain(), **config)
    assert [step for step in range(1, 11) if checkpoints.due(step, is_last=step == 10)] == steps


def test_a_step_is_saved_once(make: Any) -> None:
    checkpoints = make(fakes.Plain(), every_steps=1)
    checkpoints.save(RunState(step=4))
    assert not checkpoints.due(4, is_last=True, requested=True)
    assert checkpoints.due(5)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock."""
    time = [1000.0]
    monkeypatch.setattr(save_module.time, "monotonic", lambda: time[0])
    return time


def test_time_is_up_after_the_interval_and_not_right_after_a_save(make: Any, now: list[float]) -> None:
    checkpoints = make(fakes.Plain(), every_minutes=2)
    now[0] += 119
    assert not checkpoints.time_is_up()
    now[0] += 2
    assert checkpoints.time_is_up()
    checkpoints.save(RunState(step=1))
    assert not checkpoints.time_is_up()


def test_by_default_saves_cost_at_most_two_per_cent_of_the_time(make: Any, now: list[float]) -> None:
    checkpoints = make(fakes.Plain())
    now[0] += 599
    assert not checkpoints.time_is_up()
    now[0] += 2
    assert checkpoints.time_is_up(), "ten minutes, while no save was timed"
    checkpoints.remember([30.0, 12.0])
    checkpoints.save(RunState(step=1))
    now[0] += 1490
    assert not checkpoints.time_is_up()
    now[0] += 20
    assert checkpoints.time_is_up(), "50 times the longest save"
    assert "at most 2 % of the time" in checkpoints.describe_default()
    for config in ({"every_steps": 100}, {"every_minutes": None}):
        checkpoints = make(fakes.Plain(), **config)
        now[0] += 1e6
        assert not checkpoints.time_is_up() and checkpoints.describe_default() == ""


def test_training_may_change_everything_once_an_async_save_returns(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, niceness, before = threading.Event(), [], os.getpriority(os.PRIO_PROCESS, 0)
    real = writer_module.write_file

    def slow(*args: Any) -> Any:
        assert may_write.wait(30)
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(*args)

    monkeypatch.setattr(writer_module, "write_file", slow)
    strategy, reports = fakes.Plain(), []
    checkpoints = make(strategy, async_save=True, on_done=reports.append)
    strategy.fill(1)
    assert checkpoints.save(RunState(step=1)) is None
    assert not layout.checkpoints(tmp_path)
    assert checkpoints.staging_bytes >= sum(whole.nbytes for whole in strategy.wholes.values())
    strategy.fill(2)  # the next step
    may_write.set()
    report = checkpoints.wait()
    assert report == reports[0]
    assert niceness[0] > before == os.getpriority(os.PRIO_PROCESS, 0), "the thread gives way, training does not"
    assert checkpoints.wait() is None, "there is nothing more to wait for"
    assert checkpoints.resume(tmp_path) is not None
    assert strategy.holds(1)


def test_two_async_saves_never_overlap(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = [0], [0]
    real = writer_module.write_file

    def counted(*args: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            return real(*args)
        finally:
            running[0] -= 1

    monkeypatch.setattr(writer_module, "write_file", counted)
    strategy, reports = fakes.Plain(), []
    checkpoints = make(strategy, async_save=True, on_done=reports.append)
    buffers = []
    for step in range(1, 6):
        strategy.fill(step)
        checkpoints.save(RunState(step=step))
        buffers.append(checkpoints.staging_bytes)
    checkpoints.wait()
    assert most[0] == 1
    assert [report.step for report in reports] == [1, 2, 3, 4, 5]
    assert len(set(buffers)) == 1, "the host copy is used again"


def test_a_failure_in_the_background_is_raised_at_the_wait(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("not about a disk")

    checkpoints = make(fakes.Plain(), async_save=True)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "write_file", broken)
        checkpoints.save(RunState(step=1))
        with pytest.raises(RuntimeError, match="not about a disk"):
            checkpoints.wait()


def test_a_usual_file_that_leaves_the_cache_by_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(writer_module, "CHUNK_BYTES", 100)
    monkeypatch.setattr(writer_module.os, "posix_fadvise", lambda _, at, n, advice: advised.append((at, n)))
    writer_module.write_file(tmp_path / "file", [torch.zeros(10)] * 5)  # at multiples of 64 bytes
    assert advised == [(0, 104), (104, 128)]
    (tmp_path / "new").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_the_callers_own_state_comes_back(make: Any, tmp_path: Path) -> None:
    checkpoints = make(fakes.Plain())
    run = RunState(step=1, extra={"curriculum": [1, 2.5, None], "name": "ä"})
    checkpoints.save(run)
    assert checkpoints.resume(tmp_path) == (tmp_path / "step_00000001", run)


def test_state_that_is_not_json_is_refused_before_anything_is_written(make: Any, tmp_path: Path) -> None:
    for extra in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(CheckpointError, match="JSON"):
            make(fakes.Plain()).save(RunState(step=1, extra=extra))
    assert list(tmp_path.iterdir()) == []


def test_a_validation_loss_that_is_not_finite_is_no_best(make: Any, tmp_path: Path) -> None:
    checkpoints = make(fakes.Plain())
    for step, loss in ((1, 2.0), (2, float("nan")), (3, float("-inf"))):
        checkpoints.save(RunState(step=step, val_loss=loss))
    assert layout.best_of(layout.checkpoints(tmp_path)) == tmp_path / "step_00000001"


def test_a_folder_without_checkpoints_is_nothing_to_resume(make: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert make(fakes.Plain()).resume(tmp_path / "empty") is None
    assert make(fakes.Plain()).resume(tmp_path / "nowhere") is None


class Averaged(fakes.Plain):
    """A strategy with one more tensor: a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.arange(1000.0)

    def shards(self) -> Iterator[Shard]:
        yield from super().shards()
        yield Shard("ema.0", (1000,), 0, self.average)

    load_targets = shards


def test_an_average_of_the_weights_is_saved_with_them_and_not_dropped(make: Any, tmp_path: Path) -> None:
    make(Averaged()).save(RunState(step=1))
    again = Averaged()
    again.average.zero_()
    make(again).resume(tmp_path)
    assert torch.equal(again.average, torch.arange(1000.0))
    with pytest.raises(CheckpointError, match=r"holds ema\.0.*no place") as caught:
        make(fakes.Plain()).resume(tmp_path)
    assert "train.ema_decay" in caught.value.fix
