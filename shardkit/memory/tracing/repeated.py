"""Repeat a traced step within its log, where tracing another one would only log the same again."""

from __future__ import annotations

from collections import defaultdict
from copy import copy

from .events import EventLog


def repeat_last_step(log: EventLog, end: str) -> bool:
    """Insert a copy of the last step before it, as if three steps had been traced instead of two.

    A step repeats itself if every storage that it leaves behind takes the place of one that it frees, with the same
    size, device and stream, as gradients do. All others must be as large after the step as before it.

    Args:
        end: the phase that is marked at the end of each step.

    Returns:
        False if the step does not repeat itself, and the log is unchanged.
    """
    ends = [at for at, (_, phase, module) in enumerate(log.marks) if (phase, module) == (end, "")]
    if len(ends) < 2:
        return False
    begin, stop = log.marks[ends[-2]][0], log.marks[ends[-1]][0]
    before, step, after = log.events[:begin], log.events[begin:stop], log.events[stop:]
    n_older = max((index for index, _ in before), default=-1) + 1
    successors = _successors(log, before, step, n_older)
    if successors is None:
        return False
    copies: dict[int, int] = {}
    for index, _ in step:
        if index >= n_older and index not in copies:
            copies[index] = len(log.allocations)
            log.allocations.append(copy(log.allocations[index]))
    replaced = {older: copies[index] for older, index in successors.items()}
    for older, copied_index in replaced.items():
        log.allocations[copied_index].consumed = log.allocations[older].consumed  # as the step frees both
    copied = [(copies.get(index, index), n_bytes) for index, n_bytes in step]
    log.events[:] = [*before, *copied, *((replaced.get(index, index), n_bytes) for index, n_bytes in step), *after]
    n_events, marks = len(step), log.marks[ends[-2] + 1 :]
    log.marks[ends[-1] + 1 :] = [(at + n_events, phase, module) for at, phase, module in marks]
    in_step = [at for at in log.releases if begin <= at < stop]
    log.releases[:] = [
        *(at for at in log.releases if at < stop),
        *(at + n_events for at in [*in_step, *(at for at in log.releases if at >= stop)]),
    ]
    return True


def _successors(
    log: EventLog, before: list[tuple[int, int]], step: list[tuple[int, int]], n_older: int
) -> dict[int, int] | None:
    """Each storage that the step frees → the one made in it that takes its place; `None` if they do not match."""
    sizes: dict[int, int] = defaultdict(int)
    for index, n_bytes in before:
        sizes[index] += n_bytes
    changes: dict[int, int] = defaultdict(int)
    for index, n_bytes in step:
        changes[index] += n_bytes
    freed: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    made: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for index in sorted(index for index, n_bytes in changes.items() if n_bytes):
        allocation, size = log.allocations[index], sizes[index] + changes[index]
        if index >= n_older:
            made[allocation.device, allocation.stream, size].append(index)
        elif size == 0:
            freed[allocation.device, allocation.stream, sizes[index]].append(index)
        else:
            return None
    if {key: len(indices) for key, indices in freed.items()} != {key: len(indices) for key, indices in made.items()}:
        return None
    return {older: newer for key, indices in freed.items() for older, newer in zip(indices, made[key], strict=True)}
