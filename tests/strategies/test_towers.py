"""Models with towers train whichever ranks enter which tower in which step; `graphs.towers` draws them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.parallel.blocks import find_blocks, find_parts
from shardkit.run.job import start
from tests.ranks import run_ranks
from tests.strategies.foreign import Expert, Experts
from tests.strategies.graphs.campaign import Campaign
from tests.strategies.graphs.engines import ENGINES
from tests.strategies.graphs.towers import Block, Language, Tower, draw


def faults(seeds: range, engines: list[str]) -> str:
    campaign = Campaign(limit_s=60)
    campaign.run(map(draw, seeds), engines)
    return campaign.faults("equal")


@pytest.mark.timeout(600)
def test_towers_that_some_ranks_skip_train_as_in_one_process() -> None:
    # Seed 2: two towers, of which one rank skips one, so that FSDP2 would gather ahead in different orders in backward.
    assert not faults(range(2, 5), ["fsdp", "zero3"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_towers_train_as_in_one_process_under_every_engine() -> None:
    assert not faults(range(5, 25), ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"])
    # Seed 59: a weight tied between two towers is one unit of FSDP2, which two modules hold.
    assert not faults(range(59, 60), ["fsdp", "hsdp"])


def messages(towers: bool) -> list[int]:
    """On each of two ranks: the sums over ranks that each step of a model takes."""
    from shardkit.parallel.world import World

    counts, begin = [0], World.begin_sum

    def counted(world: World, values: Any) -> Any:
        counts[-1] += 1
        return begin(world, values)

    World.begin_sum = counted
    case = draw(2)
    build = case.build if towers else lambda: nn.Sequential(*(Block() for _ in range(3)), nn.Linear(8, 16))
    with start(None, ENGINES["fsdp"]) as job:
        job.wrap(build)
        for _ in range(4):
            batch = case.batches(0, job.world.rank, 2)[0] if towers else torch.randn(2, 5, 8)
            loss = case.loss if towers else lambda model, batch: model(batch).square().sum()
            job.step([batch], loss, lambda batch: 1)
            counts.append(0)
    return counts[1:-1]


def test_a_model_without_towers_sends_no_messages_in_forward_after_the_first_steps() -> None:
    assert [counts[-1] for counts in run_ranks(2, "tests.strategies.test_towers:messages", towers=False)] == [2, 2]
    with_towers = run_ranks(2, "tests.strategies.test_towers:messages", towers=True)
    assert all(3 < counts[-1] <= 12 for counts in with_towers), "an entry each, the end, and who used which parameter"


class Stages(nn.Module):
    """Stages of a vision model, as torchvision's ResNet has them: lists of blocks that every forward goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layer1, self.layer2 = (nn.Sequential(Block(), Block()) for _ in range(2))


class Listed(nn.Module):
    """Encoders in a dict, beside blocks of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({"vision": Tower(2, True), "audio": Tower(2, True)})
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (Language(3), []),
        (Experts(), []),
        (Stages(), []),
        (nn.Sequential(Expert(), Expert()), []),
        (Listed(), ["encoders.vision", "encoders.audio", "layers", "head"]),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
def test_only_towers_make_parts_that_ranks_compare(model: nn.Module, parts: list[str]) -> None:
    assert [*find_parts(model, find_blocks(model))] == parts


def test_the_parts_of_a_model_with_towers_are_these_and_what_stands_beside_them() -> None:
    model = next(built for seed in range(20) if len((built := draw(seed).build()).model.kinds) == 2)
    parts = find_parts(model, find_blocks(model))
    assert {"model.language", "head", *(f"model.{kind}" for kind in model.model.kinds)} <= {*parts}
    projectors = {
        f"model.{kind}_projector"
        for kind in model.model.kinds
        if isinstance(getattr(model.model, f"{kind}_projector"), nn.Linear)
    }
    assert {name for name in parts if name.endswith("projector")} <= projectors


def test_an_encoder_and_a_decoder_of_transformers_are_no_towers() -> None:
    import transformers

    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, vocab_size=32)
    model = transformers.T5ForConditionalGeneration(config)
    assert find_parts(model, find_blocks(model)) == {}
