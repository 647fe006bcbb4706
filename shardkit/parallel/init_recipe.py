"""The recorded initialisation of one tensor, which can be replayed for any range of it.

A tensor is divided into chunks of `CHUNK` values, and each chunk is drawn with a generator of its own. A chunk's values
depend only on the seed, the tensor's name and the chunk's index. So a rank draws just the chunks that its shard
touches, and every rank and engine gets the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 2**18
"""Values of a chunk: 1 MiB of fp32. Smaller tensors are drawn whole."""


@dataclass(frozen=True)
class InitCall:
    """One recorded call, on the range [start, end) of a flattened tensor.

    Attributes:
        run: the function, called with the range's elements, then `args`.
        random: whether it draws random numbers, and takes a generator.
        overwrites: whether its results do not depend on the old values.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    start: int
    end: int
    random: bool
    overwrites: bool


class InitRecipe:
    """The calls that initialise one tensor, in order.

    Attributes:
        key: the name to seed the draws by; empty for a parameter, which is seeded by its own name.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.key = ""
        self.numel = numel
        self.dtype = dtype
        self._calls: list[InitCall] = []

    def add(self, call: InitCall) -> None:
        """Record a call. If it overwrites the whole tensor, the calls before it are forgotten."""
        if self._sets_all(call):
            self._calls.clear()
        self._calls.append(call)

    def _sets_all(self, call: InitCall) -> bool:
        return call.overwrites and (call.start, call.end) == (0, self.numel)

    @property
    def complete(self) -> bool:
        """Whether the calls write every element, whatever the memory held before."""
        return bool(self._calls) and self._sets_all(self._calls[0])

    def fill(self, seed: int, out: torch.Tensor, start: int = 0) -> int:
        """Write the values [start, start + out.numel()) of the flattened tensor into `out`.

        Args:
            out: 1-D, of any dtype and device.

        Returns:
            The number of random values drawn: at most those of two chunks more than `out` has.
        """
        drawn, end = 0, start + out.numel()
        buffer = torch.empty(min(CHUNK, self.numel), dtype=self.dtype)
        # A copy to a device would convert in new host memory each time, which glibc before 2.38 hardly uses again.
        converted = torch.empty_like(buffer, dtype=out.dtype)
        generator = torch.Generator()
        for index in range(start // CHUNK, -(-end // CHUNK)):
            begin = index * CHUNK
            chunk = buffer[: min(CHUNK, self.numel - begin)]
            if not self.complete:
                chunk.zero_()
            # torch uses 32 bits of a seed. Neighbouring seeds surely differ; hashes of 2^16 chunks might collide.
            drawn += self._draw(chunk, begin, generator.manual_seed(seed + index))
            low, high = max(start, begin), min(end, begin + chunk.numel())
            overlap = chunk[low - begin : high - begin]
            if out.dtype != self.dtype:
                overlap = converted[: high - low].copy_(overlap)
            out[low - start : high - start].copy_(overlap)
        return drawn

    def _draw(self, chunk: torch.Tensor, begin: int, generator: torch.Generator) -> int:
        """Run the calls on the chunk that begins at element `begin`; returns the number of random values drawn."""
        drawn = 0
        for call in self._calls:
            low, high = max(call.start - begin, 0), min(call.end - begin, chunk.numel())
            if low < high:
                part = chunk[low:high]
                if call.random:
                    call.run(part, *call.args, generator=generator)
                    drawn += part.numel()
                else:
                    call.run(part, *call.args)
        return drawn
