"""Tasks that go wrong in a chosen way, on a chosen rank and step: `task.args.how`."""

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

from shardkit.checkpoint.native import writer
from shardkit.errors import DataError
from shardkit.parallel.world import World
from shardkit.run.watchdog import Watchdog


class Troubled:
    """A linear model; after `calls` losses rank `rank` does `how`, in the first attempt only.

    Every loss takes 50 ms with how=wait, or as long as the file `slow_while` is there. Losses after
    `calls` wait as long as the file `held_while` is there.
    """

    def __init__(
        self, config: Any, how: str, rank: int = 1, calls: int = 3, slow_while: str = "", held_while: str = ""
    ) -> None:
        self.how, self.calls_left, self.slow_while, self.held_while = how, calls, slow_while, held_while
        self.here = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")) == rank
        self.again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def build_model(self) -> nn.Module:
        if self.how == "build":
            raise KeyError("no such width")
        return nn.Linear(4, 2)

    def dataset(self, split: Literal["train", "val"]) -> list[torch.Tensor] | None:
        if split == "val":
            return None
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(4, generator=generator) for _ in range(64)]

    def n_targets(self, batch: torch.Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left == 0 and self.here and not self.again:
            self.go_wrong()
        if self.how == "wait" or (self.slow_while and os.path.exists(self.slow_while)):
            time.sleep(0.05)
        while self.calls_left < 0 and self.held_while and os.path.exists(self.held_while):
            time.sleep(0.05)
        return model(batch).square().sum()

    def go_wrong(self) -> None:
        if self.how == "raise":
            raise ValueError("the cat sat on the GPU")
        if self.how == "refuse":
            raise DataError("sample 7 is empty", "remove it")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.how == "hang":
            threading.Event().wait()
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "exit":
            sys.exit(0)
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "abort":
            os.abort()
        if self.how == "lose":  # the GPU that EMUCUDA_LOST names
            Path(os.environ["EMUCUDA_LOST"].partition(":")[2]).touch()


class Unwatched(Troubled):
    """The same without shardkit's watchdog, which would be first: what NCCL's own does is left."""

    def __init__(self, config: Any, how: str, rank: int = 1, calls: int = 3) -> None:
        super().__init__(config, how, rank, calls)
        Watchdog.start = lambda self: None
        wait = World.set_timeout
        World.set_timeout = lambda self, _: wait(self, config.run.step_timeout_s)


class OneWeight(Troubled):
    """So small that one of two ranks holds all of it."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def dataset(self, split: Literal["train", "val"]) -> list[torch.Tensor] | None:
        return [torch.ones(1)] * 64 if split == "train" else None


class Uneven(Troubled):
    """Rank 1 finds no validation data."""

    def dataset(self, split: Literal["train", "val"]) -> list[torch.Tensor] | None:
        return super().dataset("val" if split == "val" and self.here else "train")


class SlowToSave(Troubled):
    """Saves take 35 s and steps 50 ms as long as the file `slow_while` is there."""

    def __init__(self, config: Any, how: str, slow_while: str, rank: int = 1, calls: int = 3) -> None:
        super().__init__(config, how, rank, calls, slow_while)
        write_file = writer.write_file

        def write_slowly(path: Path, tensors: Any) -> Any:
            if os.path.exists(slow_while):
                time.sleep(35)
            return write_file(path, tensors)

        writer.write_file = write_slowly
