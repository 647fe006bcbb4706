"""A gradient that is not finite ends the run before it reaches a checkpoint, whatever the engine and the optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.run.gradients import BAD_STEP, STEPS

ALONE: dict[str, dict[str, Any]] = {
    "single": {}, "single@foreach": {"optim.implementation": "foreach"},
    "single@sgd": {"optim.name": "sgd", "optim.momentum": 0.9}, "single@muon": {"optim.name": "muon"},
    "single@adafactor": {"optim.name": "adafactor"}, "single@unclipped": {"train.max_norm": None},
    "single@bf16": {"precision.mode": "bf16"}, "single@ema": {"train.ema_decay": 0.9},
}  # fmt: skip
UPDATES_TOO_EARLY = {"single@in_backward": {"optim.in_backward": True, "train.max_norm": None}}
TOGETHER: dict[str, dict[str, Any]] = {
    "ddp": {}, "fsdp": {}, "fsdp@sgd": {"optim.name": "sgd"}, "zero2": {}, "zero2@bf16": {"precision.mode": "bf16"},
    "zero2+optimizer@bf16": {"precision.mode": "bf16"}, "zero3": {}, "zero3@bf16": {"precision.mode": "bf16"},
}  # fmt: skip
WORLDS = [(1, ALONE | UPDATES_TOO_EARLY), (2, TOGETHER)]
OVERFLOWS = [
    (1, ALONE | UPDATES_TOO_EARLY),
    (2, {name: TOGETHER[name] for name in ("ddp", "fsdp", "zero2", "zero3@bf16")}),
]
BEFORE = list(range(1, BAD_STEP))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cases"), WORLDS, ids=["one rank", "two ranks"])
def test_a_gradient_that_is_not_finite_never_reaches_a_checkpoint(
    world: int, cases: dict[str, dict[str, Any]], tmp_path: Any
) -> None:
    ranks = run_ranks(world, "tests.run.gradients:ends", cases=cases, folder=str(tmp_path), how="nan")
    said = {
        False: f"the gradient is not finite at step {BAD_STEP} on rank {world - 1}: "
        "blocks.0.inner.weight, blocks.0.inner.bias (2 of 6 parameters)",
        True: f"the gradient is not finite at step {BAD_STEP}, nor is the state after its update: "
        "blocks.0.inner.bias, blocks.0.inner.bias.exp_avg, blocks.0.inner.bias.exp_avg_sq, blocks.0.inner.weight",
    }
    for rank in ranks:
        for case, found in rank.items():
            message, code = found["said"]
            cause, fix = message.splitlines()
            assert (cause, code) == (said[case in UPDATES_TOO_EARLY], 1), case
            assert "nothing after step 4 was saved" in fix
            assert found["saved"] == BEFORE, case
            assert [line["step"] for line in found["lines"]] == BEFORE, case
            assert all(line["grad_norm"] is not None for line in found["lines"]), case
            assert case in UPDATES_TOO_EARLY or found["spoiled"] == [], f"{case}: the update was made"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), [(1, "single"), (2, "zero3")])
def test_what_remains_is_the_state_before_it(world: int, case: str, tmp_path: Any) -> None:
    target = "tests.run.gradients:losses"
    whole = run_ranks(world, target, case=case, folder=str(tmp_path / "whole"))[0]
    run_ranks(world, "tests.run.gradients:ends", cases={case: {}}, folder=str(tmp_path), how="nan")
    extra = {"run.resume": True, "run.dir": str(tmp_path / case)}
    rest = run_ranks(world, target, case=case, folder="", **extra)[0]
    assert len(rest) == STEPS - BAD_STEP + 1 and rest == pytest.approx(whole[BAD_STEP - 1 :], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cases"), OVERFLOWS, ids=["one rank", "two ranks"])
def test_a_norm_that_overflows_is_an_error_of_its_own(
    world: int, cases: dict[str, dict[str, Any]], tmp_path: Any
) -> None:
    ranks = run_ranks(world, "tests.run.gradients:ends", cases=cases, folder=str(tmp_path), how="overflow")
    for rank in ranks:
        for case, found in rank.items():
            if not found["said"]:  # a norm computed in fp64, as some of DeepSpeed's are: nothing overflowed
                norms = [line["grad_norm"] for line in found["lines"]]
                assert case.startswith("zero") and norms[BAD_STEP - 1] > 1e20 and None not in norms, case
                continue
            message, code = found["said"]
            assert code == 1 and found["saved"] == BEFORE, case
            if case in UPDATES_TOO_EARLY:
                assert f"the gradient is not finite at step {BAD_STEP}, nor is the state after" in message
                continue
            assert f"the gradient norm overflowed at step {BAD_STEP}: every gradient is finite" in message, case
            assert "blocks.0.inner" in message and f"rank {world - 1}" in message, case
