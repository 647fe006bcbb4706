"""Estimates as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import gib
from ..hardware.cards import other_sizes, said_of
from .advise import LIMIT_S, Changes
from .model.estimate import MemoryEstimate
from .target import Target


def show(title: str, estimate: MemoryEstimate, target: Target, not_planned: Sequence[str] = ()) -> str:
    """The memory of one rank: its peak, phases and categories; lines of `not_planned` take the verdict's place."""
    hardware = f"{target.world_size} × {said_of(target.gpu) if target.gpu else estimate.device}"
    layers = " and ".join(map(str, estimate.extrapolated_from))
    traced = f", from traces with {layers} layers" if layers else ""
    of_rank = f"figures are of rank {estimate.rank}, which takes the most{traced}"
    phases = [
        (name, gib(phase.allocated), gib(phase.reserved), gib(phase.host)) for name, phase in estimate.phases.items()
    ]
    categories = [(name, gib(bytes_.device), gib(bytes_.host)) for name, bytes_ in estimate.categories.items()]
    lines = [
        f"{title} on {hardware}" + (f", {gib(target.device_memory)} each" if target.device_memory else ""),
        f"{estimate.n_params / 1e6:,.1f} M parameters; {of_rank}",
        "",
        *_peak(estimate, not_planned),
        "",
        *columns([("phase", "allocated", "reserved", "host"), *phases]),
        "",
        *columns([("at the peak", "device", "host"), *categories]),
    ]
    lines += [f"note: {note}" for note in (*estimate.notes, *other_cards(target))]
    return "\n".join(lines)


def other_cards(target: Target) -> Iterable[str]:
    if target.gpu is not None and target.card_is_assumed:
        yield f"no card was named, so the plan is for {target.gpu.name}; pass --gpu NAME for yours, or run.device=cpu"
    elif target.gpu is not None:
        for gpu in other_sizes(target.gpu):
            yield f"{target.gpu.name} is the card above; pass --gpu {gpu.name} for {said_of(gpu)}, {gib(gpu.memory)}"


def first_look(estimate: MemoryEstimate) -> str:
    """A rough estimate in one line, shown while the exact trace runs."""
    limit = f" of {gib(estimate.device_memory)}" if estimate.device_memory else ""
    verdict = f": {estimate.verdict}" if estimate.verdict else ""
    layers = " and ".join(map(str, estimate.extrapolated_from))
    needed = f"about {gib(estimate.needed)}{limit}{verdict}"
    return f"first look, from traces with {layers} layers: {needed}; the trace of all layers follows"


def _peak(estimate: MemoryEstimate, not_planned: Sequence[str]) -> Iterable[str]:
    peak = estimate.peak
    moment = peak.phase + (f", {peak.module}" if peak.module else "")
    yield f"peak       {gib(peak.allocated)} allocated, in {moment}"
    on_cpu = estimate.device == "cpu"
    if not on_cpu:
        yield f"reserved   {gib(peak.reserved)} by torch's allocator, of which it needs {gib(peak.required)}"
        yield f"outside    {gib(estimate.overhead)} for the CUDA context and communicators ({estimate.overhead_from})"
    if estimate.host_peak:
        yield f"host       {gib(estimate.host_peak)} of tensors, beside the process itself"
    yield from (f"verdict    {line}" for line in not_planned)
    if not_planned:
        yield "rehearse   `shardkit rehearse -- COMMAND` runs the program itself, with these keys, on emulated GPUs"
    if estimate.verdict is None:
        return
    limits = []
    if estimate.device_memory is not None:
        limited_memory = "for tensors" if on_cpu else "on the GPU"
        limits.append(f"{gib(estimate.needed)} of {gib(estimate.device_memory)} {limited_memory}")
    if estimate.host_memory is not None:
        limits.append(f"{gib(estimate.host_peak)} of {gib(estimate.host_memory)} on the host")
    label, verdict = ("without", f"them: {estimate.verdict}") if not_planned else ("verdict", estimate.verdict)
    sure = f"(± {100 * estimate.uncertainty:.0f} %){estimate.condition}"
    yield f"{label:<9}  {verdict}: {' and '.join(limits)} {sure}"


def show_changes(changes: Changes) -> str:
    """Changes that lower the memory, in the order of `changes_that_fit`, and those that there was no time to plan."""
    lines = []
    if changes:
        rows = [("change", "needs", "saves", "", "cost")]
        for change in changes:
            about = "about " if change.rough else ""
            needs, saves = f"{about}{gib(change.estimate.needed)}", gib(change.saving)
            rows.append((change.settings, needs, saves, change.estimate.verdict or "", change.cost))
        rough = next((change.estimate.extrapolated_from for change in changes if change.rough), ())
        how = f", from traces with {' and '.join(map(str, rough))} layers" if rough else ""
        lines += [f"changes, each planned{how}:", *columns(rows, flush_left=(0, 3, 4))]
    elif not changes.left_out:
        lines.append("none of the changes that were planned needs less memory")
    if changes.left_out:
        lines.append(f"not tried, as planning them takes more than {LIMIT_S:.0f} s: {'; '.join(changes.left_out)}")
    return "\n".join(lines)


def columns(rows: Sequence[tuple[str, ...]], flush_left: Sequence[int] = (0,)) -> list[str]:
    """Rows of aligned text; columns are flush right except those in `flush_left`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in flush_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def misfit(estimate: MemoryEstimate) -> str:
    """One line that says which memory is short, by how much and where."""
    peak = estimate.peak
    if estimate.device_memory is not None and estimate.needed > estimate.device_memory:
        moment = peak.phase + (f", {peak.module}" if peak.module else "")
        whose = "for the tensors of each rank" if estimate.device == "cpu" else "on each GPU"
        limit = f"{gib(estimate.device_memory)} ({estimate.device})"
        return f"the job needs {gib(estimate.needed)} {whose} of {limit}; the peak is in {moment}"
    return f"each rank needs {gib(estimate.host_peak)} of host memory, and has {gib(estimate.host_memory or 0)}"
