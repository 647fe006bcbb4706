"""Fixed-length windows over a stream of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import DataError
from .corpus import Tokens, TokenSpan

IGNORE_INDEX = -100


class Windows:
    """Non-overlapping windows: sample i is tokens[i·T : i·T + T + 1], as inputs and the next tokens.

    A sample is {"tokens": int64 [T], "targets": int64 [T]}. The last window may be shorter: it is filled up with token
    0 and targets `IGNORE_INDEX`, so that every token but the first is predicted exactly once an epoch.

    Raises:
        DataError: fewer tokens than `min_tokens` (at least 2; default: one whole window).
    """

    def __init__(self, span: TokenSpan, seq_len: int, what: str, min_tokens: int | None = None) -> None:
        needed = seq_len + 1 if min_tokens is None else min_tokens
        if len(span) < needed:
            raise DataError(
                f"{what} has {len(span)} tokens, fewer than the {needed} that train.seq_len={seq_len} needs",
                "give more data, lower train.seq_len, or change data.val_fraction",
            )
        self.span = span
        self.seq_len = seq_len
        self._tokens: Tokens = span.open()

    def __len__(self) -> int:
        return (len(self.span) - 2) // self.seq_len + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.seq_len
        window = torch.from_numpy(self._tokens[start : start + self.seq_len + 1].astype(np.int64))
        missing = self.seq_len + 1 - len(window)
        tokens, targets = window[:-1], window[1:]
        if missing:
            tokens = torch.nn.functional.pad(tokens, (0, missing))
            targets = torch.nn.functional.pad(targets, (0, missing), value=IGNORE_INDEX)
        return {"tokens": tokens, "targets": targets}

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map is a copy of the file: workers map it themselves.
        return {"span": self.span, "seq_len": self.seq_len}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self.span.open()
