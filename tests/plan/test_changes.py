"""Changes of a job that does not fit: each is planned once, roughly where the model is deep, and for a limited time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.errors import NotPlannedError, ShardkitError
from shardkit.plan.advise import ROUGHLY, Changes, changes_that_fit
from shardkit.plan.model.estimate import CategoryEstimate, MemoryEstimate, PeakEstimate, PhaseEstimate
from shardkit.plan.show import show_changes
from shardkit.plan.simulate.step import planned_engine
from shardkit.plan.target import choose_target

GIB = 2**30
SETTINGS = ["parallel.strategy=fsdp", "train.micro_batch_size=8", "model.n_layers=32"]


def estimate_of(gibibytes: float, **changes: Any) -> MemoryEstimate:
    """Needs so much of a card of 24 GiB, most of it activations."""
    n_bytes = round(gibibytes * GIB)
    peak = PeakEstimate(n_bytes, n_bytes, n_bytes, "backward", "blocks.31")
    categories: dict[Any, CategoryEstimate] = {
        "params": CategoryEstimate(GIB, 0), "activations": CategoryEstimate(max(0, n_bytes - GIB), 0),
    }  # fmt: skip
    plain = MemoryEstimate(
        "l4", 8, 0, 10**9, 32, "cuda", {"backward": PhaseEstimate(n_bytes, n_bytes, 0)}, peak, GIB, 0, categories,
        device_memory=24 * GIB,
    )  # fmt: skip
    return replace(plain, **changes)


class CountingPlanner:
    """Answers as a planner does, and counts its traces; a micro-batch takes 5 GiB, and 3 GiB more in rough traces."""

    def __init__(self, deep: bool, stops_after: int = 1000) -> None:
        self.target = choose_target(RunConfig(), 8, gpu="l4")
        self.exact, self.roughly = list[RunConfig](), list[RunConfig]()
        self.is_stopped = False
        self._deep, self._stops_after = deep, stops_after

    @contextmanager
    def stopping_after(self, seconds: float) -> Iterator[None]:
        yield

    def rough(self, config: RunConfig) -> MemoryEstimate | None:
        if not self._deep:
            return None
        self.roughly.append(config)
        if len(self.roughly) > self._stops_after:
            self.is_stopped = True
            raise ShardkitError("this step cannot be traced: the planning process was ended by SIGKILL")
        return estimate_of(self._needs(config) + 3, extrapolated_from=(2, 3))

    def predict(self, config: RunConfig) -> MemoryEstimate:
        self.exact.append(config)
        return estimate_of(self._needs(config))

    def _needs(self, config: RunConfig) -> float:
        return 5.0 * config.train.micro_batch_size / (4 if config.activation.policy == "full" else 1)


def changes(planner: Any) -> Changes:
    return changes_that_fit(load_config(None, SETTINGS).config, estimate_of(40.0), planner)


def test_a_shallow_job_is_planned_exactly_once_for_each_change() -> None:
    planner = CountingPlanner(deep=False)
    planned = changes(planner)
    assert planned and not any(change.rough for change in planned) and planned.left_out == []
    assert len(planner.exact) == len({config.model_dump_json() for config in planner.exact}) <= 7
    assert "changes, each planned:" in show_changes(planned)


def test_a_deep_job_is_planned_roughly_and_set_against_its_exact_plan() -> None:
    planner = CountingPlanner(deep=True)
    planned = changes(planner)
    assert planner.exact == [], "the exact plan of the job is the only whole trace"
    assert len(planner.roughly) == len({config.model_dump_json() for config in planner.roughly}) <= 8, "the job, once"
    needs = {change.settings: change.estimate.needed / GIB for change in planned}
    assert needs["activation.policy=full"] == pytest.approx(10), "the 3 GiB that rough traces add are taken off"
    assert planned[0].estimate.verdict == "fits" and planned[0].estimate.uncertainty == ROUGHLY
    shown = show_changes(planned)
    assert shown.startswith("changes, each planned, from traces with 2 and 3 layers:") and "about 10.00 GiB" in shown


def test_a_change_that_time_ran_out_for_is_named() -> None:
    everything = CountingPlanner(deep=True)
    changes(everything)
    planned = changes(CountingPlanner(deep=True, stops_after=len(everything.roughly) - 1))
    assert len(planned) >= 1 and len(planned.left_out) >= 1
    assert not {change.settings for change in planned} & {*planned.left_out}
    assert show_changes(planned).splitlines()[-1].startswith("not tried, as planning them takes more than ")
    nothing = changes(CountingPlanner(deep=True, stops_after=0))
    assert nothing == [] and show_changes(nothing).startswith("not tried")


@pytest.mark.parametrize(
    ("gibibytes", "clear"),
    [(20.0, True), (22.0, False), (25.0, False), (28.0, True)],
    ids=["fits", "tight", "over", "not"],
)
def test_a_first_look_answers_if_its_error_changes_no_verdict(gibibytes: float, clear: bool) -> None:
    assert estimate_of(gibibytes).is_clear is clear
    assert not estimate_of(gibibytes, device_memory=None).is_clear, "without a limit there is no verdict"


def test_a_strategy_that_no_plan_has_is_refused_by_name() -> None:
    config = RunConfig()
    parallel = config.parallel.model_copy(update={"strategy": "tensor"})
    with pytest.raises(NotPlannedError, match=r"parallel\.strategy=tensor"):
        planned_engine(config.model_copy(update={"parallel": parallel}), None)
