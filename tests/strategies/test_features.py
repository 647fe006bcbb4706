"""Model features and techniques give, under every strategy, the losses of one process with the same feature."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks

ZEROS = ["zero1", "zero2", "zero3"]
Losses = dict[str, dict[str, list[float]]]
FEATURES = ["tied", "frozen", "checkpointed", "bf16"]


@pytest.fixture(scope="module")
def two_ranks() -> Losses:
    names = ["ddp", "fsdp", *ZEROS]
    return run_ranks(2, "tests.strategies.cases:feature_losses", names=names, features=FEATURES)[0]


@pytest.fixture(scope="module")
def one_rank() -> Losses:
    return run_ranks(1, "tests.strategies.cases:feature_losses", names=["single"], features=["plain", *FEATURES])[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *ZEROS])
@pytest.mark.parametrize("feature", FEATURES)
def test_losses_are_those_of_one_process(strategy: str, feature: str, one_rank: Losses, two_ranks: Losses) -> None:
    if feature != "bf16":
        assert two_ranks[feature][strategy] == pytest.approx(one_rank[feature]["single"], abs=1e-5)
        return
    # bf16 keeps 8 bits: relative rounding 2^-9 a product; the losses here are near 4.
    assert two_ranks["bf16"][strategy] == pytest.approx(one_rank["plain"]["single"], abs=0.05)
    assert two_ranks["bf16"][strategy] != one_rank["plain"]["single"], "bf16 must have been used"


def test_features_change_what_they_should(one_rank: Losses) -> None:
    plain = one_rank["plain"]["single"]
    assert one_rank["checkpointed"]["single"] == plain, "recomputing changes no bit"
    assert one_rank["tied"]["single"] != plain
    assert one_rank["frozen"]["single"][0] == plain[0]
    assert one_rank["frozen"]["single"][-1] > plain[-1], "with half of the model frozen it learns less"
