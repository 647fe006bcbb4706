"""What rank 0 shows while training: a bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from .memory.units import gib


class Progress:
    """Loss, tokens/s, MFU where the GPU's peak is known, memory, what saves have cost so far, and time left."""

    def __init__(
        self, total: int, first: int, every: int, flops_per_token: float | None, peak_flops: float | None
    ) -> None:
        self._total, self._every = total, every
        self._mfu_per_token = flops_per_token / peak_flops if flops_per_token and peak_flops else None
        self._began, self._first = time.perf_counter(), first
        self._saves_s = 0.0
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total, completed=first)

    def update(self, record: Mapping[str, float], ranks: int, peak_bytes: int | None, peak_kind: str) -> None:
        """Show a step's record; `peak_bytes` is the worst rank's."""
        step, tokens_per_s = int(record["step"]), record["tokens_per_s"]
        parts = [f"loss {record['loss']:.4f}", f"{tokens_per_s:,.0f} tokens/s"]
        if self._mfu_per_token is not None:
            parts.append(f"MFU {100 * self._mfu_per_token * tokens_per_s / ranks:.1f} %")
        if peak_bytes is not None:
            parts.append(f"{peak_kind} {gib(peak_bytes)}")
        self._saves_s += record.get("save_s", 0.0)
        if self._saves_s:
            parts.append(f"saves {self._saves_s:.1f} s")
        text = "  ".join(parts)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step == self._first + 1 or step % self._every == 0 or step == self._total:
            print(f"step {step}/{self._total}  {text}  ETA {self._eta(step)}", file=sys.stderr, flush=True)

    def _eta(self, step: int) -> str:
        done = max(1, step - self._first)
        left = int((time.perf_counter() - self._began) / done * (self._total - step))
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
