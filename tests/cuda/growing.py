"""Random training loops, with and without a leak, on the emulated card.

Each runs as many steps as a rehearsal does that looks for growth. A leak is a line of this file that ends in `# leak`;
what looks like one and is none: batches of any length, ever longer ones, states and caches that are made late, a
prefetched batch, the last loss with its graph.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch
from torch import nn

from shardkit.memory.ledger import AFTER, GATHERS, MemoryLedger
from tests.rehearse import injected

MIB = 2**20
LEAKS = ("graph", "outputs", "hook", "cat", "cache", "tiny")
"""`tiny` is a list of losses: it grows and fills no card, so it is not told."""


class Loop:
    """One random loop; `step` is one of its steps."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.leak = draw.choice([*LEAKS, *[None] * len(LEAKS)])
        self.lengths = draw.choice(["equal", "any", "longer"])
        self.width = draw.choice([256, 512])
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(draw.randint(2, 4)))
        ).cuda()
        make = draw.choice([lambda p: torch.optim.SGD(p, 0.1), torch.optim.AdamW])
        self.optimizer = make(self.model.parameters())
        self.set_to_none = draw.random() < 0.7
        self.late_state_at = draw.choice([None, 2, 3])
        self.warms_cache = draw.random() < 0.4
        self.keeps_loss = draw.random() < 0.5
        self.prefetches = draw.random() < 0.3
        self.kept: list[Any] = []
        self.cache: dict[Any, torch.Tensor] = {}
        self.history = torch.empty(0, device="cuda")
        self.late: torch.Tensor | None = None
        self.next: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        if self.leak == "hook":
            self.model[0].register_forward_hook(lambda module, args, output: self.kept.append(output.detach()))

    def rows(self, step: int) -> int:
        if self.lengths == "any":
            return self.draw.randint(1024, 2048)
        return 1024 + 128 * step * (self.lengths == "longer")

    def batch(self, step: int) -> torch.Tensor:
        return torch.randn(self.rows(step), self.width, device="cuda")

    def step(self, step: int) -> None:
        x = self.next if self.next is not None else self.batch(step)
        self.next = self.batch(step + 1) if self.prefetches else None
        y = self.model(x)  # leak
        loss = y.pow(2).mean()  # leak
        loss.backward(retain_graph=self.leak == "graph")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        if self.late_state_at == step:
            self.late = torch.empty(4 * MIB, device="cuda")
        if self.warms_cache and step < 3:
            self.cache[step] = torch.empty(MIB, device="cuda")
        if self.leak == "graph":
            self.kept.append(loss)
        elif self.leak == "outputs":
            self.kept.append(y.detach().clone())  # leak
        elif self.leak == "cat":
            self.history = torch.cat([self.history, torch.ones(MIB, device="cuda")])  # leak
        elif self.leak == "cache":
            self.cache[f"at {step}"] = torch.empty(MIB // 2, device="cuda")  # leak
        elif self.leak == "tiny":
            self.kept.append(loss.detach())
        self.loss = loss if self.keeps_loss else None


def judged(seed: int) -> str:
    """Empty, or what is wrong with the judgement of this loop."""
    growth = injected("shardkit_history")
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=200_000)
    torch.cuda.reset_peak_memory_stats()
    loop, ends = Loop(seed), []
    for step in range(growth.STEPS):
        loop.step(step)
        ends.append(time.time_ns() // 1000)
        time.sleep(0.001)  # the history's clock counts microseconds
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    result = growth.growth(events, ends, torch.cuda.max_memory_allocated())
    is_leak = loop.leak not in (None, "tiny")
    del loop
    if bool(result) != is_leak:
        return f"seed {seed}: {'missed' if is_leak else 'invented'}: {result}"
    if is_leak and not result["source_line"].endswith("# leak"):
        return f"seed {seed}: blames {result['source_line']}"
    return ""


def judged_by_ledger(seed: int) -> str:
    """The same of a ledger, which keeps stacks only once memory has grown for some gathers."""
    gc.collect()  # of the loop before
    torch.cuda.reset_peak_memory_stats()
    loop, ledger = Loop(seed), MemoryLedger("cuda:0", interval=1)
    loop.lengths = "equal"  # a ledger compares figures, so ever longer batches may hide a leak
    for step in range(1, GATHERS + AFTER + 6):
        loop.step(step)
        ledger.end_step(step)
        (row,) = ledger.gather(step) or []
    is_leak, memory = loop.leak not in (None, "tiny"), row.device_mem
    del loop
    if bool(memory.growth) != is_leak or bool(memory.growth_line) != is_leak:
        return f"seed {seed}: {is_leak=}, {memory.growth} and {memory.growth_line}"
    if is_leak and not (memory.growth_line or "").endswith("# leak"):
        return f"seed {seed}: blames {memory.growth_line}"
    return ""


def wrong_lines(first: int, last: int) -> list[str]:
    return [text for seed in range(first, last) if (text := judged_by_ledger(seed))]


def wrong(first: int, last: int) -> list[str]:
    return [text for seed in range(first, last) if (text := judged(seed))]
