"""The comparison with other libraries: a time counts only if the losses agree; arms train side by side for real."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.overhead import write_tokens
from benchmarks.peers_arms import ARMS, OURS


def test_equal_losses_up_to_rounding_are_compared() -> None:
    found = peers.loss_differences({"PyTorch": [3.0, 2.0], "Fabric": [3.0, 2.000_004], OURS: [2.999_999, 2.0]})
    assert found == pytest.approx({"PyTorch": 0.0, "Fabric": 4e-6, OURS: 1e-6}, rel=1e-6)


@pytest.mark.parametrize("wrong", [2.1, 2.000_02, math.nan])
def test_other_losses_refuse_the_comparison(wrong: float) -> None:
    with pytest.raises(peers.DifferentLosses, match=rf"^Fabric: loss {wrong} in step 2, 2\.0 with PyTorch"):
        peers.loss_differences({"PyTorch": [3.0, 2.0, 1.0], "Fabric": [3.0, wrong, 1.0]})


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", list(ARMS))
def test_arms_train_alike_and_take_alike(engine: str, tmp_path: Path) -> None:
    arms = [*(arm for arm in ARMS[engine] if arm != "Fabric"), OURS]
    tokens = write_tokens(tmp_path)
    peaks = peers.peaks(engine, arms, tokens, tmp_path)
    assert peaks[OURS] <= 1.01 * peaks[arms[0]]
    seconds, losses = peers.turns(engine, arms, tokens, tmp_path, 2)
    assert all(len(taken) == 2 for taken in seconds.values())
    peers.loss_differences(losses)
    assert losses[OURS][-1] < losses[OURS][0]
