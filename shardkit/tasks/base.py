"""The task protocol: a model, its data and its loss."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

Batch = Any
"""A micro-batch: a tensor, or nested dicts/lists/tuples of tensors; the trainer moves it to the device."""


class Dataset(Sized, Protocol):
    """A map-style dataset: `len()` and integer indexing."""

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
    - `flops_per_token() -> float | None`: training FLOPs (forward + backward, no recompute) per target, for MFU.
    - `measure(model, batch) -> dict[str, Tensor]`: the metrics of an evaluation as sums over the targets, including
      "loss"; calls `model` once. Recorded as `val_<name>`.
    - `block_classes: tuple[type[nn.Module], ...]`: module types to shard, checkpoint and compile as one unit.
    - `attention_classes: tuple[type[nn.Module], ...]`: module types that `activation.policy=selective` recomputes.
    - `plan_batch(n: int) -> Batch`: a micro-batch of n samples with the usual shapes and any values, for planning.
      Default: the first samples of `dataset("train")`.
    - `plan_loss(model, batch) -> Tensor`: planning traces it instead of a `loss` that reads tensors' values.
    - `describe() -> dict[str, float]`: figures to print beside the validation loss (such as a baseline).
    """

    def build_model(self) -> nn.Module:
        """Build the model; with `init_parameter`, its parameters go to meta (or are sharded) as they are registered."""
        ...

    def dataset(self, split: Literal["train", "val"]) -> Dataset | None:
        """Samples of a split; `None` for `val` means no evaluation."""
        ...

    def n_targets(self, batch: Batch) -> int:
        """Target tokens (or samples) in a micro-batch, over which the step's loss is averaged. Called on CPU."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum (not mean) of the loss over the micro-batch's targets, a scalar; calls `model` once."""
        ...
