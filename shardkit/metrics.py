"""What rank 0 writes about each step: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any


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
        self._file: IO[str] = (run_dir / "metrics.jsonl").open("a")
        self._tensorboard_dir = run_dir / "tensorboard" if tensorboard else None
        self._board: Any = None

    def write(self, record: dict[str, float]) -> None:
        clean = {k: v if math.isfinite(v) else None for k, v in record.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        if self._tensorboard_dir is not None:
            if self._board is None:  # its import takes most of a second: after the first step, not before
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self._tensorboard_dir), purge_step=self._purge_step)
            for key, value in record.items():
                if key != "step":
                    self._board.add_scalar(f"train/{key}", value, int(record["step"]))

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
