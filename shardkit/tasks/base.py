"""The task protocol: a model, its data and its loss."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

Batch = Any
"""A micro-batch: a tensor, or a nest of mappings, lists, tuples and dataclasses; see `shardkit.strategies.step`."""


class Dataset(Sized, Protocol):
    """A map-style dataset: `len()` and integer indexing.

    With a method `order(seed: int, shuffle: bool)` it has an order of its own, a `shardkit.data.loader.Order`, and an
    epoch has that order's `n` samples.
    """

    def __getitem__(self, index: int) -> Any: ...


@runtime_checkable
class Task(Protocol):
    """A training task. A factory named by `task.factory` is called as `Factory(config, **task.args)`.

    Optional members, looked up by name:

    - `init_parameter(fqn: str, full: Tensor, generator: torch.Generator) -> None` fills one whole parameter (fp32, on
      CPU) in place. With it the parameters are built on the meta device. A parameter of more than 2^18 values is drawn
      in chunks by the calls that `init_parameter` makes (docs/tasks.md, "Initial values"), and each rank draws only its
      shards. Without it the constructor runs on every rank with the run's seed; under fsdp and hsdp large parameters
      stay on meta there too.
    - `collate(samples: list) -> Batch`; default `torch.utils.data.default_collate`.
    - `filler(batch) -> Batch`: the micro-batch of a rank that has no samples left, made of another one, whose loss will
      weigh nothing; for a loss that looks at the rows of all ranks. Default: the other one.
    - `n_positions(batch) -> int`: positions that the model computes for a micro-batch, padding and tokens without a
      target included; called on CPU. Recorded beside the targets.
    - `flops_per_token() -> float | None`: training FLOPs (forward + backward, no recompute) per target, for MFU.
    - `measure(model, batch) -> dict[str, Tensor]`: the metrics of an evaluation as sums over the targets, including
      "loss"; calls `model` once. Recorded as `val_<name>`.
    - `val_parts() -> dict[str, Dataset]`: the validation data in parts, such as the sources of a mix; each also gets
      figures of its own. Empty = one part, `dataset("val")`.
    - `perplexity: bool`: true if the loss is a cross-entropy in nats; evaluations then show exp(loss) too.
    - `next_logits(model, tokens, positions) -> Tensor`: logits [n, vocab] at `positions` [n] of the flattened `tokens`
      [batch, seq], for `train.sample_prompts`; calls `model` once.
    - `block_classes: tuple[type[nn.Module], ...]`: module types to shard, checkpoint and compile as one unit.
    - `attention_classes: tuple[type[nn.Module], ...]`: module types that `activation.policy=selective` recomputes.
    - `digests() -> dict[str, str]`: digests of the data and whatever else a resume must find unchanged, by name;
      checkpoints hold them, and a resume with another one is refused.
    - `plan_batch(n: int) -> Batch`: a micro-batch of n samples with the usual shapes and any values, for planning.
      Default: the first samples of `dataset("train")`.
    - `plan_loss(model, batch) -> Tensor`: planning traces it instead of a `loss` that reads tensors' values.
    - `adapter`: an adapter over a frozen model, of which checkpoints hold the adapter alone; an `AdaptedModel`, or
      `None`.
    - `resized: Collection[str]`: names of parameters that may have fewer rows in the files of `model.init_from`; their
      new rows become the mean of those.
    - `describe() -> dict[str, float]`: figures to print beside the validation loss (such as a baseline).
    """

    def build_model(self) -> nn.Module:
        """Build the model; with `init_parameter`, its parameters go to meta (or are sharded) as they are registered."""

    def dataset(self, split: Literal["train", "val"]) -> Dataset | None:
        """Samples of a split; `None` for `val` means no evaluation."""

    def n_targets(self, batch: Batch) -> int:
        """Target tokens (or samples) in a micro-batch, over which the step's loss is averaged. Called on CPU."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum (not mean) of the loss over the micro-batch's targets, a scalar; calls `model` once."""
