"""How long a step takes, from the segments of a traced one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass
class Segment:
    """A phase of one micro-batch (or the optimizer step): seconds that each part of the hardware is busy.

    Attributes:
        compute: kernels; without those that backward runs again.
        recompute: kernels of forward, run again by backward.
        dispatch: issuing operators.
        links: collectives.
        copies: between device and host.
        host: kernels on the CPU, for a job on GPUs.
    """

    phase: str
    compute: float = 0.0
    recompute: float = 0.0
    dispatch: float = 0.0
    links: float = 0.0
    copies: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    collectives: float = 0.0

    def along(self, other: Segment, at: float) -> Segment:
        """The segment on the line through this one (at 0) and another (at 1)."""
        names = [field.name for field in fields(self) if field.name != "phase"]
        mine = {name: getattr(self, name) for name in names}
        return Segment(self.phase, **{k: max(0.0, v + (getattr(other, k) - v) * at) for k, v in mine.items()})


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one optimizer step of one rank.

    Attributes:
        parts: seconds by what the step waits for: compute, recompute, dispatch, links, copies, host; add up to
            `seconds`. What is hidden behind something longer does not count.
        flops: of the step, recomputation included.
        targets: tokens (or what else the loss counts) of the step, of all ranks.
        measured: the hardware's speeds were measured on this machine.
    """

    seconds: float
    parts: Mapping[str, float]
    flops: float
    targets: float
    measured: bool

    @property
    def tokens_per_s(self) -> float:
        return self.targets / self.seconds

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> StepTime:
        return cls(**obj)


def step_time(
    segments: Sequence[Segment], micro_batches: int, targets: float, overlap: bool, measured: bool
) -> StepTime:
    """The time of a step of `micro_batches`, of which some were traced.

    Args:
        targets: of a step, of all ranks.
        overlap: see `waits`.
        measured: the segments' speeds were.
    """
    parts: dict[str, float] = {}
    flops = 0.0
    for segment in repeated(segments, micro_batches):
        flops += segment.flops
        for name, seconds in waits(segment, overlap).items():
            parts[name] = parts.get(name, 0.0) + seconds
    return StepTime(sum(parts.values()), parts, flops, targets, measured)


def waits(segment: Segment, overlap: bool) -> dict[str, float]:
    """What a segment waits for, in seconds.

    With overlap, kernels, their issue, collectives and copies run side by side and the longest one counts, but for one
    collective, the first gather or the last reduction, that nothing hides; work on the host comes on top. Without
    overlap everything adds up.
    """
    kernels = segment.compute + segment.recompute
    busy = {"compute": segment.compute, "recompute": segment.recompute, "host": segment.host}
    rest = {"dispatch": segment.dispatch, "links": segment.links, "copies": segment.copies}
    if not overlap:
        return busy | rest
    longest = max(rest, key=rest.__getitem__)
    found = busy | dict.fromkeys(rest, 0.0)
    found[longest] = max(0.0, rest[longest] - kernels)
    if segment.collectives:
        found["links"] = max(found["links"], segment.links / segment.collectives)
    return found


def repeated(segments: Sequence[Segment], micro_batches: int) -> list[Segment]:
    """The segments of a whole step: its middle micro-batches are like the last but one that was traced."""
    traced = sum(segment.phase == "forward" for segment in segments)
    if traced >= micro_batches:
        return list(segments)
    middle = _micro_batch(segments, traced - 2)
    at = next(index for index, segment in enumerate(segments) if segment is middle[-1]) + 1
    return [*segments[:at], *(replace(s) for s in middle * (micro_batches - traced)), *segments[at:]]


def _micro_batch(segments: Sequence[Segment], index: int) -> list[Segment]:
    """Forward and backward of one micro-batch."""
    starts = [at for at, segment in enumerate(segments) if segment.phase == "forward"]
    return list(segments[starts[index] : starts[index + 1]])
