"""Traces three steps of small models, and two with a repeated one; prints what differs, for `test_repeated`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.memory.tracing.traced_step import Tracing
from shardkit.plan.model.allocator import ROUND, replay
from shardkit.plan.model.predict import Scenario, edges, prepare, trace
from shardkit.plan.target import choose_target

SMALL = ["model.preset=debug", "train.grad_accum_steps=2", "train.micro_batch_size=2"]


def main(jobs: list[dict[str, Any]]) -> None:
    """Print, for each job: whether the third step was repeated, and the names of the figures that then differ."""
    target = choose_target(load_config(None, SMALL).config, 4, gpu="l4", expandable=False)
    device = torch.device("cuda" if prepare(target) == "cuda" else "cpu", 0)
    for job in jobs:
        config = load_config(None, [*SMALL, *job["settings"]]).config
        scenario = Scenario(target, device)
        repeats, answers = Tracing.repeats, list[bool]()

        def noted(self: Tracing, answers: list[bool] = answers, repeats: Callable[[Tracing], bool] = repeats) -> bool:
            answers.append(repeats(self))
            return answers[-1]

        repeated, traced = figures(config, scenario, noted), figures(config, scenario, lambda self: False)
        different = [name for name in traced if repeated[name] != traced[name]]
        print(json.dumps({"repeated": answers, "different": different}), flush=True)


def figures(config: RunConfig, scenario: Scenario, repeats: Callable[[Tracing], bool]) -> dict[str, Any]:
    """All that a plan reads from the log of three steps."""
    with patch.object(Tracing, "repeats", repeats):
        log = trace(config, scenario, 3)[0]
    device = str(scenario.device)
    allocations = [(n_bytes, log.allocations[index]) for index, n_bytes in log.events]
    streams: dict[int, int] = {}  # each world numbers them anew
    return {
        "events": [
            (n_bytes, made.device, streams.setdefault(made.stream, len(streams)), made.category)
            for n_bytes, made in allocations
        ],
        "marks": log.marks, "releases": log.releases, "replay": replay(log, device, False),
        "edges": edges(log, device, ROUND), "host": edges(log, "cpu", 1),
    }  # fmt: skip


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
