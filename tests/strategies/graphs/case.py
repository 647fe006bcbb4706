"""What a seed stands for: a graph, its training settings and its data; and how one process trains it in plain torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from shardkit.config.load import load_config
from shardkit.parallel.optim import make_optimizer
from shardkit.parallel.precision import autocast_forward

from . import flow, layers  # noqa: F401 - features in this order: those of sharing, which flow imports, come first
from .model import CORES, FEATURES, LENGTH, VOCAB, Block, Graph
from .proof import begin, recorder

SAVED_AT = 3
Batch = dict[str, Any]
Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Case:
    """A graph and its training. Models with towers are drawn as such a case, too.

    Attributes:
        features: their names, in the order in which they act.
        settings: keys of the run's config beside the engine's.
        prebuilt: the model is given to `Job.wrap` as a module, not as a function.
        rows: of a micro-batch, of all ranks together.
        resumes: some of the cases are saved and resumed under another engine.
    """

    seed: int
    features: tuple[str, ...]
    settings: dict[str, Any]
    prebuilt: bool
    steps: ClassVar[int] = 6
    rows: ClassVar[int] = 4
    resumes: ClassVar[bool] = True

    @property
    def accumulation(self) -> int:
        return int(self.settings["train.grad_accum_steps"])

    def build(self) -> Graph:
        draws = random.Random(f"{self.seed} graph")
        core, n_blocks = draws.choice(list(CORES)), draws.randint(2, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Graph(
                core, n_blocks, [(FEATURES[name], random.Random(f"{self.seed} {name}")) for name in self.features]
            )

    def batches(self, step: int, rank: int, world: int) -> list[Batch]:
        """Rows of tokens with targets of uneven length, and a number that chooses experts."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        batches = []
        for _ in range(self.accumulation):
            tokens = (
                torch.randint(0, VOCAB, (self.rows, 1), generator=generator) + 5 * torch.arange(LENGTH + 1)
            ) % VOCAB
            targets, lengths = tokens[:, 1:].clone(), torch.randint(1, LENGTH + 1, (self.rows, 1), generator=generator)
            targets[torch.arange(LENGTH) >= lengths] = -100
            choice = torch.randint(0, 12, (self.rows,), generator=generator)
            whole = {"tokens": tokens[:, :-1].contiguous(), "targets": targets, "choice": choice}
            batches.append({key: tensor.chunk(world)[rank] for key, tensor in whole.items()} | {"step": step})
        return batches

    def all_batches(self, step: int, world: int) -> list[Batch]:
        return self.batches(step, 0, 1)

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        out = model(batch["tokens"], batch["choice"], step=batch["step"])
        losses = F.cross_entropy(out["logits"].flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return losses + out["penalty"]

    def n_targets(self, batch: Batch) -> int:
        return int((batch["targets"] != -100).sum())

    def __str__(self) -> str:
        extra = {key: value for key, value in self.settings.items() if key.split(".")[0] in ("activation", "optim")}
        told = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in extra.items())
        return f"{self.seed}:{'+'.join(self.features)} ({told}, accumulation {self.accumulation})"


def draw(seed: int, features: tuple[str, ...] | None = None) -> Case:
    """The case of a seed; with `features` the same with these in place of its own."""
    draws = random.Random(f"{seed} features")
    if features is None:
        names, weights = list(FEATURES), [feature.weight for feature in FEATURES.values()]
        chosen: dict[str, None] = dict.fromkeys(draws.choices(names, weights)[0] for _ in range(draws.randint(2, 5)))
        shapes = [name for name in chosen if FEATURES[name].block_class is not Block]
        features = tuple(name for name in chosen if name not in shapes[1:])
    return Case(seed, features, _settings(random.Random(f"{seed} settings")), draws.random() < 0.3)


def _settings(draws: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train.grad_accum_steps": draws.choice([1, 2, 2, 3]),
        "train.max_norm": draws.choice([None, 0.5, 1.0]),
    }
    if draws.random() < 0.5:
        settings |= {"optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 0.01}
    else:  # the default eps makes noise of gradients that are zero
        settings |= {"optim.name": "adamw", "optim.lr": 3e-3, "optim.weight_decay": 0.1, "optim.eps": 1e-5}
    policy = draws.choice(["none"] * 6 + ["full", "every_k", "full", "selective_op"])
    if policy != "none":
        settings["activation.policy"] = policy
    if draws.random() < 0.2:
        settings["parallel.reshard_after_forward"] = False
    return settings


def in_one_process(case: Any, world: int = 1, ranks: Path | None = None, n_steps: int | None = None) -> Curve:
    """The curve of plain torch over what `world` ranks train; of shardkit only autocast and the optimizer's groups.

    `ranks`: the folder of their records. Each step then begins with their weights, and its update is that of their
    gradients; it is recorded beside theirs, and once more from weights moved by an ulp.
    """
    if ranks is None:
        return _train(case, world, case.steps)
    n_steps = case.steps if n_steps is None else n_steps
    curve = _train(case, world, n_steps, recorder(ranks.parent / "process", n_steps, ranks))
    _train(case, world, n_steps, recorder(ranks.parent / "process", n_steps, ranks, moved=True))
    return curve


def _train(case: Any, world: int, n_steps: int, recorder: Any = None) -> Curve:
    config = load_config(None, {**case.settings, "run.device": "cpu"}).config
    model = case.build()
    if recorder is not None:
        begin(recorder, model)
    autocast_forward(model, torch.device("cpu"), config.precision)
    optimizer = make_optimizer(config.optim, model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    curve = []
    for step in range(n_steps):
        batches = case.all_batches(step, world)
        count = sum(map(case.n_targets, batches))
        total = 0.0
        for batch in batches:
            loss = case.loss(model, batch) / count
            loss.backward()
            total += loss.item()
        if recorder is not None:
            recorder.before_step(None)
        limit = config.train.max_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        optimizer.step()
        if recorder is not None:
            recorder.record["norms"].append(norm.item())
            recorder.end_step()
        optimizer.zero_grad()
        curve.append((total, norm.item()))
    return curve
