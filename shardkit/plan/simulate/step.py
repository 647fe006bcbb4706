"""The real step, traced: the config's own model, wrap, checkpointing and optimizer, run on fake or real tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from ...config.load import resolve_batch
from ...config.schema import RunConfig
from ...errors import ConfigError
from ...memory.rows import PhaseName
from ...memory.state import HasState
from ...parallel.blocks import find_blocks
from ...parallel.optim import make_optimizer
from ...parallel.weights import Weights
from ...parallel.world import World
from ...strategies import Strategy, make_strategy, parallelize
from ...strategies.step import train_step
from ...tasks.base import Batch, Task


class Observer(Protocol):
    """Is told what a traced run does."""

    def phase(self, name: PhaseName) -> AbstractContextManager[None]: ...

    def sample_state(self, source: HasState) -> None: ...

    def wrapped(self, strategy: Strategy) -> None: ...

    def stepped(self, strategy: Strategy) -> None: ...


def run_steps(
    config: RunConfig,
    world: World,
    task: Task,
    batch: Batch,
    n_targets: float,
    weights: Weights,
    observer: Observer,
    steps: int = 2,
) -> dict[str, int]:
    """Wrap the task's model and take `steps` optimizer steps over `batch`, as training would.

    Args:
        n_targets: targets in `batch`.

    Returns:
        {"n_params": parameters of the model, "n_blocks": its repeated blocks}.
    """
    strategy = make_strategy(config, world)
    accum = resolve_batch(config, world.size)
    block_classes = getattr(task, "block_classes", ())
    try:
        parallelize(
            config, world.device, strategy, task.build_model, lambda model: make_optimizer(config.optim, model),
            weights, block_classes, getattr(task, "attention_classes", ()),
        )  # fmt: skip
        observer.wrapped(strategy)
        numel = [int(getattr(p, "ds_numel", p.numel())) for p in strategy.model.parameters()]
        counts = {"n_params": sum(numel), "n_blocks": len(find_blocks(strategy.model, block_classes))}
        for _ in range(steps):
            train_step(
                strategy, observer, [(batch, False)] * accum, getattr(task, "plan_loss", task.loss),
                n_targets * accum * world.size, world.size, world.device, config.train.max_norm,
            )  # fmt: skip
            observer.stepped(strategy)
    finally:
        strategy.teardown()
    return counts


def sample_batch(task: Task, config: RunConfig) -> Batch:
    """A micro-batch on the CPU: what the task says planning may use, or the first samples of its training data.

    Raises:
        ConfigError: the task has neither, or its data have no length.
    """
    make = getattr(task, "plan_batch", None)
    if make is not None:
        return make(config.train.micro_batch_size)
    data = task.dataset("train")
    name = config.task.factory or config.task.name
    if data is not None and not hasattr(data, "__len__"):
        raise ConfigError(
            f"dataset('train') of task {name} is a {type(data).__name__} without len()",
            "return one of map style, with len() and integer indices",
        )
    if not data:
        raise ConfigError(
            f"task {name} has no training data to plan with",
            "return samples from dataset('train'), or give the task plan_batch(n)",
        )
    samples = [data[index % len(data)] for index in range(config.train.micro_batch_size)]
    return getattr(task, "collate", default_collate)(samples)


def on_fake(batch: Batch) -> Batch:
    """The batch as fake tensors on the CPU; called inside a `FakeTensorMode`."""
    return _map(batch, lambda t: torch.empty(t.shape, dtype=t.dtype))


def _map(batch: Any, change: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map(value, change) for value in batch)
    return batch
