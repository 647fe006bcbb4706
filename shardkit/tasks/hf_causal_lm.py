"""Next-token prediction with any causal language model of transformers."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import nn

from ..config.schema import RunConfig
from ..data.corpus import Corpus
from ..data.windows import IGNORE_INDEX, Windows, open_covered, plan_windows, windows
from ..errors import ConfigError
from ..models.cross_entropy import attach_loss, check_loss_fits
from ..models.flops import hf_flops_per_token
from ..models.hf import HFModel

NO_CHUNKS = "set model.loss_chunk_size=0: whole logits, through the model's own forward"


class HFCausalLM:
    """The built-in task `hf_causal_lm`: windows of `train.seq_len` tokens, cross-entropy of each next token.

    Raises:
        ConfigError: see `HFModel` and `check_loss_fits`; `train.seq_len` is longer than the model's positions; the
            model adds a loss of its own; (from `dataset`) the data holds a token outside the vocabulary.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.hf = HFModel(config.model, "hf_causal_lm")
        refuse_long_sequences(config, self.hf)
        if getattr(self.hf.config, "output_router_logits", False):
            raise ConfigError(
                "model.hf.output_router_logits=true asks for a load-balancing loss, which this task does not add",
                "remove it, or write a task of your own",
            )
        if config.model.loss_chunk_size:
            check_loss_fits(self.hf.reference, NO_CHUNKS)
        self.block_classes = self.hf.block_classes

    @cached_property
    def corpus(self) -> Corpus:
        return open_covered(self.config, self.hf.config.vocab_size, "model.hf.vocab_size")

    def build_model(self) -> nn.Module:
        return attach_loss(self.hf.build(), self.config.model.loss_chunk_size)

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        self.hf.init_parameter(fqn, full, generator)

    def dataset(self, split: Literal["train", "val"]) -> Windows:
        return windows(self.corpus, split, self.config.train.seq_len)

    def n_targets(self, batch: dict[str, torch.Tensor]) -> int:
        return int((batch["targets"] != IGNORE_INDEX).sum())

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = model(batch["tokens"], batch["targets"])
        return total

    def plan_batch(self, n: int) -> dict[str, torch.Tensor]:
        return plan_windows(n, self.config.train.seq_len)

    def flops_per_token(self) -> float | None:
        return hf_flops_per_token(self.hf.reference, self.config.train.seq_len)

    def describe(self) -> dict[str, float]:
        """The baseline a model must beat: validation cross-entropy of the training unigrams, nats per token."""
        return {"unigram_cross_entropy": self.corpus.unigram_cross_entropy()}


def refuse_long_sequences(config: RunConfig, hf: HFModel) -> None:
    """Refuse `train.seq_len` beyond the positions that the model's config names."""
    longest = hf.longest_sequence()
    if longest is not None and config.train.seq_len > longest:
        raise ConfigError(
            f"train.seq_len={config.train.seq_len} is longer than the model's {longest} positions",
            f"set train.seq_len={longest}, or more positions in model.hf: max_position_embeddings (gpt2: n_positions)",
        )
