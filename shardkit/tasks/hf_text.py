"""Next tokens and masked tokens, predicted with any such language model of transformers."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from ..config.schema import RunConfig
from ..data.text_data import TextData
from ..data.tokenizer import embedding_rows, load_tokenizer, tokenizer_path
from ..data.windows import IGNORE_INDEX, MaskedWindows, documents_of, flatten_targets
from ..errors import ConfigError
from ..models.balance import check_balance
from ..models.cross_entropy import attach_loss, check_loss_fits, run_head
from ..models.hf import HFModel, hf_flops_per_token, import_transformers
from ..models.lora import AdaptedModel, hf_model
from ..models.packed_attention import check_heads, may_split, refuse_what_crosses_documents, register
from .causal_lm import NextTokens

NO_CHUNKS = "set model.loss_chunk_size=0: whole logits, through the model's own forward"


class HFCausalLM(NextTokens):
    """The built-in task `hf_causal_lm`: windows of `train.seq_len` tokens or packed documents, cross-entropy of each
    next token.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.splits = config.parallel.cp > 1
        packs = config.data.packing != "none" or self.splits
        if packs:
            import_transformers("hf_causal_lm")
        attention = register() if packs else None
        self.hf = hf_model(config, "hf_causal_lm", attention, embedding_rows(config))
        self.adapter, self.resized = self.hf if isinstance(self.hf, AdaptedModel) else None, self.hf.resized
        if packs:
            refuse_what_crosses_documents(self.hf.reference)
        if self.splits:
            heads = self.hf.config.get_text_config().num_attention_heads
            check_heads(heads, config.parallel.cp, config.parallel.tp)
        if config.parallel.tp > 1:
            from ..parallel.tensor import VOCABULARY, check_plan  # DTensor's class takes 0.4 s to import

            # As `attach_loss` makes the head: its rows need not divide.
            setattr(self.hf.reference.get_output_embeddings(), VOCABULARY, True)  # type: ignore[operator]
            check_plan(self.hf.reference, config.parallel)
        check_ep(config, self.hf.reference)
        refuse_long_sequences(config, self.hf)
        super().__init__(TextData(config, self.hf.config.vocab_size, "model.hf.vocab_size"))
        if getattr(self.hf.config, "output_router_logits", False):
            self._balance_routers()
        if config.model.loss_chunk_size:
            check_loss_fits(self.hf.reference, NO_CHUNKS)
        self.block_classes = self.hf.block_classes

    def _balance_routers(self) -> None:
        """Let batches say which tokens are padding, which a load-balancing loss leaves out."""
        if self.config.compile.enabled:
            raise ConfigError(
                "compile.enabled=true with model.hf.output_router_logits=true: transformers does not collect the "
                "routers' logits in compiled blocks",
                "set compile.enabled=false, or model.hf.output_router_logits=false",
            )
        width = self.hf.config.hidden_size
        check_balance(
            self.hf.reference, lambda logits: run_head(self.hf.reference, width, router_logits=logits).aux_loss
        )
        self.collate = self._with_padding
        self.filler = _all_padding

    def _with_padding(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.data.collate(samples)
        real = torch.zeros_like(batch["tokens"], dtype=torch.bool)
        if len(real) != len(samples):  # all in one row
            real.fill_(True)
        for row, sample in zip(real, samples, strict=False):
            # Windows come padded, and each of their tokens has a target; other samples are padded by `collate`.
            n = int((sample["targets"] != IGNORE_INDEX).sum()) if self.data.has_windows else len(sample["tokens"])
            row[:n] = True
        return {**batch, "real": real}

    def build_model(self) -> nn.Module:
        model = attach_loss(self.hf.build(), self.config.model.loss_chunk_size)
        return may_split(model) if self.splits else model

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        self.hf.init_parameter(fqn, full, generator)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        padding = {"real": batch["real"]} if "real" in batch else {}
        total: torch.Tensor = model(batch["tokens"], batch["targets"], **documents_of(batch), **padding)
        return total

    def next_logits(self, model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] at `positions` [n] of the flattened `tokens` [batch, seq]."""
        logits: torch.Tensor = model(tokens, None, positions)
        return logits

    def flops_per_token(self) -> float | None:
        trained = None if self.adapter is None else self.adapter.trained
        return hf_flops_per_token(self.hf.reference, self.data.context, trained)


def _all_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A filler's tokens must not count in the loss over all ranks' tokens."""
    return {**batch, "real": torch.zeros_like(batch["real"])}


def check_ep(config: RunConfig, reference: nn.Module) -> None:
    """Refuse `parallel.ep` for a model whose experts it cannot divide."""
    if config.parallel.ep > 1:
        from ..parallel.experts import check_experts  # DTensor takes 0.4 s to import

        check_experts(reference, config.parallel.ep)


def refuse_long_sequences(config: RunConfig, hf: HFModel) -> None:
    """Refuse `train.seq_len` beyond the positions that the model's config names."""
    longest = getattr(hf.config, "max_position_embeddings", None)
    if longest and config.train.seq_len > longest:
        raise ConfigError(
            f"train.seq_len={config.train.seq_len} is longer than the model's {longest} positions",
            f"set train.seq_len={longest}, or more positions in model.hf: max_position_embeddings (gpt2: n_positions)",
        )


class HFMaskedLM:
    """The built-in task `hf_masked_lm`: windows of `train.seq_len` tokens, cross-entropy of the hidden ones.

    Which tokens are hidden depends on (train.seed, sample index) alone: not on rank, world size, worker or epoch.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.hf = hf_model(config, "hf_masked_lm", rows=embedding_rows(config))
        self.adapter, self.resized = self.hf if isinstance(self.hf, AdaptedModel) else None, self.hf.resized
        check_ep(config, self.hf.reference)
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
