"""Tasks for jobs on the test cluster."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

PHASES = ("start-up", "training", "evaluation", "saving")


class Paced:
    """A wide linear model, so that a save takes a moment, and slow evaluations.

    Rank 0 keeps where it stands in RUN_DIR/phase, and appends to RUN_DIR/phases where it stood when USR2 arrived.
    """

    def __init__(self, config: Any, wide: int = 2048) -> None:
        self.wide = wide
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            threading.Thread(target=_watch, args=(Path(config.run.dir),), daemon=True).start()

    def build_model(self) -> nn.Module:
        return nn.Linear(self.wide, self.wide)

    def dataset(self, split: Literal["train", "val"]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        return [torch.randn(self.wide, generator=generator) for _ in range(64)]

    def n_targets(self, batch: torch.Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 if model.training else 0.1)
        return model(batch).square().sum()  # type: ignore[no-any-return]


class Faulty(Paced):
    """Fails as a GPU with broken memory does, on the node where it is started first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, wide=4)
        broken, here = Path(config.run.dir) / "broken", os.environ["SLURMD_NODENAME"]
        if not broken.exists():
            broken.write_text(here)
        if broken.read_text() == here:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def _watch(run_dir: Path) -> None:
    """USR2 is blocked in every thread, so that it stays pending: who looks can see it."""
    before = ""
    while True:
        phase = _phase()
        if signal.SIGUSR2 in signal.sigpending():
            with (run_dir / "phases").open("a") as file:
                file.write(phase + "\n")
            return
        if phase != before and run_dir.exists():
            before = phase
            (run_dir / "phase.part").write_text(phase)
            (run_dir / "phase.part").replace(run_dir / "phase")
        time.sleep(0.002)


def _phase() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = "start-up"
    while frame is not None:
        where = (Path(frame.f_code.co_filename).name, frame.f_code.co_name)
        if where == ("evaluate.py", "evaluate"):
            return "evaluation"
        if where == ("checkpointer.py", "save"):
            return "saving"
        if where == ("trainer.py", "steps"):
            found = "training"
        frame = frame.f_back
    return found
