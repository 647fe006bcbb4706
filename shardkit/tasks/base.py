"""What a task is: a model, its data, its loss."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

Batch = Any
"""A micro-batch: a tensor, or nested dicts/lists/tuples of tensors; moved to the device by the trainer."""


class Dataset(Sized, Protocol):
    """Map-style: `len()` and integer indexing."""

    def __getitem__(self, index: int) -> Any: ...


@runtime_checkable
class Task(Protocol):
    """What is trained. A factory named by `task.factory` is called as `Factory(config, **task.args)`.

    Optional members, looked up by name:

    - `init_parameter(fqn: str, full: Tensor, generator: torch.Generator) -> None` fills one whole parameter (fp32, on
      CPU) in place. With it the model is built on the meta device and each rank keeps only what it owns; without it
      every rank builds the whole model with the run's seed, then the strategy keeps its part.
    - `collate(samples: list) -> Batch`; default `torch.utils.data.default_collate`.
    - `flops_per_token() -> float | None`: training FLOPs (forward + backward, no recompute) per target, for MFU.
    - `measure(model, batch) -> dict[str, Tensor]`: what an evaluation reports, as sums over the targets, "loss" among
      them; calls `model` once. Recorded as `val_<name>`.
    - `block_classes: tuple[type[nn.Module], ...]`: what to shard, checkpoint and compile as one unit.
    - `attention_classes: tuple[type[nn.Module], ...]`: what `activation.policy=selective` recomputes in each block.
    - `plan_batch(n: int) -> Batch`: a micro-batch of n samples of the usual shapes, values of no account; what planning
      uses instead of the data. Default: the first samples of `dataset("train")`.
    - `plan_loss(model, batch) -> Tensor`: what planning traces instead of `loss`, where `loss` needs values.
    - `describe() -> dict[str, float]`: figures to print beside the validation loss (a baseline, say).
    """

    def build_model(self) -> nn.Module:
        """The model, built under whatever default device is active (`meta` when `init_parameter` exists)."""
        ...

    def dataset(self, split: Literal["train", "val"]) -> Dataset | None:
        """Samples of a split; `None` for `val` means no evaluation."""
        ...

    def n_targets(self, batch: Batch) -> int:
        """Target tokens (or samples) in a micro-batch: what the step's loss is averaged over. Called on CPU."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum (not mean) of the loss over the micro-batch's targets, a scalar; calls `model` once."""
        ...
