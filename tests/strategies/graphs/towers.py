"""Random models with towers, whose ranks have pictures and sounds in some micro-batches.

Weights are compared as well as losses and norms. A refusal comes on every rank, in the step that first differs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .case import Batch

WIDTH, VOCAB, LENGTH = 8, 16, 5


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Language(nn.Module):
    def __init__(self, n_blocks: int, embed: nn.Module | None = None, with_norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH) if embed is None else embed
        self.layers = nn.ModuleList([Block() for _ in range(n_blocks)])
        self.norm = nn.LayerNorm(WIDTH) if with_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Tower(Language):
    """An encoder of pictures or sounds: [rows, WIDTH] to [rows, WIDTH]."""

    def __init__(self, n_blocks: int, with_norm: bool) -> None:
        super().__init__(n_blocks, nn.Linear(WIDTH, WIDTH), with_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.embed(x))


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
        return self.language(hidden + extra)


class Towers(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model, self.head = Inner(seed), nn.Linear(WIDTH, VOCAB, bias=False)
        if random.Random(f"{seed} head").random() < 0.4:
            self.head.weight = self.model.language.embed.weight

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.head(self.model(batch))


@dataclass(frozen=True)
class Case:
    seed: int
    settings: dict[str, Any]
    prebuilt: ClassVar[bool] = False
    steps: ClassVar[int] = 5
    rows: ClassVar[int] = 4
    resumes: ClassVar[bool] = False

    def build(self) -> Towers:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Towers(self.seed)

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

    def all_batches(self, step: int, world: int) -> list[Batch]:
        return [batch for rank in range(world) for batch in self.batches(step, rank, world)]

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        logits = model(batch)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="sum")

    def n_targets(self, batch: Batch) -> int:
        return len(batch["tokens"]) * (LENGTH - 1)


def draw(seed: int) -> Case:
    draws, of_fsdp = random.Random(f"{seed} settings"), random.Random(f"{seed} fsdp")
    settings: dict[str, Any] = {
        "train.grad_accum_steps": draws.choice([1, 1, 2, 3]), "train.max_norm": draws.choice([None, 0.5]),
        "run.step_timeout_s": 60, "optim.schedule": "constant",
    }  # fmt: skip
    if draws.random() < 0.5:
        settings |= {"optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 0.01}
    else:
        settings |= {"optim.name": "adamw", "optim.lr": 3e-3, "optim.weight_decay": 0.1, "optim.eps": 1e-5}
    if draws.random() < 0.3:
        settings["activation.policy"] = "full"
    settings["parallel.reshard_after_forward"] = of_fsdp.random() < 0.7
    settings["parallel.no_sync"] = of_fsdp.random() < 0.3
    return Case(seed, settings)
