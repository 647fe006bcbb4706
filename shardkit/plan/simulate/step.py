"""Take the real training step for a trace: the config's model, wrapping, checkpointing and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import default_collate

from ...config.load import resolve_batch
from ...config.schema import RunConfig
from ...errors import ConfigError
from ...memory.phases import Phases
from ...memory.tracing.traced_step import Tracing
from ...parallel.blocks import find_blocks, n_values, packable_values
from ...parallel.optim import make_optimizer
from ...parallel.weights import Weights
from ...parallel.world import World
from ...strategies import Strategy, make_strategy
from ...strategies.base import StepRequest
from ...strategies.build import parallelize
from ...strategies.step import map_tensors, to_device, train_step
from ...tasks.base import Batch, Task
from ...tasks.load import Prompts
from .engines import planned_engine


@contextmanager
def wrapped(config: RunConfig, world: World, task: Task, weights: Weights) -> Iterator[Strategy]:
    """The task's model, wrapped as a run does it, on fake tensors."""
    blocks = getattr(task, "block_classes", ())
    strategy = make_strategy(config, world, planned_engine)
    try:
        parallelize(
            config, world.device, strategy, task.build_model,
            lambda model: make_optimizer(config.optim, model, blocks),
            weights, blocks, getattr(task, "attention_classes", ()),
        )  # fmt: skip
        yield strategy
    finally:
        strategy.teardown()


def take_step(
    config: RunConfig, world: World, task: Task, batch: Batch, n_targets: float, strategy: Strategy, phases: Phases
) -> None:
    """Take one optimizer step as in training; each micro-batch is `batch`, which has `n_targets` targets."""
    accum = resolve_batch(config, world.size)
    train_step(
        strategy, phases, [(batch, False)] * accum, getattr(task, "plan_loss", task.loss),
        n_targets * accum * world.size, world.size, world.device, StepRequest(config.train.max_norm),
    )  # fmt: skip


def take_evaluation(
    config: RunConfig, world: World, task: Task, batch: Batch, prompts: Prompts | None, strategy: Strategy,
    tracing: Tracing,
) -> None:  # fmt: skip
    """Take a micro-batch of an evaluation, and a token of each sample, as a run does."""
    model, device = strategy.model, world.device
    model.eval()
    with torch.no_grad(), strategy.evaluating():
        with tracing.phase("evaluate"):
            getattr(task, "plan_loss", task.loss)(model, to_device(batch, device))
        if prompts is not None:
            rows, width = prompts.batch(config.train, world.size)
            # A run keeps no keys and values of earlier tokens: each is a forward over prompt and answer, of one shape.
            with tracing.phase("sample"):
                tokens = torch.zeros(rows, width, dtype=torch.long)
                last_positions = torch.zeros(rows, dtype=torch.long, device=device)
                task.next_logits(model, tokens.to(device), last_positions).float().cpu()  # type: ignore[attr-defined]
    model.train()


def count_model(strategy: Strategy, task: Task) -> dict[str, int]:
    """{"n_params": parameters of the wrapped model, "n_blocks": repeated blocks, "n_recurrent": LSTMs and the like,
    "n_packable", "n_packable_experts": see `packable_values`}."""
    blocks = find_blocks(strategy.model, getattr(task, "block_classes", ()))
    in_linear, in_experts = packable_values(blocks)
    recurrent = sum(isinstance(module, nn.RNNBase) for module in strategy.model.modules())
    return {
        "n_params": sum(n_values(name, param) for name, param in strategy.model.named_parameters()),
        "n_blocks": len(blocks), "n_recurrent": recurrent,
        "n_packable": in_linear, "n_packable_experts": in_experts,
    }  # fmt: skip


def sample_batch(task: Task, config: RunConfig, n_samples: int | None = None) -> Batch:
    """A batch on the CPU: the task's `plan_batch`, or the first samples of its training data."""
    size = config.train.micro_batch_size if n_samples is None else n_samples
    make = getattr(task, "plan_batch", None)
    if make is not None:
        return make(size)
    data = task.dataset("train")
    name = config.task.factory or config.task.name
    if data is not None and not hasattr(data, "__len__"):
        cause = f"dataset('train') of task {name} is a {type(data).__name__} without len()"
        raise ConfigError(cause, "return one of map style, with len() and integer indices")
    if not data:
        fix = "return samples from dataset('train'), or give the task plan_batch(n)"
        raise ConfigError(f"task {name} has no training data to plan with", fix)
    samples = [data[index % len(data)] for index in range(size)]
    return getattr(task, "collate", default_collate)(samples)


def on_fake(batch: Batch) -> Batch:
    """The batch as fake tensors on the CPU; called inside a `FakeTensorMode`."""
    return map_tensors(batch, lambda t: torch.empty(t.shape, dtype=t.dtype))
