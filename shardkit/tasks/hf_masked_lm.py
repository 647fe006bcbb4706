"""Masked-token prediction with BERT or another masked language model of transformers."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import nn

from ..config.schema import RunConfig
from ..data.corpus import Corpus
from ..data.windows import MaskedWindows, flatten_targets, open_covered, windows
from ..errors import ConfigError
from ..models.cross_entropy import attach_loss, check_loss_fits
from ..models.hf import HFModel
from .hf_causal_lm import refuse_long_sequences


class HFMaskedLM:
    """The built-in task `hf_masked_lm`: windows of `train.seq_len` tokens, cross-entropy of the hidden ones.

    Which tokens are hidden depends on (train.seed, sample index) alone: not on rank, world size, worker or epoch.

    Raises:
        ConfigError: see `HFModel` and `check_loss_fits`; `train.seq_len` is longer than the model's positions; (from
            `dataset`) the data holds a token outside the vocabulary, or the mask token itself.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.hf = HFModel(config.model, "hf_masked_lm")
        refuse_long_sequences(config, self.hf)
        fix = "use another model type: this task computes logits only at the masked positions, which this one cannot do"
        check_loss_fits(self.hf.reference, fix)
        vocab_size, given = self.hf.config.vocab_size, config.data.mask_token
        self.mask_token = vocab_size - 1 if given is None else given
        if self.mask_token >= vocab_size:
            raise ConfigError(
                f"data.mask_token={given}, but the model's vocabulary has {vocab_size} tokens",
                f"set data.mask_token below {vocab_size}, or model.hf.vocab_size={self.mask_token + 1}",
            )
        self.block_classes = self.hf.block_classes
        self.collate = flatten_targets

    @cached_property
    def corpus(self) -> Corpus:
        reserved = 1 if self.config.data.mask_token is None else 0
        corpus = open_covered(self.config, self.hf.config.vocab_size, "model.hf.vocab_size", reserved)
        if corpus.occurs(self.mask_token):
            raise ConfigError(
                f"data.mask_token={self.mask_token} occurs in {corpus.source}",
                "name a token that stands for nothing else, or raise model.hf.vocab_size by one and leave it unset",
            )
        return corpus

    def build_model(self) -> nn.Module:
        return attach_loss(self.hf.build(), self.config.model.loss_chunk_size)

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        self.hf.init_parameter(fqn, full, generator)

    def dataset(self, split: Literal["train", "val"]) -> MaskedWindows:
        train, data = self.config.train, self.config.data
        plain = windows(self.corpus, split, train.seq_len)
        n_tokens = self.corpus.max_token + 1
        return MaskedWindows(plain, train.seed, split, data.mask_fraction, self.mask_token, n_tokens)

    def n_targets(self, batch: dict[str, torch.Tensor]) -> int:
        return len(batch["targets"])

    def plan_batch(self, n: int) -> dict[str, torch.Tensor]:
        seq_len = self.config.train.seq_len
        hidden = torch.zeros(round(n * seq_len * self.config.data.mask_fraction), dtype=torch.int64)
        tokens = torch.zeros(n, seq_len, dtype=torch.int64)
        return {"tokens": tokens, "positions": hidden, "targets": hidden.clone()}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = model(batch["tokens"], batch["targets"], batch["positions"])
        return total

    def describe(self) -> dict[str, float]:
        """The baseline a model must beat: validation cross-entropy of the training unigrams, nats per token."""
        return {"unigram_cross_entropy": self.corpus.unigram_cross_entropy()}
