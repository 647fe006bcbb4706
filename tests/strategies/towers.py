"""Random models with towers, whose ranks have pictures and sounds in some micro-batches: `python -m
tests.strategies.towers --seeds 0:300 [--engines fsdp,zero3]`.

Each draw trains under an engine as plain torch trains the same micro-batches in one process, in losses, gradient norms
and weights, or is refused by name on every rank in the step that first differs.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.config.load import load_config
from shardkit.parallel.optim import make_optimizer
from shardkit.run.job import Job, start
from tests.strategies.graphs.campaign import judge
from tests.strategies.graphs.engines import ENGINES, WORLDS
from tests.strategies.graphs.pool import Pool

WIDTH, VOCAB, LENGTH, STEPS = 8, 16, 5, 5
Curve = list[tuple[float, float]]
Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.mix(self.norm(x)))
        return out


class Tower(nn.Module):
    """An encoder of pictures or sounds: [rows, WIDTH] to [rows, WIDTH]."""

    def __init__(self, n_blocks: int, with_norm: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(n_blocks)])
        self.norm = nn.LayerNorm(WIDTH) if with_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.norm(x)
        return out


class Language(nn.Module):
    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(n_blocks)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.norm(x)
        return out


class Inner(nn.Module):
    """Towers, their projectors and the language model; `seed` draws how they are put together."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = random.Random(f"{seed} model")
        self.kinds = draws.sample(["vision", "audio", "video"], draws.choice([1, 1, 2, 3]))
        n_language = draws.randint(2, 3)
        if draws.random() < 0.3:  # most register it after its towers
            self.language = Language(n_language)
        projects, has_mark = draws.random() < 0.7, draws.random() < 0.3
        frozen = {kind: draws.choice(["no", "no", "yes", "without gradients"]) for kind in self.kinds}
        self.without_gradients = {kind for kind in self.kinds if frozen[kind] == "without gradients"}
        for kind in self.kinds:
            setattr(self, kind, Tower(draws.randint(2, 3), draws.random() < 0.7))
            setattr(self, f"{kind}_projector", nn.Linear(WIDTH, WIDTH) if projects else nn.Identity())
        if not hasattr(self, "language"):
            self.language = Language(n_language)
        if len(self.kinds) > 1 and draws.random() < 0.3:  # one projector, or one weight, for two towers
            first, second = self.kinds[:2]
            if draws.random() < 0.5:
                setattr(self, f"{second}_projector", getattr(self, f"{first}_projector"))
            else:
                getattr(self, second).layers[0].mix.weight = getattr(self, first).layers[1].mix.weight
        for kind in self.kinds:
            if frozen[kind] != "no":
                getattr(self, kind).requires_grad_(False)
        self.mark = nn.Parameter(torch.full((WIDTH,), 0.1)) if has_mark else None
        """Added to a picture, as LLaVA-NeXT's image_newline."""
        self.towers_first = draws.random() < 0.4
        self.called_twice = draws.random() < 0.2

    def encoded(self, batch: Batch) -> torch.Tensor:
        out = torch.zeros(len(batch["tokens"]), 1, WIDTH)
        for kind in self.kinds:
            if kind not in batch:
                continue
            with torch.set_grad_enabled(torch.is_grad_enabled() and kind not in self.without_gradients):
                x = getattr(self, kind)(batch[kind])
                if self.called_twice:
                    x = getattr(self, kind)(x)
            x = getattr(self, f"{kind}_projector")(x)
            out = out + (x if self.mark is None else x * self.mark).unsqueeze(1)
        return out

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.towers_first:
            extra = self.encoded(batch)
            hidden = self.language.embed(batch["tokens"])
        else:
            hidden = self.language.embed(batch["tokens"])
            extra = self.encoded(batch)
        out: torch.Tensor = self.language(hidden + extra)
        return out


class Towers(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model, self.head = Inner(seed), nn.Linear(WIDTH, VOCAB, bias=False)
        if random.Random(f"{seed} head").random() < 0.4:
            self.head.weight = self.model.language.embed.weight

    def forward(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.model(batch))
        return logits


@dataclass(frozen=True)
class Case:
    seed: int

    def build(self) -> Towers:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Towers(self.seed)

    @property
    def settings(self) -> dict[str, Any]:
        draws = random.Random(f"{self.seed} settings")
        settings: dict[str, Any] = {
            "train.grad_accum_steps": draws.choice([1, 1, 2, 3]), "train.max_norm": draws.choice([None, 0.5]),
            "run.device": "cpu", "run.step_timeout_s": 60,
        }  # fmt: skip
        if draws.random() < 0.5:
            settings |= {"optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 0.01}
        else:
            settings |= {"optim.name": "adamw", "optim.lr": 3e-3, "optim.weight_decay": 0.1, "optim.eps": 1e-5}
        settings["optim.schedule"] = "constant"
        if draws.random() < 0.3:
            settings["activation.policy"] = "full"
        return settings

    def fsdp_settings(self) -> dict[str, Any]:
        draws = random.Random(f"{self.seed} fsdp")
        return {"parallel.reshard_after_forward": draws.random() < 0.7, "parallel.no_sync": draws.random() < 0.3}

    def batches(self, step: int, rank: int, world: int) -> list[Batch]:
        """The micro-batches of a rank. Which of them have pictures depends on the draw: often all or none at first."""
        draws = random.Random(f"{self.seed} data")
        first = draws.choice([0, 0, 1, 2, 3])  # the step in which ranks first differ
        before = draws.choice([0.0, 1.0])
        share = before if step < first else draws.choice([0.2, 0.5, 0.8])
        generator = torch.Generator().manual_seed(1000 * self.seed + 50 * step + rank)
        out = []
        for index in range(self.settings["train.grad_accum_steps"]):
            batch = {"tokens": torch.randint(0, VOCAB, (2, LENGTH), generator=generator)}
            for kind in ("vision", "audio", "video"):
                features = torch.randn(2, WIDTH, generator=generator)
                if random.Random(f"{self.seed} {step} {rank} {index} {kind}").random() < share:
                    batch[kind] = features
            out.append(batch)
        return out


def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="sum")


def n_targets(batch: Batch) -> int:
    return len(batch["tokens"]) * (LENGTH - 1)


def mark(name: str, start: int, values: torch.Tensor) -> float:
    """A number for a range of a weight: the sum over all ranges tells whether any element is another one."""
    index = torch.arange(start, start + values.numel(), dtype=torch.float64)
    weights = torch.cos(index * 0.7 + zlib.crc32(name.encode()) % 1000)
    return float((values.double().flatten() * weights).sum())


def in_one_process(case: Case, world: int) -> Curve:
    """Loss and norm of each step, and then a mark of each weight after the last one."""
    config = load_config(None, case.settings).config
    model: nn.Module = case.build()
    optimizer = make_optimizer(config.optim, model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    curve = []
    for step in range(STEPS):
        batches = [batch for rank in range(world) for batch in case.batches(step, rank, world)]
        total = 0.0
        for batch in batches:
            loss = loss_fn(model, batch) / sum(map(n_targets, batches))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        limit = config.train.max_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((total, norm.item()))
    return curve + [(mark(name, 0, param.detach()), 1.0) for name, param in sorted(model.named_parameters())]


@dataclass(frozen=True)
class Payload:
    """What the ranks of a pool run."""

    case: Case
    engine: str

    @property
    def compiles(self) -> bool:
        return "zero" in self.engine and "offload" in self.engine

    def run(self, curve: Curve) -> None:
        case, settings = self.case, self.case.settings | ENGINES[self.engine]
        if "fsdp" in self.engine or self.engine == "hsdp":
            settings |= case.fsdp_settings()
        with start(None, settings) as job:
            job.wrap(case.build)
            for step in range(STEPS):
                done = job.step(case.batches(step, job.world.rank, job.world.size), loss_fn, n_targets)
                curve.append((done.loss, done.grad_norm))
            curve += marks(job, [name for name, _ in sorted(case.build().named_parameters())])
        gc.collect()


def marks(job: Job, names: list[str]) -> Iterator[tuple[float, float]]:
    own: Counter[str] = Counter()
    for shard in job.strategy.shards():
        if shard.name.startswith("model.") and not shard.replica:
            name = shard.name.removeprefix("model.")
            own[name] += mark(name, shard.start, shard.local)  # type: ignore[assignment]
    return ((total, 1.0) for total in job.world.sum([float(own[name]) for name in names]))


def verdicts(seeds: range, engines: list[str], limit_s: float = 60.0) -> Iterator[tuple[int, str, str, str]]:
    """(seed, engine, outcome, words) of each draw."""
    pools: dict[int, Pool] = {}
    try:
        for seed in seeds:
            case = Case(seed)
            for engine in engines:
                world = WORLDS.get(engine, 2)
                pool = pools.setdefault(world, Pool(world, limit_s))
                outcome, words = judge(pool.run(Payload(case, engine)), in_one_process(case, world), pool.stacks)
                yield seed, engine, outcome, words
    finally:
        for pool in pools.values():
            pool.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.strategies.towers", description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="FIRST:LAST")
    parser.add_argument("--engines", default="ddp,fsdp,hsdp,zero1,zero2,zero3")
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    counts: dict[str, Counter[str]] = {}
    began = time.monotonic()
    for seed, engine, outcome, words in verdicts(
        range(int(first), int(last or int(first) + 1)), args.engines.split(",")
    ):
        counts.setdefault(engine, Counter())[outcome] += 1
        if outcome != "equal":
            print(f"{outcome:9} {seed} {engine}: {words}", flush=True)
    for engine, found in counts.items():
        print(f"{engine:8}", dict(found))
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(any(set(found) - {"equal", "refused"} for found in counts.values()))


if __name__ == "__main__":
    main()
