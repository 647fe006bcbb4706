"""FSDP2 on its own: how far ahead blocks are gathered, and experts that an older torch cannot train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit.errors import ConfigError
from shardkit.models.transformer import Transformer
from shardkit.run.job import start
from shardkit.strategies import fsdp
from tests.ranks import run_ranks
from tests.strategies import cases

LAYERS = 4


def prefetched(ahead: int) -> dict[str, dict[int, list[int]]]:
    """Direction → block → the blocks that are gathered ahead of it; for `run_ranks`."""
    told: dict[str, list[tuple[Any, list[Any]]]] = {"forward": [], "backward": []}
    for direction, calls in told.items():
        note = lambda block, others, calls=calls: calls.append((block, others))  # noqa: E731
        setattr(FSDPModule, f"set_modules_to_{direction}_prefetch", note)
    with start(None, cases.overrides("fsdp", 1, "adamw_clipped", **{"parallel.prefetch": ahead})) as job:
        cases.wrap(job, cases.MODEL.model_copy(update={"n_layers": LAYERS}))
        model = job.strategy.model
        assert isinstance(model, Transformer)
        number = {id(block): index for index, block in enumerate(model.blocks)}
        return {
            direction: {number[id(block)]: [number[id(other)] for other in others] for block, others in calls}
            for direction, calls in told.items()
        }


@pytest.mark.dist
def test_so_many_blocks_are_gathered_ahead_as_is_asked_for() -> None:
    (found,) = run_ranks(1, "tests.strategies.test_fsdp:prefetched", ahead=2)
    assert found == {
        "forward": {0: [1, 2], 1: [2, 3], 2: [3], 3: []},
        "backward": {3: [2, 1], 2: [1, 0], 1: [0], 0: []},
    }


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("replicas", [False, True])
def test_ranks_begin_where_torch_cuts_the_rows(rows: int, ranks: int, replicas: bool) -> None:
    chunks = torch.arange(rows).chunk(ranks)
    for rank in range(ranks):
        sizes, places = ([2, ranks], [1, rank]) if replicas else ([ranks], [rank])
        mesh = SimpleNamespace(ndim=len(sizes), size=sizes.__getitem__, get_local_rank=places.__getitem__)
        first = fsdp._first_row(SimpleNamespace(device_mesh=mesh, shape=(rows, 3)))  # type: ignore[arg-type]
        assert first == (chunks[rank][0] if rank < len(chunks) else rows)


class Two:
    """A world of two ranks, of which so many used each parameter."""

    size = 2

    def __init__(self, used: list[float]) -> None:
        self.used = used

    def sum(self, mine: list[float]) -> list[float]:
        assert len(mine) == len(self.used)
        return self.used


@pytest.mark.parametrize("adds_unused", [True, False])
def test_a_parameter_that_some_ranks_used_needs_a_torch_that_adds_zeros_for_the_others(
    adds_unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "REDUCES_UNUSED", adds_unused)
    engine = object.__new__(fsdp.FSDP)
    engine.name, engine.model = "fsdp", nn.Linear(2, 1)

    def after(used: list[float]) -> list[bool]:
        """Whether weight and bias keep their gradients."""
        engine._used = {"weight": True, "bias": True}
        engine._world = Two(used)  # type: ignore[assignment]
        for param in engine.model.parameters():
            param.grad = torch.zeros_like(param)
        engine.forget_unused()
        assert not any(engine._used.values()), "the next step counts anew"
        return [param.grad is not None for param in engine.model.parameters()]

    assert after([2.0, 0.0]) == [True, False]
    if adds_unused:
        assert after([1.0, 0.0]) == [True, False]
        return
    with pytest.raises(ConfigError, match="1 of 2 ranks used weight in this step") as error:
        after([1.0, 0.0])
    assert "torch 2.13" in error.value.fix
