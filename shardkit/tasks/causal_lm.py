"""Next-token prediction with the reference transformer on a corpus."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import nn

from ..config.schema import RunConfig
from ..data.corpus import Corpus
from ..data.windows import IGNORE_INDEX, Windows, open_covered, plan_windows, windows
from ..models.flops import transformer_flops_per_token
from ..models.transformer import Block, Transformer, init_parameter


class CausalLM:
    """The built-in task `causal_lm`: windows of `train.seq_len` tokens, cross-entropy of each next token.

    Data is opened on first use: a task can be made for its model alone.

    Raises (from `dataset` and `describe`):
        ConfigError: the data holds a token that `model.vocab_size` does not cover.
        DataError: see `open_corpus` and `Windows`.
    """

    block_classes: tuple[type[nn.Module], ...] = (Block,)

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @cached_property
    def corpus(self) -> Corpus:
        return open_covered(self.config, self.config.model.vocab_size, "model.vocab_size")

    def build_model(self) -> Transformer:
        return Transformer(self.config.model)

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        init_parameter(self.config.model, fqn, full, generator)

    def dataset(self, split: Literal["train", "val"]) -> Windows:
        return windows(self.corpus, split, self.config.train.seq_len)

    def n_targets(self, batch: dict[str, torch.Tensor]) -> int:
        return int((batch["targets"] != IGNORE_INDEX).sum())

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # The wrapped model's forward computes the loss: a head called from here would bypass the engine's hooks.
        total: torch.Tensor = model(batch["tokens"], batch["targets"], IGNORE_INDEX)
        return total

    def plan_batch(self, n: int) -> dict[str, torch.Tensor]:
        return plan_windows(n, self.config.train.seq_len)

    def flops_per_token(self) -> float:
        return transformer_flops_per_token(self.config.model, self.config.train.seq_len)

    def describe(self) -> dict[str, float]:
        """The baseline a model must beat: validation cross-entropy of the training unigrams, nats per token."""
        return {"unigram_cross_entropy": self.corpus.unigram_cross_entropy()}
