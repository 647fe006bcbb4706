"""State that is not a trained fp32 weight with AdamW moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.checkpoint.native.reader import CheckpointReader
from shardkit.errors import CheckpointError
from tests.ranks import RankError, run_ranks

STRATEGIES = ["ddp", "fsdp", "zero1", "zero2", "zero3"]


@pytest.mark.slow
def test_tied_frozen_and_buffers_move_between_strategies(tmp_path: Path) -> None:
    for moved in run_ranks(2, "tests.checkpoint.models:save", strategies=STRATEGIES, root=str(tmp_path)):
        assert all(distance > 0.01 for distance in moved.values()), "statistics that do not move test nothing"
    for strategy in STRATEGIES:
        with CheckpointReader(tmp_path / strategy / "step_00000003") as checkpoint:
            names = {name for name in checkpoint.tensors() if name.startswith(("model.", "buffer."))}
        assert names == {
            "model.embed.weight", "model.frozen.weight", "model.frozen.bias", "model.norm.weight", "model.norm.bias",
            "model.back.weight", "model.back.bias", "model.scale", "buffer.norm.running_mean",
            "buffer.norm.running_var", "buffer.norm.num_batches_tracked",
        }, strategy  # fmt: skip
    for result in run_ranks(3, "tests.checkpoint.models:load", strategies=STRATEGIES, root=str(tmp_path)):
        assert len(result) == len(STRATEGIES) ** 2
        assert not {pair: names for pair, names in result.items() if names}


def test_any_optimizer_is_saved_where_each_rank_holds_whole_states(tmp_path: Path) -> None:
    momentum = {"momentum": 0.9}
    optimizers = {
        "Adam": {"amsgrad": True}, "SGD": momentum, "RMSprop": momentum, "Adagrad": {}, "NAdam": {}, "Adafactor": {},
    }  # fmt: skip
    run_ranks(2, "tests.checkpoint.models:save_with", optimizers=optimizers, strategy="ddp", root=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir() if (path / "latest").exists()} == set(optimizers)


def test_state_that_is_not_elementwise_is_refused_where_each_rank_holds_a_piece(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="optimizer state 'rows' of weight") as caught:
        run_ranks(
            1, "tests.checkpoint.models:save_with", optimizers={"ByRows": {}}, strategy="fsdp", root=str(tmp_path)
        )
    assert isinstance(caught.value.__cause__, CheckpointError)
