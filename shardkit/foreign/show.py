"""`shardkit plan --from`: configs of other tools as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ..config.capability import mesh_shape
from ..config.errors import shown
from ..config.schema import RunConfig
from ..errors import gib, printable
from ..plan.model.estimate import MemoryEstimate
from ..plan.search.trial import writing
from ..plan.show import columns
from .combine import unknown_key
from .files import family
from .together import FileKey
from .transfers import Sizes
from .translate import OF_ONE_ENGINE, ForeignJob, nested

OVERRIDES = ("train.eval_samples=0",)
"""Overrides of every job of other tools: shardkit's evaluation is not part of their loops."""
_WIDTH = 46


def mapping(job: ForeignJob) -> Iterator[str]:
    """Line by line, where every key of the files ended."""
    for name in dict.fromkeys(file_key.file for file_key in job.file_keys):
        keys = [file_key for file_key in job.file_keys if file_key.file == name]
        yield name if "default" in name else f"{name} ({family(keys[0].tool)})"
        yield from (_line(job, file_key) for file_key in keys if file_key.fate in ("mapped", "default", "auto"))
        yield from _without_counterpart(keys)
    if job.added:
        yield "set because their loop differs"
        yield from (_row(f"{setting}={_value(value)}", reason) for setting, value, reason in job.added)


def show_notes(job: ForeignJob) -> Iterator[str]:
    """What in the files silently changes the mathematics, and misspelt keys, each with its fix."""
    for note in job.notes:
        yield f"note: {note.cause}"
        yield f"  fix: {note.fix}"


def left_out(job: ForeignJob, config: RunConfig, estimate: MemoryEstimate) -> Iterator[str]:
    """Differences that the plan does not have, each with its most bytes, and whether these still fit."""
    if job.left_out:
        yield "\nnot part of the plan"
    total = 0
    for difference in job.left_out:
        amount = difference.amount(config)
        total += amount
        yield f"  {difference.text}" + (f": {gib(amount)} at most" if amount else "")
    limit, needed = estimate.device_memory, estimate.needed + total
    if limit is not None and estimate.needed <= limit < needed:
        yield f"the job may not fit: it needs up to {gib(needed)} of {gib(limit)}"


@dataclass(frozen=True)
class Moment:
    """Loading or saving on some ranks: bytes on the device, in private memory of the host, mapped from the file.

    `fix`: a change of their keys that takes less; empty if there is none.
    """

    phase: str
    ranks: str
    device: int
    host: int
    mapped: int
    text: str
    expected: bool
    fix: str = ""


def moments(job: ForeignJob, config: RunConfig, estimate: MemoryEstimate) -> list[Moment]:
    """Loading and saving in the tool's loop, in bytes of one rank."""
    shards = estimate.world_size
    if config.parallel.sharding.replicates:
        shards = mesh_shape(config, shards, min(shards, job.gpus_per_node or 8))[-1]
    sizes = Sizes(estimate.n_params, estimate.largest, estimate.largest_block, shards)
    return [
        Moment(transfer.phase, transfer.ranks, transfer.on_device(sizes, estimate.resident),
               transfer.on_host(sizes, estimate.resident), transfer.in_file(sizes), transfer.text,
               transfer.expected, transfer.fix)
        for transfer in job.transfers
    ]  # fmt: skip


def show_moments(rows: list[Moment]) -> Iterator[str]:
    """A table of the moments, each followed by its reason."""
    cells = [("beside the steps", "ranks", "device", "host", "mapped")]
    for row in rows:
        phase = row.phase if row.expected else f"({row.phase})"
        cells.append((phase, row.ranks, gib(row.device), gib(row.host), gib(row.mapped)))
    head, *lines = columns(cells, flush_left=(0, 1))
    yield head
    for line, row in zip(lines, rows, strict=True):
        yield f"{line}  {row.text}"


def misfits(rows: list[Moment], estimate: MemoryEstimate, ranks_per_node: int) -> Iterator[str]:
    """Moments that need more memory than the device or the host has, each with a change of the files that helps."""
    for row in (row for row in rows if row.expected):
        device = row.device + estimate.overhead
        if estimate.device_memory is not None and device > estimate.device_memory:
            limit = gib(estimate.device_memory)
            yield from _misfit(row, f"{gib(device)} of {limit} on the device of {row.ranks}")
        if estimate.host_memory is None:
            continue
        needed = ranks_per_node * estimate.host_peak + row.host * (1 if row.ranks == "rank 0" else ranks_per_node)
        machine = ranks_per_node * estimate.host_memory
        if needed > machine:
            yield from _misfit(row, f"{gib(needed)} of {gib(machine)} on a machine's host")


def _misfit(row: Moment, amount: str) -> Iterator[str]:
    yield f"{row.phase} does not fit: {amount}: {row.text}"
    if row.fix:
        yield f"  fix: {row.fix}"


def _line(job: ForeignJob, file_key: FileKey) -> str:
    """The row of a key that has a counterpart."""
    if any(problem.kind == "contradiction" and file_key.key in problem.keys for problem in job.problems):
        return _row(f"{file_key.key}: {_value(file_key.value)}", "→ contradicted")
    settings = [_shown(job, setting, value) for setting, value in file_key.settings.items()]
    text = ", ".join(dict.fromkeys(filter(None, settings))) or ("nothing to set" if not file_key.note else "")
    return _row(f"{file_key.key}: {_value(file_key.value)}", "→ " + "; ".join(filter(None, (text, file_key.note))))


def _shown(job: ForeignJob, setting: str, value: Any) -> str:
    """A setting as the plan has it; pseudo-keys as what they decided."""
    if setting in ("fp16", "bf16", "tf32"):
        return f"precision.mode={job.settings['precision.mode']}" if value else f"not {setting}"
    if setting == "engine":
        return f"parallel.strategy={job.settings['parallel.strategy']}"
    if setting in ("gpus", "machines"):
        planned = f" (the plan: {job.gpus})" if setting == "gpus" and job.gpus != value else ""
        return f"{value} {'rank' if setting == 'gpus' else 'machine'}{'' if value == 1 else 's'}{planned}"
    if setting.startswith("optim.betas."):
        return f"optim.betas={_value(job.settings['optim.betas'])}" if "optim.betas" in job.settings else ""
    if setting.startswith("parallel.ds_config.") and setting in job.settings:
        return f"passed through as {_value(value)}"
    if setting in job.settings and job.settings[setting] != value:
        return f"{setting}={_value(job.settings[setting])}"
    return f"{setting}={_value(value)}" + (
        "" if setting in job.settings or value in (None, "none") else " (no effect here)"
    )


def _without_counterpart(keys: list[FileKey]) -> Iterator[str]:
    """The rows of keys that set nothing here: each fate together."""
    by_fate: dict[str, list[FileKey]] = {}
    for file_key in keys:
        by_fate.setdefault(file_key.fate, []).append(file_key)
    absent = by_fate.get("absent", [])
    yield from (_row(file_key.key, f"no counterpart: {file_key.note}") for file_key in absent if file_key.note)
    yield from (_row(file_key.key, f"ignored there: {file_key.note}") for file_key in by_fate.get("ignored", []))
    for file_key in by_fate.get("unplanned", []):
        yield _row(f"{file_key.key}: {_value(file_key.value)}", f"not planned: {file_key.note}")
    for file_key in by_fate.get("unknown", []):
        hint = f"; did you mean {file_key.note}?" if file_key.note else ""
        yield _row(file_key.key, f"{unknown_key(file_key.tool, file_key.key)}{hint}")
    harmless = [file_key.key for file_key in absent if not file_key.note]
    if harmless:
        yield f"  without a counterpart, and without memory: {', '.join(harmless)}"


def _row(key: str, fate: str) -> str:
    return f"  {key:<{_WIDTH}}  {fate}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def as_json(job: ForeignJob) -> dict[str, Any]:
    """The mapping for programs."""
    return {
        "keys": [
            {"file": s.file, "key": s.key, "value": s.value, "fate": s.fate, "ours": s.settings, "note": s.note}
            for s in job.file_keys
        ],
        "settings": job.settings,
        "added": [{"key": key, "value": value, "reason": reason} for key, value, reason in job.added],
        "not_planned": job.not_planned,
        "notes": [{"cause": note.cause, "fix": note.fix} for note in job.notes],
        "left_out": [{"text": difference.text, "bytes_per_token": difference.per_token} for difference in job.left_out],
    }


def details(
    job: ForeignJob, config: RunConfig, estimate: MemoryEstimate, ranks_per_node: int
) -> tuple[list[str], list[str], dict[str, Any]]:
    """What a printed plan of other tools' files has beyond the estimate.

    Returns:
        (lines below the estimate, those among them that say that loading or saving does not fit, fields of the JSON).
    """
    transfers = moments(job, config, estimate)
    too_large = list(misfits(transfers, estimate, ranks_per_node))
    lines = [*map(printable, show_notes(job)), "", *show_moments(transfers), *too_large]
    fields: dict[str, Any] = {"from": {**as_json(job), "beside_the_steps": [asdict(moment) for moment in transfers]}}
    if job.not_planned:
        fields |= {"verdict": "not planned", "verdict_without": estimate.verdict}
    return [*lines, *left_out(job, config, estimate)], too_large, fields


def save(job: ForeignJob, folder: Path) -> Path:
    """Write the job's config as `from.yaml`, for a search over engines: without keys that only some of them take."""
    path = folder / "from.yaml"
    settings = {key: value for key, value in job.settings.items() if not key.startswith(OF_ONE_ENGINE)}
    with writing(folder):
        path.write_text(yaml.safe_dump(nested(settings), sort_keys=False), encoding="utf-8")
    return path
