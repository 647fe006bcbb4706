"""Masked-token prediction with BERT or another masked language model of transformers."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import nn

from ..config.schema import RunConfig
from ..data.text_data import TextData
from ..data.tokenizer import embedding_rows, load_tokenizer, tokenizer_path
from ..data.windows import MaskedWindows, flatten_targets
from ..errors import ConfigError
from ..models.cross_entropy import attach_loss, check_loss_fits
from ..models.lora import AdaptedModel, hf_model
from .hf_causal_lm import refuse_long_sequences


class HFMaskedLM:
    """The built-in task `hf_masked_lm`: windows of `train.seq_len` tokens, cross-entropy of the hidden ones.

    Which tokens are hidden depends on (train.seed, sample index) alone: not on rank, world size, worker or epoch.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.hf = hf_model(config, "hf_masked_lm", rows=embedding_rows(config))
        self.adapter, self.resized = self.hf if isinstance(self.hf, AdaptedModel) else None, self.hf.resized
        refuse_long_sequences(config, self.hf)
        fix = "use another model type: this task computes logits only at the masked positions, which this one cannot do"
        check_loss_fits(self.hf.reference, fix)
        vocab_size, configured = self.hf.config.vocab_size, config.data.mask_token
        tokenizer = tokenizer_path(config)
        tokenizer_mask = None if tokenizer is None else load_tokenizer(tokenizer).mask_token_id
        self._reserved = 1 if configured is None and tokenizer_mask is None else 0
        self.mask_token = (
            configured if configured is not None else tokenizer_mask if tokenizer_mask is not None else vocab_size - 1
        )
        if self.mask_token >= vocab_size:
            raise ConfigError(
                f"data.mask_token={self.mask_token}, but the model's vocabulary has {vocab_size} tokens",
                f"set data.mask_token below {vocab_size}, or model.hf.vocab_size={self.mask_token + 1}",
            )
        self.block_classes = self.hf.block_classes
        self.collate = flatten_targets

    @cached_property
    def data(self) -> TextData:
        data = TextData(self.config, self.hf.config.vocab_size, "model.hf.vocab_size", self._reserved)
        if data.corpus is not None and data.corpus.occurs(self.mask_token):
            raise ConfigError(
                f"data.mask_token={self.mask_token} occurs in {data.corpus.source}",
                "name a token that stands for nothing else, or raise model.hf.vocab_size by one and leave it unset",
            )
        if data.sources is not None and not data.sources.plain_text:
            raise ConfigError(
                "task.name=hf_masked_lm learns from plain text, but the data are conversations or prompts",
                "set task.name=hf_causal_lm, or data.path to text",
            )
        return data

    def build_model(self) -> nn.Module:
        return attach_loss(self.hf.build(), self.config.model.loss_chunk_size)

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        self.hf.init_parameter(fqn, full, generator)

    def dataset(self, split: Literal["train", "val"]) -> MaskedWindows:
        train, data = self.config.train, self.config.data
        plain = self.data.dataset(split)
        n_tokens = self.data.n_ids
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
        return self.data.describe()

    def digests(self) -> dict[str, str]:
        return self.data.digests()
