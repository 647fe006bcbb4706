"""Next-token prediction with the reference transformer on a corpus."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..config.schema import RunConfig
from ..data.text_data import TextData
from ..data.windows import IGNORE_INDEX, documents_of, split_rows
from ..models.transformer import Block, Transformer, init_parameter, transformer_flops_per_token
from .base import Dataset


class NextTokens:
    """The data of a task that predicts next tokens, and the counts of its micro-batches."""

    perplexity = True

    def __init__(self, data: TextData) -> None:
        self.data = data
        self.collate = data.collate

    def dataset(self, split: Literal["train", "val"]) -> Dataset:
        return self.data.dataset(split)

    def val_parts(self) -> dict[str, Dataset]:
        return self.data.val_parts()

    def digests(self) -> dict[str, str]:
        return self.data.digests()

    def n_targets(self, batch: dict[str, Any]) -> int:
        return int((batch["targets"] != IGNORE_INDEX).sum())

    def n_positions(self, batch: dict[str, Any]) -> int:
        return int(batch["tokens"].numel())

    def split_sequences(self, batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        return split_rows(batch, rank, size)

    def plan_batch(self, n: int) -> dict[str, Any]:
        return self.data.plan_batch(n)

    def describe(self) -> dict[str, float]:
        return self.data.describe()


class CausalLM(NextTokens):
    """The built-in task `causal_lm`: windows of `train.seq_len` tokens or packed documents, cross-entropy of each next
    token. Data is opened on first use: a task can be made for its model alone.
    """

    block_classes: tuple[type[nn.Module], ...] = (Block,)

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        super().__init__(TextData(config, config.model.vocab_size, "model.vocab_size"))

    def build_model(self) -> Transformer:
        return Transformer(self.config.model)

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        init_parameter(self.config.model, fqn, full, generator)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        # The wrapped model's forward computes the loss: a head called from here would bypass the engine's hooks.
        total: torch.Tensor = model(batch["tokens"], batch["targets"], IGNORE_INDEX, **documents_of(batch))
        return total

    def next_logits(self, model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] at `positions` [n] of the flattened `tokens` [batch, seq]."""
        logits: torch.Tensor = model(tokens, None, IGNORE_INDEX, positions=positions)
        return logits

    def flops_per_token(self) -> float:
        return transformer_flops_per_token(self.config.model, self.data.context)
