"""The result of a search, `plan --auto`, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import gib
from ...hardware.cards import said_of
from ..model.cost import SPEED_ERROR
from ..show import columns, other_cards
from ..target import Target
from .search import AXES, Combination, SearchResult, Setting, named
from .trial import Trial

_WAITS = {
    "compute": "kernels take longer",
    "recompute": "forward runs twice, the second time in backward",
    "dispatch": "operators are issued more often, each for less work",
    "issue": "more operators are issued",
    "links": "more time in collectives",
    "exchanges": "layers wait for other ranks",
    "copies": "more over the bus to the host",
    "host": "the CPU updates the weights",
}
_SAME = 0.005
FRONT_HEAD = ("engine", "checkpointing", "precision", "micro-batch", "needs", "tokens/s", "of the best")


def show_found(title: str, result: SearchResult, target: Target) -> str:
    """The choice, the front of memory against speed, and why the alternatives lose."""
    best = result.best
    hardware = f"{target.world_size} × {said_of(target.gpu) if target.gpu else 'cpu'}"
    measured = best.estimate is not None and best.estimate.time is not None and best.estimate.time.measured
    tried = len(result.fitting) + len(result.misfits)
    shares = [
        f"{name} {seconds * best.tokens_per_s:.0%}"
        for name, seconds in sorted(best.waits.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    host_note = []
    if target.host_memory is None and best.estimate is not None and "on the CPU" in best.combination.engine:
        needed = gib(best.estimate.host_peak)
        host_note = [f"host       {needed} per rank; pass --host-memory to check that a machine has it"]
    lines = [
        f"{title} on {hardware}, {gib(target.device_memory or 0)} each; {result.samples} samples per step",
        f"{tried} combinations traced, {len(result.fitting)} fit, {len(result.refused)} cannot be planned",
        *_stopped(result),
        *(f"note: {note}" for note in other_cards(target)),
        "",
        f"best       {named(best)}",
        f"settings   {' '.join(best.settings) or 'unchanged'}",
        f"needs      {gib(best.needed)}, {best.filled:.0%} of what may be used"
        + (best.estimate.condition if best.estimate is not None else ""),
        f"speed      {best.tokens_per_s:,.0f} tokens/s predicted, from "
        + ("speeds measured here" if measured else "typical speeds (shardkit doctor --calibrate measures them)"),
        f"           the order of settings was tested, on CPUs; on GPUs tokens/s were {SPEED_ERROR} off",
        f"waits for  {', '.join(shares)}",
        *host_note,
        "",
        "memory against speed (nothing else is both smaller and faster):",
        *columns([FRONT_HEAD, *front_rows(result)], flush_left=(0, 1, 2)),
        "",
        "why:",
        *(f"- {reason}" for reason in reasons(result)),
    ]
    return "\n".join(lines)


def _stopped(result: SearchResult) -> list[str]:
    if not result.stopped:
        return []
    lines = [f"{result.stopped}: {len(result.left_out)} combinations were not planned; this is the best of the others"]
    lines += list(not_tried(result.left_out, [*result.fitting, *result.misfits]))
    if result.best.estimate is None:
        lines.append("traced roughly only: plan the written config before you launch it")
    return lines


def not_tried(left_out: Sequence[Combination], traced: Sequence[Setting]) -> Iterator[str]:
    """The combinations that a search did not plan, by engine; engines of which nothing was traced come first."""
    engines = {setting.combination.layout for setting in traced}
    by_engine: dict[str, list[str]] = {}
    for combination in left_out:
        by_engine.setdefault(combination.layout, []).append(f"{combination.policy} ({combination.precision})")
    if unseen := [engine for engine in by_engine if engine not in engines]:
        yield f"not tried at all: {'; '.join(unseen)}"
    by_rest: dict[str, list[str]] = {}
    for engine, names in by_engine.items():
        if engine in engines:
            by_rest.setdefault(", ".join(names), []).append(engine)
    for names_of_rest, with_it in by_rest.items():
        yield f"not tried: {'; '.join(with_it)} with checkpointing {names_of_rest}"


def front_rows(result: SearchResult) -> list[tuple[str, ...]]:
    """The front, fastest first, under `FRONT_HEAD`."""
    return [
        (
            setting.combination.layout, setting.combination.policy, setting.combination.precision,
            str(setting.micro_batch), gib(setting.needed), f"{setting.tokens_per_s:,.0f}",
            f"{setting.tokens_per_s / result.best.tokens_per_s:.0%}",
        )
        for setting in result.front
    ]  # fmt: skip


def reasons(result: SearchResult) -> Iterator[str]:
    """Axis by axis: the memory or the waits of the best setting with another value."""
    best = result.best
    axes: list[tuple[str, Callable[[Setting], str]]] = [
        ("", lambda s: s.combination.engine),
        ("checkpointing ", lambda s: s.combination.policy),
        ("", lambda s: s.combination.precision),
        *((f"{key} ", lambda s, at=at: str(s.combination.sizes[at])) for at, key in enumerate(AXES)),
    ]
    for label, value in axes:
        alternatives: dict[str, Setting] = {}
        for setting in (*result.fitting, *result.misfits):
            if value(setting) != value(best):
                alternatives.setdefault(value(setting), setting)
        for name, setting in alternatives.items():
            end = ", at the least" if setting.filled > 1 else f" (at best: {named(setting)})"
            sent = f"{gib(round(setting.sent))} a step in place of {gib(round(best.sent))}"
            collectives = f"; a rank sends {sent}" if label.strip() in AXES else ""
            yield f"{label}{name}: {_compared(setting, best)}{collectives}{end}"
    for at, key in enumerate(AXES):
        planned = {setting.combination.sizes[at] for setting in (*result.fitting, *result.misfits)}
        refused = {combination.sizes[at]: reason for combination, reason in result.refused.items()}
        for size in sorted(refused.keys() - planned):
            yield f"{key} {size}: {refused[size]}"
    larger = next((s for s in result.sizes if s.micro_batch > best.micro_batch), None)
    smaller = next((s for s in reversed(result.sizes) if s.micro_batch < best.micro_batch), None)
    for neighbour in (larger, smaller):
        if neighbour is not None:
            yield f"micro-batch {neighbour.micro_batch}: {_compared(neighbour, best)}"
    if result.refused:
        reason = next(iter(result.refused.values()))
        yield f"{len(result.refused)} combinations cannot be planned, such as: {reason}"


def _compared(alternative: Setting, best: Setting) -> str:
    if alternative.filled > 1:
        return f"does not fit: {gib(alternative.needed)}, {alternative.filled:.0%} of what may be used"
    slower = 1 - alternative.tokens_per_s / best.tokens_per_s
    if slower < _SAME:
        return "as fast"
    extra_seconds = {name: seconds - best.waits.get(name, 0.0) for name, seconds in alternative.waits.items()}
    longest = max(extra_seconds, key=extra_seconds.__getitem__)
    if longest == "dispatch" and alternative.micro_batch >= best.micro_batch:  # not smaller pieces of the same work
        policy = alternative.combination.policy
        longest = "recompute" if policy not in ("none", best.combination.policy) else "issue"
    return f"{slower:.0%} slower: {_WAITS[longest]}"


@dataclass(frozen=True)
class Verified:
    setting: Setting
    trial: Trial


def show_verified(verified: Sequence[Verified]) -> str:
    rows: list[tuple[str, ...]] = [("measured", "needs", "predicted", "tokens/s", "predicted")]
    for pair in verified:
        trial, setting = pair.trial, pair.setting
        peak = "–" if trial.peak is None else gib(trial.peak)
        speed = trial.outcome if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}"
        rows.append((named(setting), peak, gib(setting.needed), speed, f"{setting.tokens_per_s:,.0f}"))
    return "\n".join(columns(rows))
