"""The moving average of the weights: the same under every strategy, and the one that evaluation sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks


@pytest.mark.slow
def test_every_strategy_keeps_the_average_of_one_process() -> None:
    target = "tests.strategies.precision_cases:averages"
    want, judged, plain, after, _ = run_ranks(1, target, names=["single"], decay=0.5)[0]["single"]
    assert abs(judged - plain) > 1e-2, "the averages are other weights"
    ranks = run_ranks(2, target, names=["ddp", "fsdp", "zero1", "zero2", "zero3"], decay=0.5)
    for name in ranks[0]:
        assert sum(rank[name][4][0] for rank in ranks) == ranks[0][name][4][1], f"{name}: each average is kept once"
        for key, sums in want.items():
            for index in (0, 1):
                found = sum(rank[name][0].get(key, (0.0, 0.0))[index] for rank in ranks)
                assert found == pytest.approx(sums[index], rel=1e-4, abs=1e-4), f"{name} {key}"
        for rank in ranks:
            assert rank[name][1] == pytest.approx(judged, rel=1e-5), f"{name}: evaluation does not see the averages"
            assert rank[name][2] == pytest.approx(plain, rel=1e-5), f"{name}: the weights did not come back"
            assert rank[name][3] == pytest.approx(after, abs=1e-5), f"{name}: training does not go on as before"


def test_a_checkpoint_carries_the_averages_to_any_strategy(tmp_path: Path) -> None:
    target = "tests.strategies.precision_cases:averages_through_a_checkpoint"
    ranks = run_ranks(2, target, root=str(tmp_path), saver="ddp", loaders=["fsdp", "zero3"])

    def whole(name: str) -> dict[str, float]:
        names = {key for rank in ranks for key in rank[name]}
        return {key: sum(rank[name].get(key, 0.0) for rank in ranks) for key in names}

    saved = whole("ddp")
    assert any(abs(saved[key] - saved["model" + key[3:]]) > 1e-6 for key in saved if key.startswith("ema."))
    for name in ("fsdp", "zero3"):
        assert whole(name) == pytest.approx(saved, rel=1e-9), name


def test_a_step_that_loss_scaling_skips_is_not_averaged_even_if_the_scale_is_1_then() -> None:
    names = ["single", "fsdp"]
    (found,) = run_ranks(1, "tests.strategies.precision_cases:skipped", names=names)
    assert found == dict.fromkeys(names, (True, True, 1.0))
