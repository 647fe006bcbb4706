"""A checkpointer around plain tensors: the format without an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.config.schema import CheckpointConfig
from shardkit.launch.ranks.env import RankEnv
from shardkit.parallel.weights import even_range
from shardkit.parallel.world import World
from shardkit.strategies.base import Shard


class Plain:
    """The checkpoint verbs of a strategy whose tensors are split evenly among ranks."""

    name = "plain"

    def __init__(self, rank: int = 0, size: int = 1, n_elements: int = 50_000) -> None:
        self.rank, self.size = rank, size
        self.wholes = {f"model.{i}": torch.zeros(n_elements + i) for i in range(3)}
        self.wholes["optim.0.exp_avg"] = torch.zeros(n_elements, dtype=torch.bfloat16)
        self.numbers: dict[str, float] = {"optim.0.step": 0}

    def fill(self, step: int) -> None:
        """Values that say which step, tensor and element they belong to."""
        for index, whole in enumerate(self.wholes.values()):
            whole.copy_(torch.arange(whole.numel()) % 251 + 1000 * index + 7 * step)
        self.numbers = {"optim.0.step": step}

    def holds(self, step: int) -> bool:
        other = Plain(self.rank, self.size, self.wholes["model.0"].numel())
        other.fill(step)
        same = all(torch.equal(whole, other.wholes[name]) for name, whole in self.wholes.items())
        return same and self.numbers == other.numbers

    def _split(self, part: int, parts: int) -> Iterator[Shard]:
        for name, whole in self.wholes.items():
            start, end = even_range(whole.numel(), part, parts)
            yield Shard(name, tuple(whole.shape), start, whole[start:end])

    def shards(self) -> Iterator[Shard]:
        return self._split(self.rank, self.size)

    def load_targets(self) -> Iterator[Shard]:
        return self._split(0, 1)

    def create_optimizer_state(self, stateless: Collection[str] = ()) -> None:
        pass

    def scalars(self) -> dict[str, float]:
        return self.numbers

    def after_load(self, scalars: Mapping[str, float]) -> None:
        self.numbers = dict(scalars)


def world() -> World:
    """The existing process group as a World."""
    rank, size = dist.get_rank(), dist.get_world_size()
    env = RankEnv(rank, size, rank, size, 0, 1, "group", None, None, 0)
    group = dist.group.WORLD
    return World(env, torch.device("cpu"), group, group)


def checkpointer(root: str | Path, strategy: Plain, **config: Any) -> Checkpointer:
    options = {key: config.pop(key) for key in ("meeting_s", "on_done") if key in config}
    settings = CheckpointConfig(**{"keep_last": None, **config})
    return Checkpointer(strategy, world(), settings, root, timeout_s=60, chunk_bytes=40_000, **options)


def save_steps(root: str, steps: list[int], **config: Any) -> None:
    """Save each step's values; for `run_ranks` or an existing group."""
    strategy = Plain(dist.get_rank(), dist.get_world_size())
    checkpoints = checkpointer(root, strategy, **config)
    for step in steps:
        strategy.fill(step)
        checkpoints.save(RunState(step=step, tokens_total=10 * step, val_loss=abs(step - 3.0)))
    checkpoints.close()
