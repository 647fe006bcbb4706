"""Estimates as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..hardware import calibration
from ..memory.units import gib
from . import history
from .advise import Change
from .model.estimate import MemoryEstimate
from .target import Target


def show(title: str, estimate: MemoryEstimate, target: Target) -> str:
    """What one rank needs, where its peak is, by phase and by category."""
    where = f"{target.world_size} × {estimate.device}"
    lines = [
        f"{title} on {where}" + (f", {gib(target.device_memory)} each" if target.device_memory else ""),
        f"{estimate.n_params / 1e6:,.1f} M parameters; figures are of rank {estimate.rank}, which holds the most",
        "",
        *_peak(estimate),
        "",
        *_phases(estimate),
        "",
        *_categories(estimate),
    ]
    lines += [f"note: {note}" for note in estimate.notes]
    experience = history.agreement(target.gpu.device_name if target.gpu else calibration.cpu_name())
    lines += [experience] if experience else []
    return "\n".join(lines)


def _peak(estimate: MemoryEstimate) -> Iterable[str]:
    peak = estimate.peak
    place = peak.phase + (f", {peak.module}" if peak.module else "")
    yield f"peak       {gib(peak.allocated)} allocated, in {place}"
    on_cpu = estimate.device == "cpu"
    if not on_cpu:
        yield f"reserved   {gib(peak.reserved)} by torch's allocator, of which it needs {gib(peak.required)}"
        yield f"outside    {gib(estimate.overhead)} for the CUDA context and communicators ({estimate.overhead_from})"
    if estimate.host_peak:
        yield f"host       {gib(estimate.host_peak)} of tensors, beside the process itself"
    if estimate.verdict is None:
        return
    limits = []
    if estimate.device_memory is not None:
        where = "for tensors" if on_cpu else "on the GPU"
        limits.append(f"{gib(estimate.needed)} of {gib(estimate.device_memory)} {where}")
    if estimate.host_memory is not None:
        limits.append(f"{gib(estimate.host_peak)} of {gib(estimate.host_memory)} on the host")
    yield f"verdict    {estimate.verdict}: {' and '.join(limits)} (± {100 * estimate.uncertainty:.0f} %)"


def _phases(estimate: MemoryEstimate) -> Iterable[str]:
    rows = [("phase", "allocated", "reserved", "host")]
    for name, phase in estimate.phases.items():
        rows.append((name, gib(phase.allocated), gib(phase.reserved), gib(phase.host)))
    return columns(rows)


def _categories(estimate: MemoryEstimate) -> Iterable[str]:
    rows = [("at the peak", "device", "host")]
    for name, category in estimate.categories.items():
        rows.append((name, gib(category.device), gib(category.host)))
    return columns(rows)


def show_changes(changes: Sequence[Change]) -> str:
    """What would lower the need, the setting that fits with the least cost first."""
    if not changes:
        return "no change of the config that was tried needs less"
    rows = [("change", "needs", "saves", "", "cost")]
    for change in changes:
        needs = change.estimate.needed
        rows.append((change.settings, gib(needs), gib(change.saving), change.estimate.verdict or "", change.cost))
    return "\n".join(["changes, each planned:", *columns(rows, left=(0, 3, 4))])


def columns(rows: Sequence[tuple[str, ...]], left: Sequence[int] = (0,)) -> list[str]:
    """Rows of text under each other; columns are flush right but for those in `left`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
