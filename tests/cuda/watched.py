"""A user's loop on a GPU with and without `shardkit.watch`: what it asks of CUDA, what the hooks cost, how it ends."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardkit
from tests.cuda.steady import HELD

WARM, MEASURED, SIZE = 4, 8, 256


class Loop:
    """Accumulation over two micro-batches, and a loss that is kept on the GPU."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(4))
        self.model = nn.Sequential(*blocks).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.inputs = torch.ones(8, SIZE, device="cuda")

    def step(self) -> torch.Tensor:
        for _ in range(2):
            loss: torch.Tensor = self.model(self.inputs).pow(2).mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def calls(loop: Loop) -> list[dict[str, int]]:
    """CUDA's calls of each step, after warm-up."""
    import emucuda

    found = []
    for index in range(WARM + MEASURED):
        gc.disable()
        with emucuda.counting() as made:
            loop.step()
        gc.enable()
        if index >= WARM:
            found.append({name: made[name] for name in HELD if made[name]})
    return found


def cost(folder: str) -> dict[str, Any]:
    """Calls without and with the watch, and seconds of its hooks for a step that gathers nothing."""
    plain = calls(Loop())
    loop = Loop()
    with shardkit.watch(loop.model, loop.optimizer, run_dir=folder, every=3, tensorboard=False) as watching:
        watched = calls(loop)
        spent, began = watching.ledger.overhead_s, time.perf_counter()
        gathered, steps = watching.ledger.gather_s, 50
        for _ in range(steps):
            watching.log(loss=loop.step())
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        spent = watching.ledger.overhead_s - spent - (watching.ledger.gather_s - gathered)
    losses = [json.loads(line).get("loss") for line in (Path(folder) / "metrics.jsonl").open()]
    return {"plain": plain, "watched": watched, "hooks_s": spent / steps, "step_s": took / steps, "losses": losses}


def out_of_memory(folder: str) -> dict[str, Any]:
    """The post-mortem of a batch that is too large for the card."""
    loop = Loop()
    try:
        with shardkit.watch(loop.model, loop.optimizer, run_dir=folder, tensorboard=False):
            loop.step()
            loop.step()
            loop.inputs = torch.ones(200_000, SIZE, device="cuda")
            loop.step()
    except torch.OutOfMemoryError as error:
        found: dict[str, Any] = json.loads((Path(folder) / "oom" / "rank0.json").read_text())
        return {**found, "notes": error.__notes__}
    return {}
