"""Warn about a loss that looks like the mean over its targets, but is used as their sum."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from statistics import pvariance
from typing import Any

import torch

from ..config.libraries import is_first_rank
from ..strategies.clocks import HostValue
from ..strategies.step import one_number

_SUMS_MIN, _SUMS_MAX, _SUMS_SPREAD = 8, 64, 1.5
_LOG = logging.getLogger(__name__)


class SumCheck:
    """Warns once if a loss that should be a sum over targets does not grow with their number: it may be a mean.

    Looks at rank 0's first micro-batches, if their numbers of targets differ.

    Args:
        loss_name, fix: words for the warning.
    """

    def __init__(self, loss_name: str, fix: str) -> None:
        self._loss_name, self._fix = loss_name, fix
        self._counts: list[int] = []
        self._losses: list[HostValue] = []
        self._is_judged = not is_first_rank()

    def expect(self, counts: Sequence[int]) -> None:
        """Announce the numbers of targets of the next micro-batches; 0 = ignore this one."""
        if not self._is_judged:
            self._counts += counts

    def around(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        """The loss function, with its losses recorded; it does not wait for them."""

        def noted(model: Any, batch: Any) -> torch.Tensor:
            loss = one_number(loss_fn(model, batch))
            if not self._is_judged:
                self._losses.append(HostValue(loss))
            return loss

        return noted

    def judge(self) -> None:
        """Warn if the losses look like means; call it after a step whose loss is known."""
        if self._is_judged:
            return
        seen = [(n, loss.item()) for n, loss in zip(self._counts, self._losses, strict=False) if n]
        counts = [n for n, _ in seen]
        self._is_judged = len(self._losses) >= _SUMS_MAX
        if len(seen) < _SUMS_MIN or max(counts) < _SUMS_SPREAD * min(counts) or min(loss for _, loss in seen) <= 0:
            return
        # For a sum, loss / targets stays about the same; for a mean, the loss does.
        of_mean = pvariance([math.log(loss) for _, loss in seen])
        of_sum = pvariance([math.log(loss / n) for n, loss in seen])
        if of_mean < of_sum / 4:
            self._is_judged = True
            _LOG.warning(
                "%s does not grow with its targets (%d to %d of them): it looks like their mean, but is used as "
                "their sum, which makes gradients too small\n  fix: %s",
                self._loss_name, min(counts), max(counts), self._fix,
            )  # fmt: skip
