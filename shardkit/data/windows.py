"""Fixed-length windows over a stream of tokens, plain or masked (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..config.libraries import is_first_rank
from ..config.schema import RunConfig
from ..errors import ConfigError, DataError
from .corpus import Corpus, TokenSpan, open_corpus
from .order import generator_of
from .store import Documents
from .tokenizer import FILES

IGNORE_INDEX = -100
_BYTE_VOCABULARY = 512
"""A vocabulary of bytes and some special tokens is not larger than this."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_LOG = logging.getLogger(__name__)


class Windows:
    """Non-overlapping windows: sample i is tokens[i·T : i·T + T + 1], as inputs and the next tokens.

    A sample is {"tokens": int64 [T], "targets": int64 [T]}. The last window may be shorter: it is padded with token 0
    and targets `IGNORE_INDEX`, so every token except the first is predicted exactly once per epoch.

    Raises:
        DataError: fewer tokens than `min_tokens` (at least 2; default: one whole window).
    """

    def __init__(self, span: TokenSpan, seq_len: int, name: str, min_tokens: int | None = None) -> None:
        _refuse_short(name, len(span), min_tokens, seq_len)
        self.span = span
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.span) - 2) // self.seq_len + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.seq_len
        return _inputs_and_targets(self.span.tokens[start : start + self.seq_len + 1].astype(np.int64), self.seq_len)


def _refuse_short(name: str, n_tokens: int, min_tokens: int | None, seq_len: int) -> None:
    needed = seq_len + 1 if min_tokens is None else min_tokens
    if n_tokens < needed:
        raise DataError(
            f"{name} has {n_tokens} tokens, fewer than the {needed} that train.seq_len={seq_len} needs",
            "give more data, lower train.seq_len, or change data.val_fraction",
        )


def _inputs_and_targets(window: npt.NDArray[np.int64], seq_len: int) -> dict[str, torch.Tensor]:
    """A window's inputs and next tokens; a short one is padded."""
    tokens = torch.from_numpy(window)
    missing = seq_len + 1 - len(window)
    tokens, targets = tokens[:-1], tokens[1:]
    if missing:
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        targets = torch.nn.functional.pad(targets, (0, missing), value=IGNORE_INDEX)
    return {"tokens": tokens, "targets": targets}


class DocumentWindows:
    """Windows over documents one behind the other, in their order, as `Windows` takes them over a stream of tokens.

    Raises:
        DataError: fewer tokens than `min_tokens` (at least 2; default: one whole window).
    """

    def __init__(self, documents: Documents, seq_len: int, name: str, min_tokens: int | None = None) -> None:
        self.documents, self.seq_len = documents, seq_len
        _refuse_short(name, documents.n_tokens, min_tokens, seq_len)

    @cached_property
    def _stops(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.documents.lengths, dtype=np.int64)

    def __len__(self) -> int:
        return (int(self._stops[-1]) - 2) // self.seq_len + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        at = index * self.seq_len
        stop = min(at + self.seq_len + 1, int(self._stops[-1]))
        document = int(np.searchsorted(self._stops, at, side="right"))
        parts = []
        while at < stop:
            end, length = int(self._stops[document]), int(self.documents.lengths[document])
            start = length - (end - at)
            parts.append(self.documents.piece(document, start, start + min(end, stop) - at)[0])
            at, document = min(end, stop), document + 1
        return _inputs_and_targets(np.concatenate(parts), self.seq_len)

    def __getstate__(self) -> dict[str, Any]:
        return {"documents": self.documents, "seq_len": self.seq_len}


def open_covered(config: RunConfig, vocab_size: int, key: str, reserved: int = 0) -> Corpus:
    """Open the corpus and check that its tokens are below `vocab_size - reserved`; `key` sets the vocabulary size.

    Raises:
        ConfigError: the data holds a larger token, or is read as bytes although the initial weights use a tokenizer.
    """
    if config.data.path is None or not config.data.path.endswith(".bin"):
        _judge_bytes(config.model.init_from, vocab_size, key)
    corpus = open_corpus(config.data)
    if corpus.max_token >= vocab_size - reserved:
        beside = f", of which the last {reserved} is reserved" if reserved else ""
        raise ConfigError(
            f"{key}={vocab_size}{beside}, but {corpus.source} holds the token {corpus.max_token}",
            f"set {key} to at least {corpus.max_token + 1 + reserved}, or check data.bin_dtype",
        )
    return corpus


def _judge_bytes(init_from: str | None, vocab_size: int, key: str) -> None:
    """Refuse text, one token per byte, for weights that learnt a tokenizer's ids; warn of an oversized vocabulary."""
    folder = Path(init_from).expanduser() if init_from is not None else None
    tokenizer = next((name for name in _TOKENIZERS if folder is not None and (folder / name).exists()), None)
    is_foreign = folder is not None and (folder / "config.json").exists()
    if tokenizer is not None or (is_foreign and vocab_size > _BYTE_VOCABULARY):
        missing = f"no tokenizer.json in {folder}: "
        if tokenizer in FILES:
            missing = f"model.init_from={init_from}: made by the tokenizer beside them ({tokenizer}), "
        raise ConfigError(
            f"{missing}these weights know token ids, but data.path is text, which is read without a tokenizer, as "
            "bytes",
            "set data.tokenizer to the tokenizer of these weights, or data.path to a .bin file of token ids",
        )
    if vocab_size > _BYTE_VOCABULARY and is_first_rank():
        _LOG.warning(
            "text is read as bytes: of the %s tokens of %s only 256 occur; give token ids as a .bin, or set %s=256",
            f"{vocab_size:,}", key, key,
        )  # fmt: skip


def plan_windows(n: int, seq_len: int) -> dict[str, torch.Tensor]:
    """A micro-batch of `n` windows without a corpus."""
    return {"tokens": torch.zeros(n, seq_len, dtype=torch.int64), "targets": torch.zeros(n, seq_len, dtype=torch.int64)}


HIDDEN, SWAPPED = 0.8, 0.1
"""Shares of the chosen positions that get the mask token, and a random token; the rest stay unchanged."""


class MaskedWindows:
    """Windows with a share of their tokens masked, chosen by (seed, split, sample index) alone.

    A sample is {"tokens": int64 [T], "targets": int64 [T]}: the targets are the original tokens where a prediction is
    wanted and `IGNORE_INDEX` elsewhere. The last, shorter window is padded with token 0, which is never a target.

    Args:
        n_tokens: random replacements are drawn from [0, n_tokens).
    """

    def __init__(self, windows: Any, seed: int, split: str, fraction: float, mask_token: int, n_tokens: int) -> None:
        self.windows = windows
        self.seed, self.split = seed, split
        self.fraction, self.mask_token, self.n_tokens = fraction, mask_token, n_tokens

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index]
        tokens = window["tokens"].numpy()
        real = int((window["targets"] != IGNORE_INDEX).sum())  # as many inputs as next tokens; the rest is padding
        draws = generator_of(self.seed, "mask", self.split, index)
        chosen = draws.random(len(tokens)) < self.fraction
        chosen[real:] = False
        how, random_tokens = draws.random(len(tokens)), draws.integers(0, self.n_tokens, len(tokens))
        changed = np.where(how < HIDDEN, self.mask_token, np.where(how < HIDDEN + SWAPPED, random_tokens, tokens))
        return {
            "tokens": torch.from_numpy(np.where(chosen, changed, tokens)),
            "targets": torch.from_numpy(np.where(chosen, tokens, IGNORE_INDEX)),
        }


def flatten_targets(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A micro-batch: "tokens" [B, T], "positions" [n] to predict in the flattened B × T, and their "targets" [n].

    They are found here, on the host: on the GPU, this would make the host wait.
    """
    targets = torch.stack([sample["targets"] for sample in samples]).flatten()
    positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    tokens = torch.stack([sample["tokens"] for sample in samples])
    return {"tokens": tokens, "positions": positions, "targets": targets[positions]}
