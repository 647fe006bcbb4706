"""What the tasks on text share: a corpus that the model's vocabulary covers, cut into windows."""

from __future__ import annotations

from typing import Literal

import torch

from ..config.schema import DataConfig
from ..data.corpus import Corpus, open_corpus
from ..data.windows import Windows
from ..errors import ConfigError


def open_covered(data: DataConfig, vocab_size: int, key: str, reserved: int = 0) -> Corpus:
    """The corpus, all of whose tokens are below `vocab_size - reserved`; `key` is what sets it.

    Raises:
        ConfigError: the data holds a larger token.
    """
    corpus = open_corpus(data)
    if corpus.max_token >= vocab_size - reserved:
        beside = f", of which the last {reserved} is reserved" if reserved else ""
        raise ConfigError(
            f"{key}={vocab_size}{beside}, but {corpus.source} holds the token {corpus.max_token}",
            f"set {key} to at least {corpus.max_token + 1 + reserved}, or check data.bin_dtype",
        )
    return corpus


def plan_windows(n: int, seq_len: int) -> dict[str, torch.Tensor]:
    """A micro-batch of `n` windows without a corpus."""
    return {"tokens": torch.zeros(n, seq_len, dtype=torch.int64), "targets": torch.zeros(n, seq_len, dtype=torch.int64)}


def windows(corpus: Corpus, split: Literal["train", "val"], seq_len: int) -> Windows:
    """Windows of a split; the training split must fill at least one, the other holds 2 tokens or more."""
    if split == "train":
        return Windows(corpus.train_span, seq_len, f"the training split of {corpus.source}")
    return Windows(corpus.val_span, seq_len, f"the validation split of {corpus.source}", min_tokens=2)
