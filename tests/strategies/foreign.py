"""Models that nobody tuned shardkit for, one small training job for each, and what its ranks report."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.errors import ConfigError
from shardkit.run.job import start
from tests.strategies.cases import PARTITION_ALL

WIDTH, VOCAB, LENGTH, ROWS = 16, 40, 8, 4


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class ExpertLayer(nn.Module):
    """One expert a sample, chosen by the data: by the first token modulo their number."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([Expert() for _ in range(experts)])

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for index in (choice % len(self.experts)).unique().tolist():  # others are not even called
            rows = choice % len(self.experts) == index
            out[rows] = x[rows] + self.experts[index](self.norm(x[rows]))
        return out


class Experts(nn.Module):
    """Next-token prediction by layers with a list of experts each."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([ExpertLayer() for _ in range(layers)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, tokens[:, 0])
        logits: torch.Tensor = self.head(x)
        return logits


class TopExperts(nn.Module):
    """The same, but the experts are the model's only list: what `find_blocks` takes for its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixture = ExpertLayer()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.mixture(self.embed(tokens), tokens[:, 0]))
        return logits


class Plain(nn.Module):
    """Every rank calls every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([Expert() for _ in range(4)])

    def depth(self, tokens: torch.Tensor) -> int:
        return len(self.blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: self.depth(tokens)]:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Leaver(Plain):
    """Ranks leave the model at different depths: the number of blocks follows the data."""

    def depth(self, tokens: torch.Tensor) -> int:
        return 2 + int(tokens[0, 0]) % 3


class Late(Plain):
    """As `Leaver`, but only where the first token is above 30."""

    def depth(self, tokens: torch.Tensor) -> int:
        return 3 if int(tokens[0, 0]) > 30 else 4


def tokens(step: int, rows: int) -> torch.Tensor:
    """Token rows of a step's global batch; the first tokens differ from row to row, so that experts do too."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 30, (rows, LENGTH), generator=generator)
    found[:, 0] = torch.arange(rows)
    return found


def next_token(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")


def settings(strategy: str, **extra: Any) -> dict[str, Any]:
    found = {"parallel.strategy": strategy, "run.device": "cpu", "optim.lr": 1e-2, "optim.weight_decay": 0.1} | extra
    if strategy == "zero3":
        found["parallel.ds_config"] = PARTITION_ALL
    return found


def train(
    build: Callable[[], nn.Module],
    strategy: str,
    batches: Callable[[int, int], Any] = tokens,
    loss: Callable[[Any, Any], torch.Tensor] = next_token,
    block_classes: tuple[type[nn.Module], ...] = (),
    init: Any = None,
    steps: int = 4,
    **extra: Any,
) -> list[float] | str:
    """Losses of each step over the same global batches, or the words of the refusal."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    try:
        with start(None, settings(strategy, **extra)) as job:
            job.wrap(build, block_classes=block_classes, init_parameter=init)
            found = []
            for step in range(steps):
                whole = batches(step, ROWS)
                mine = _rows(whole, rank, world)
                found.append(job.step([mine], loss, lambda batch: _first(batch).numel()).loss)
            return found
    except ConfigError as error:
        return str(error)
    finally:
        gc.collect()


def _rows(batch: Any, rank: int, world: int) -> Any:
    if isinstance(batch, dict):
        return {key: value.chunk(world)[rank] for key, value in batch.items()}
    return batch.chunk(world)[rank]


def _first(batch: Any) -> torch.Tensor:
    found: torch.Tensor = next(iter(batch.values())) if isinstance(batch, dict) else batch
    return found


def by_expert(strategies: list[str]) -> dict[str, Any]:
    """ "<strategy> <case>" → losses or refusal, of models whose ranks use different parts."""
    out: dict[str, Any] = {}
    for name in strategies:
        out[f"{name} nested"], out[f"{name} top"] = train(Experts, name), train(TopExperts, name)
        if name == "single":
            out["single leaver"] = train(Leaver, name)
            continue
        out[f"{name} leaver"] = train(Leaver, name)
        if name == "ddp":
            for case, model in (("nested", Experts), ("top", TopExperts), ("leaver", Leaver)):
                out[f"ddp+unused {case}"] = train(model, name, **{"parallel.find_unused": True})
        if name == "fsdp":
            out["fsdp+class top"] = train(TopExperts, name, block_classes=(ExpertLayer,))
            out["fsdp late"] = train(Late, name, batches=late, steps=5)
    return out


def late(step: int, rows: int) -> torch.Tensor:
    """Only the fourth step's tokens let one rank leave `Late` early."""
    found = tokens(step, rows)
    if step == 3:
        found[0, 0] = 35
    return found


class Scaled(nn.Module):
    """A 0-d parameter in the model, another in a block, a frozen third."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([ScaledBlock() for _ in range(2)])
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.logit_scale.shape == () and self.blocks[0].gate.shape == (), "the model's own code sees a number"
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x) * self.logit_scale.exp() + self.offset
        return logits


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = Expert(), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.inner(x)


def draw(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    """Weights of `Scaled`; a 0-d parameter has to arrive as one."""
    if fqn.rpartition(".")[2] in ("logit_scale", "gate", "offset"):
        assert full.shape == ()
        full.fill_(0.3)
    else:
        full.normal_(std=0.1, generator=generator)


def scalars(root: str, strategies: list[str]) -> dict[str, Any]:
    """Losses with 0-d parameters, drawn or built; and those of step 3 of each strategy from every one's checkpoint."""
    import torch.distributed as dist

    from shardkit.checkpoint.format.manifest import RunState
    from shardkit.checkpoint.save import Checkpointer

    rank, world = dist.get_rank(), dist.get_world_size()
    out: dict[str, Any] = {}

    def steps(name: str, init: Any, source: str | None, target: str | None, numbers: range) -> list[float]:
        with start(None, settings(name)) as job:
            job.wrap(Scaled, init_parameter=init)
            checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, source or target, timeout_s=60)
            if source is not None:
                assert checkpoints.resume(source) is not None
            found = [job.step([_rows(tokens(i, ROWS), rank, world)], next_token, torch.numel).loss for i in numbers]
            if target is not None:
                checkpoints.save(RunState(step=2, seed=0))
            checkpoints.close()
        gc.collect()
        return found

    for name in strategies:
        out[f"{name} built"] = train(Scaled, name)
        out[f"{name} drawn"] = steps(name, draw, None, f"{root}/{name}", range(2))
    for name in strategies:
        for saver in strategies:
            out[f"{saver} to {name}"] = steps(name, draw, f"{root}/{saver}", None, range(2, 3))
    return out


class Mixed(Plain):
    """Multiplies by an fp32 tensor that its forward makes itself, as window attention with a computed mask does."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        mean = torch.full((LENGTH, LENGTH), 1 / LENGTH, device=tokens.device).tril()
        logits: torch.Tensor = self.head(mean @ x)
        return logits


def mixed(strategies: list[str]) -> dict[str, Any]:
    """bf16 losses of `Mixed`, and with precision.autocast."""
    out: dict[str, Any] = {}
    for name in strategies:
        out[name] = train(Mixed, name, **{"precision.mode": "bf16"})
        if name not in ("single", "ddp"):
            out[f"{name}+autocast"] = train(Mixed, name, **{"precision.mode": "bf16", "precision.autocast": True})
    return out


class Preprocessed(Plain):
    """Has what its loss asks for beside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = 1

    def prepare(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.roll(self.shift, 1)


def normal(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    full.normal_(std=0.1, generator=generator)


def attributes(strategies: list[str]) -> dict[str, Any]:
    """Losses of a task that uses attributes of its model; the refusal of one that goes round the model's call."""

    def prepared(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return next_token(model, model.prepare(batch))

    def round_it(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return next_token(lambda tokens: model.head(model.embed(tokens)), batch)

    out: dict[str, Any] = {}
    for name in strategies:
        out[name] = train(Preprocessed, name, loss=prepared, init=normal)
        if name != "single":
            out[f"{name} round"] = train(Plain, name, loss=round_it)
    return out


class Lazy(Plain):
    """Imports what changes torch's own functions only when it is built."""

    def __init__(self) -> None:
        importlib.import_module("torch._dynamo")
        super().__init__()


def lazy() -> list[float] | str:
    assert "torch._dynamo" not in sys.modules, "nothing is lazy in this process"
    return train(Lazy, "zero3", init=normal, steps=1)
