"""Evaluations and their samples are phases of the plan, and count where they need more than the step does."""

from __future__ import annotations

import gc
import json
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.plan_accuracy import MODELS, allocated, held_addresses
from shardkit.config.load import load_config
from shardkit.plan.client import Planner, plan
from shardkit.plan.show import show
from shardkit.plan.target import choose_target
from tests.ranks import run_ranks
from tests.strategies.cases import PARTITION_ALL

ENGINES: dict[str, list[str]] = {
    "fsdp": ["train.eval_samples=1"],  # a micro-batch has two
    "zero3": ["train.eval_samples=16", f"parallel.ds_config={json.dumps(PARTITION_ALL)}", "parallel.bucket_mb=4"],
}
PROMPTS = ["import os", "def main(args):", "class"]


def settings(strategy: str, root: str) -> list[str]:
    return [
        *MODELS["llama"], f"parallel.strategy={strategy}", *ENGINES[strategy], "run.device=cpu",
        f"run.dir={root}/{strategy}", f"data.path={pydoc.__file__}", f"data.cache_dir={root}/cache",
        f"train.sample_prompts={json.dumps(PROMPTS)}", "train.sample_tokens=3", "train.max_steps=2",
        "logging.tensorboard=false", "checkpoint.at_end=false", "optim.implementation=foreach",
    ]  # fmt: skip


MARKS = {"evaluate": 12_401, "sample": 12_403}
"""Bytes that are allocated where each begins; one more where it ends."""


def measured(root: str) -> dict[str, dict[str, int]]:
    """Bytes of torch's CPU allocator at the peak of the evaluation and of its samples, by engine."""
    from torch.profiler import ProfilerActivity, profile

    from shardkit.run import loop
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    def marked(name: str, whole: Any) -> Any:
        def call(*args: Any) -> Any:
            torch.empty(MARKS[name], dtype=torch.uint8)
            try:
                return whole(*args)
            finally:
                torch.empty(MARKS[name] + 1, dtype=torch.uint8)

        return call

    gc.unfreeze()  # the server of ranks has frozen its objects: data loaders would leave the model frozen, and unseen
    found = {}
    loop.evaluate = marked("evaluate", loop.evaluate)
    loop.write_samples = marked("sample", loop.write_samples)
    for strategy in ENGINES:
        gc.collect()
        tracing = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with tracing as profiler, start(None, settings(strategy, root)) as job:
            assert len(list(Trainer(job).recorded_steps())) == 2
            gc.collect()
            alive = held_addresses()
        totals = allocated(profiler, alive)
        sizes = [size for size, _ in totals]
        found[strategy] = {
            name: max(total for _, total in totals[sizes.index(size) : sizes.index(size + 1)])
            for name, size in MARKS.items()
        }
    return found


@pytest.mark.slow
def test_an_evaluation_takes_what_the_plan_says(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.plan.test_evaluation:measured", root=str(tmp_path))[0]
    for strategy in ENGINES:
        config = load_config(None, settings(strategy, str(tmp_path))).config
        target = choose_target(config, 2)
        estimate = plan(config, target)
        for name in ("evaluate", "sample"):
            planned = estimate.phases[name].allocated
            assert abs(planned / found[strategy][name] - 1) <= 0.03, (strategy, name, planned, found)
            assert f"\n{name} " in show("", estimate, target)


class Hungry:
    """A task whose evaluation keeps 64 MiB beside its loss."""

    def __init__(self, config: Any) -> None:
        pass

    def build_model(self) -> nn.Module:
        return nn.Linear(8, 8)

    def plan_batch(self, n: int) -> torch.Tensor:
        return torch.zeros(n, 8)

    def dataset(self, split: str) -> None:
        return None

    def n_targets(self, batch: torch.Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        more = torch.zeros(2**4 if model.training else 2**24, device=batch.device)
        return model(batch).sum() + more.sum()


@pytest.mark.slow
def test_an_evaluation_that_takes_more_than_a_step_is_the_peak() -> None:
    own = ["task.factory=tests.plan.test_evaluation:Hungry", "parallel.strategy=ddp"]
    alone, both = (load_config(None, [*own, *more]).config for more in (["train.eval_samples=0"], []))
    with Planner(choose_target(both, 2, gpu="h100")) as planner:
        without, found = planner.predict(alone), planner.predict(both)
    assert "evaluate" not in without.phases and found.peak.phase == "evaluate"
    assert found.peak.required - without.peak.required > 2**25
