"""A task that writes down which rows its ranks train on, and that interrupts its job."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardkit.config.schema import RunConfig
from shardkit.data.tokenizer import load_tokenizer
from shardkit.tasks.causal_lm import CausalLM


class Counting(CausalLM):
    """`causal_lm` on `tests.data.chats.conversation`s.

    Args:
        root: gets `START-RANK.jsonl`, a line for each micro-batch with the numbers of its conversations.
        start: number of this start of the job.
        ends_at: the micro-batch of rank 0 that interrupts; 0 = none.
        by: TERM ends torchrun as a scheduler does, KILL ends the rank as the kernel does.
    """

    def __init__(self, config: RunConfig, root: str, start: int, ends_at: int = 0, by: str = "TERM") -> None:
        super().__init__(config)
        self.rank = int(os.environ["RANK"])
        self.file = Path(root, f"{start}-{self.rank}.jsonl")
        self.ends_at, self.by, self.calls = ends_at, by, 0
        self.tokenizer = load_tokenizer(str(config.data.tokenizer))

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        texts = [self.tokenizer.decode(row) for row in batch["tokens"].tolist()]
        with self.file.open("a") as stream:
            stream.write(json.dumps([int(re.findall(r"ask (\d+) ", text)[0]) for text in texts]) + "\n")
        self.calls += 1
        if self.rank == 0 and self.calls == self.ends_at:
            interrupt_by_torchrun() if self.by == "TERM" else os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def interrupt_by_torchrun() -> None:
    """Send SIGTERM to torchrun, and wait for the one that it sends: the job could end before torchrun gets the CPU."""
    handler, comes_back = signal.getsignal(signal.SIGTERM), threading.Event()
    assert callable(handler), "the run listens"

    def note(number: int, frame: FrameType | None) -> None:
        handler(number, frame)
        comes_back.set()

    signal.signal(signal.SIGTERM, note)
    os.kill(os.getppid(), signal.SIGTERM)
    assert comes_back.wait(100)
    signal.signal(signal.SIGTERM, handler)
