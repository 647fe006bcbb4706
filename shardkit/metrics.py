"""What rank 0 writes about each step: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from .memory.jsonl import append_jsonl

_LOG = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one JSON object per optimizer step; TensorBoard gets the same numbers.

    A step's object holds: step, loss (mean over the step's targets), grad_norm (before clipping), lr, tokens (targets
    in this step, all ranks), tokens_total, step_time_s, data_wait_s (rank 0), tokens_per_s, and val_loss after an
    evaluation. A norm that is not finite is written as null.

    Args:
        done: steps already recorded by the run that is resumed; TensorBoard forgets what lies behind them.
    """

    def __init__(self, run_dir: Path, tensorboard: bool, done: int = 0) -> None:
        self._purge_step = done + 1 if done else None
        self._path = run_dir / "metrics.jsonl"
        self._tensorboard_dir = run_dir / "tensorboard" if tensorboard else None
        self._board: Any = None

    def write(self, record: dict[str, float]) -> None:
        clean = {k: v if math.isfinite(v) else None for k, v in record.items()}
        append_jsonl(self._path, clean)
        if self._tensorboard_dir is None:
            return
        try:
            self._show(record)
        except OSError as error:  # a full disk ends the pictures, not the run
            _LOG.warning("no more TensorBoard events from step %d on: %s", record["step"], error)
            self._tensorboard_dir = self._board = None

    def _show(self, record: dict[str, float]) -> None:
        if self._board is None:  # its import takes most of a second: after the first step, not before
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._tensorboard_dir), purge_step=self._purge_step)
        for key, value in record.items():
            if key != "step":
                self._board.add_scalar(f"train/{key}", value, int(record["step"]))

    def close(self) -> None:
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                _LOG.warning("the last TensorBoard events are lost: %s", error)
