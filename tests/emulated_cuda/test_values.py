"""Random programs without computing: what the host reads is right, a stand-in or refused, and never what lay there.

New memory is poisoned: a float that nobody wrote is NaN, an integer -1.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulated_cuda import needs_emulation, start

pytestmark = [pytest.mark.gpu, needs_emulation]

SIZES = [7, 1 << 13, 1 << 16, 1 << 19]
"""Elements: of floats tiny, medium and large; integers of all sizes are computed."""
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = [torch.int64, torch.int64, torch.int32, torch.bool]
SMALLEST = 1e-4
"""Values stay above it and below 16, so that no type's own range makes them infinite."""


@dataclass
class Pair:
    """A tensor of the card and its values by the CPU; None where they depend on a stand-in."""

    card: torch.Tensor
    host: torch.Tensor | None


def both(function: Callable[..., torch.Tensor], *pairs: Pair) -> Pair:
    hosts = [pair.host for pair in pairs]
    host = None if any(values is None for values in hosts) else function(*hosts)
    return Pair(function(*(pair.card for pair in pairs)), host)


class Program:
    """A random program of a seed, one operator after another."""

    def __init__(self, seed: int, gloo: dist.ProcessGroup) -> None:
        self.random, self.gloo, self.rank = random.Random(seed), gloo, dist.get_rank()
        self.generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.size = self.random.choice(SIZES)
        self.floats, self.integers = [self.new_floats(torch.float32)], [self.new_integers()]
        self.trail: list[str] = []

    def new_floats(self, dtype: torch.dtype) -> Pair:
        values = (torch.rand(self.size, generator=self.generator) + 0.5).to(dtype)
        return Pair(values.cuda(), values)

    def new_integers(self) -> Pair:
        values = torch.randint(1000, (self.size,), generator=self.generator).to(self.random.choice(INTEGERS))
        return Pair(values.cuda(), values)

    def float_step(self) -> Pair:
        x, y = self.random.choice(self.floats), self.random.choice(self.floats)
        integers, dtype, narrow = self.random.choice(self.integers), self.random.choice(FLOATS), x.card.dtype
        steps: dict[str, Callable[[], Pair]] = {
            "add": lambda: both(lambda a, b: (a + b.to(narrow)).clamp(SMALLEST, 15), x, y),
            "sigmoid": lambda: both(torch.sigmoid, x), "clone": lambda: both(torch.clone, x),
            "cast": lambda: both(lambda a: a.to(dtype), x), "flip": lambda: both(lambda a: a.flip(0), x),
            "where": lambda: both(lambda c, a, b: torch.where(c > 3, a, b.to(narrow)), integers, x, y),
            "from the host": lambda: self.new_floats(dtype),
            "into empty": lambda: both(lambda a: torch.empty_like(a).copy_(a), x),
            "by the host": lambda: both(lambda a: a.cpu().pin_memory().to(a.device, non_blocking=True), x),
            "reduced": lambda: self.exchanged(x), "part": lambda: both(lambda a: a.roll(len(a) // 3), x),
            "mean": lambda: Pair(x.card.mean().expand(self.size), None),
            "normalised": lambda: Pair((x.card / x.card.norm()).clamp(SMALLEST, 15), None),
        }  # fmt: skip
        return self.take(steps)

    def integer_step(self) -> Pair:
        x, y = self.random.choice(self.integers), self.random.choice(self.integers)
        floats, dtype = self.random.choice(self.floats), self.random.choice(INTEGERS)
        steps: dict[str, Callable[[], Pair]] = {
            "sum of two": lambda: both(lambda a, b: (a.long() + b) % 1009, x, y),
            "cast to": lambda: both(lambda a: a.to(dtype), x), "not": lambda: both(lambda a: a == 0, x),
            "compared": lambda: both(lambda a, b: (a > b).long(), x, y),
            "cumulated": lambda: both(lambda a: a.cumsum(0) % 97, x),
            "sorted": lambda: both(lambda a: a.sort().values, x), "copied": lambda: both(torch.clone, x),
            "taken": lambda: both(lambda a, b: a[b.long() % len(a)], x, y),
            "gathered": lambda: self.exchanged(x), "of floats": lambda: both(lambda a: (a * 100).long(), floats),
            "mask": lambda: both(lambda a: a > 1, floats), "new": self.new_integers,
            "of one rank": lambda: both(lambda a, b: b if self.rank else (a * 100).long(), floats, self.new_integers()),
            "written": lambda: both(lambda a: torch.empty_like(a).copy_(a), x),
        }  # fmt: skip
        return self.take(steps)

    def exchanged(self, pair: Pair) -> Pair:
        name = self.random.choice(["all_gather", "all_reduce", "broadcast", "message", "reduce"])
        self.trail.append(name)
        return both(lambda x: self.exchange(name, x), pair)

    def exchange(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Over NCCL on the card, over gloo on the host."""
        x = x.contiguous() if x.is_floating_point() else x.long().contiguous()
        group, last = (None if x.is_cuda else self.gloo), dist.get_world_size() - 1
        out = x.clone()
        if name == "all_gather":
            parts = [torch.empty_like(x) for _ in range(last + 1)]
            dist.all_gather(parts, x, group=group)
            out = parts[last]
        elif name == "all_reduce":
            dist.all_reduce(out, dist.ReduceOp.MAX, group=group)
        elif name == "broadcast":
            dist.broadcast(out, last, group=group)
        elif name == "reduce":
            dist.reduce(out, 0, dist.ReduceOp.MIN, group=group)
            out = out if self.rank == 0 else x  # another rank's is not defined
        elif last and self.rank == 0:
            dist.send(x, last, group=group)
        elif last and self.rank == last:
            out = torch.empty_like(x)
            dist.recv(out, 0, group=group)
        return out

    def take(self, steps: dict[str, Callable[[], Any]]) -> Any:
        name = self.random.choice(sorted(steps))
        self.trail.append(name)
        return steps[name]()

    def faults(self, steps: int) -> list[str]:
        """What the host read and must not have."""
        for _ in range(steps):
            try:
                if self.random.random() < 0.5:
                    self.floats.append(self.float_step())
                else:
                    self.integers.append(self.integer_step())
            except RuntimeError as error:  # by an index that nobody computed, say
                if "not computed" not in str(error):
                    raise
                self.integers.append(self.new_integers())  # as many lists on every rank
            del self.floats[:-4], self.integers[:-4]
        faults = [
            f"floats of {pair.card.dtype} that are not finite: {self.trail}"
            for pair in self.floats
            if not pair.card.cpu().isfinite().all()
        ]
        for pair in self.integers:
            try:
                values = pair.card.cpu()
            except RuntimeError as error:
                if "not computed" not in str(error):
                    raise
                continue
            if pair.host is not None and not torch.equal(values, pair.host):
                faults.append(f"integers that are wrong: {self.trail}")
            elif values.long().min() < 0:
                faults.append(f"integers that nobody wrote: {self.trail}")
        return faults


def run(rank: int, ranks: int, first: int, last: int, store: str) -> list[str]:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=ranks)
    gloo = dist.new_group(backend="gloo")
    return [
        f"seed {seed}, rank {rank}: {fault}" for seed in range(first, last) for fault in Program(seed, gloo).faults(12)
    ]


def faults(ranks: int, first: int, last: int) -> list[str]:
    from tests.emulated_cuda.test_values import run  # by a name that the ranks can import

    env = {"EMUCUDA_COMPUTE": "0", "EMUCUDA_POISON": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    with tempfile.TemporaryDirectory() as folder:
        processes = [start(run, rank, ranks, first, last, f"{folder}/store", **env) for rank in range(ranks)]
        outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [fault for output, _ in outputs for fault in json.loads(output.splitlines()[-1])]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_never_reads_what_nobody_computed(ranks: int) -> None:
    assert faults(ranks, 0, 60) == []
