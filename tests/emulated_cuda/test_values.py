"""Random programs without computing: what the host reads is right, a stand-in or refused, and never what lay there.

New memory is poisoned: a float that nobody wrote is NaN, an integer -1.
`python -m tests.emulated_cuda.test_values 0:500` runs more seeds.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulated_cuda import call, needs_emulation

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

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
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
            "reduced": lambda: both(self.collective, x), "part": lambda: both(lambda a: a.roll(len(a) // 3), x),
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
            "gathered": lambda: both(self.collective, x), "of floats": lambda: both(lambda a: (a * 100).long(), floats),
            "mask": lambda: both(lambda a: a > 1, floats), "new": self.new_integers,
            "written": lambda: both(lambda a: torch.empty_like(a).copy_(a), x),
        }  # fmt: skip
        return self.take(steps)

    def collective(self, x: torch.Tensor) -> torch.Tensor:
        """Of one rank, where each leaves the values as they are."""
        if not x.is_cuda:
            return x.clone()
        out = torch.empty_like(x)
        steps: dict[str, Callable[[], object]] = {
            "all_gather": lambda: dist.all_gather_into_tensor(out, x.contiguous()),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x.contiguous()),
            "all_reduce": lambda: dist.all_reduce(out.copy_(x), dist.ReduceOp.MAX),
            "all_to_all": lambda: dist.all_to_all_single(out, x.contiguous()),
            "broadcast": lambda: dist.broadcast(out.copy_(x), 0),
        }  # fmt: skip
        self.take(steps)
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


def run(first: int, last: int, world_file: str) -> list[str]:
    dist.init_process_group("nccl", f"file://{world_file}", rank=0, world_size=1)
    return [f"seed {seed}: {fault}" for seed in range(first, last) for fault in Program(seed).faults(12)]


SETTINGS = {"EMUCUDA_COMPUTE": "0", "EMUCUDA_POISON": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


def test_the_host_never_reads_what_nobody_computed(tmp_path: Path) -> None:
    assert call(run, 0, 40, str(tmp_path / "world"), **SETTINGS) == []


def main(seeds: str) -> int:
    from tests.emulated_cuda.test_values import run  # by a name that the other process can import

    first, _, last = seeds.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        faults = call(run, int(first), int(last), f"{folder}/world", **SETTINGS)
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
