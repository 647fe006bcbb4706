"""Masked windows for masked language models (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import numpy as np
import torch

from .draws import generator_of
from .windows import IGNORE_INDEX, Windows

HIDDEN, SWAPPED = 0.8, 0.1
"""Of the chosen positions: shares replaced by the mask token, and by a random one; the rest stay as they are."""


class MaskedWindows:
    """Windows with a share of their tokens hidden, chosen by (seed, split, sample index) alone.

    A sample is {"tokens": int64 [T], "targets": int64 [T]}: the targets are the original tokens where a prediction is
    wanted and `IGNORE_INDEX` elsewhere. A last, shorter window is filled up with token 0, of which none is a target.

    Args:
        n_tokens: random replacements are drawn from [0, n_tokens).
    """

    def __init__(
        self, windows: Windows, seed: int, split: str, fraction: float, mask_token: int, n_tokens: int
    ) -> None:
        self.windows = windows
        self.seed, self.split = seed, split
        self.fraction, self.mask_token, self.n_tokens = fraction, mask_token, n_tokens

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index]
        tokens = window["tokens"].numpy()
        real = int((window["targets"] != IGNORE_INDEX).sum())  # as many inputs as next tokens; the rest is filling
        draws = generator_of(self.seed, "mask", self.split, index)
        chosen = draws.random(len(tokens)) < self.fraction
        chosen[real:] = False
        how, other = draws.random(len(tokens)), draws.integers(0, self.n_tokens, len(tokens))
        changed = np.where(how < HIDDEN, self.mask_token, np.where(how < HIDDEN + SWAPPED, other, tokens))
        return {
            "tokens": torch.from_numpy(np.where(chosen, changed, tokens)),
            "targets": torch.from_numpy(np.where(chosen, tokens, IGNORE_INDEX)),
        }


def flatten_targets(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A micro-batch: "tokens" [B, T], and of what is to be predicted "positions" [n] in the flattened batch × T and
    "targets" [n]. They are counted here, on the host: on the GPU it would make the host wait for it."""
    targets = torch.stack([sample["targets"] for sample in samples]).flatten()
    positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    tokens = torch.stack([sample["tokens"] for sample in samples])
    return {"tokens": tokens, "positions": positions, "targets": targets[positions]}
