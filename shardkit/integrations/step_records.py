"""Rank 0's records of the steps of a watched loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..telemetry.metrics import MetricsWriter


class LoopRecords:
    """Writes rank 0's record of each step, in order, once the GPU has computed its values."""

    def __init__(
        self, writer: MetricsWriter, optimizer: Any, show: Callable[[Mapping[str, float]], None] | None
    ) -> None:
        self.writer, self._optimizer, self._show = writer, optimizer, show
        self._now: dict[str, Any] | None = None
        self._early: dict[str, Any] = {}
        self._queue: deque[tuple[dict[str, Any], Any]] = deque()
        self._event: Any = None
        self._tokens = 0.0

    def begin(self, step: int, seconds: float, waited: float) -> None:
        """Begin the record of a step that has ended; `add` extends it until the next forward."""
        self.flush()
        self._now = {"step": step, **self._early, "step_time_s": seconds, "data_wait_s": waited}
        self._early = {}
        rate = self._optimizer.param_groups[0].get("lr")
        if isinstance(rate, (int, float)):
            self._now.setdefault("lr", float(rate))

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values to the record of the step that ended, or of the one that runs."""
        into = self._early if self._now is None else self._now
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                into[key] = value.detach().to("cpu", non_blocking=True)
                if value.is_cuda:
                    self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._event.record()
            elif isinstance(value, (int, float)) or hasattr(value, "item"):
                into[key] = float(value)
            else:
                raise TypeError(f"log() got {key} of type {type(value).__name__}; it takes numbers")

    def flush(self) -> None:
        """Close the current record, and write all records whose values have arrived."""
        if self._now is not None:
            self._queue.append((self._now, self._event))
            self._now = self._event = None
        while self._queue and (self._queue[0][1] is None or self._queue[0][1].query()):
            self._write(self._queue.popleft()[0])

    def close(self) -> None:
        self.flush()
        for record, event in self._queue:
            try:
                event.synchronize()
            except RuntimeError:  # the device failed: the values are lost
                break
            self._write(record)
        self.writer.close()

    def _write(self, record: dict[str, Any]) -> None:
        plain = {key: value if key == "step" else float(value) for key, value in record.items()}
        if "tokens" in plain:
            self._tokens += plain["tokens"]
            plain |= {"tokens_total": self._tokens, "tokens_per_s": plain["tokens"] / plain["step_time_s"]}
        self.writer.write(plain)
        if self._show is not None:
            try:
                self._show(plain)
            except OSError:  # the terminal is gone
                self._show = None
