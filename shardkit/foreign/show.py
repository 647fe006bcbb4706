"""`shardkit plan --from`: configs of other tools as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..plan.model.estimate import MemoryEstimate
    from .together import Said
    from .translate import Job

OVERRIDES = ("train.eval_samples=0",)
"""Their evaluation is not shardkit's."""
_WIDTH = 46


def mapping(job: Job) -> Iterator[str]:
    """Line by line, where every key of the files ended."""
    from .files import family

    for name in dict.fromkeys(said.file for said in job.said):
        keys = [said for said in job.said if said.file == name]
        yield name if "default" in name else f"{name} ({family(keys[0].tool)})"
        yield from (_line(job, said) for said in keys if said.fate in ("mapped", "default", "auto"))
        yield from _others(keys)
    if job.added:
        yield "set because their loop differs"
        yield from (_row(f"{ours}={_value(value)}", why) for ours, value, why in job.added)


def show_notes(job: Job) -> Iterator[str]:
    """What in the files silently changes the mathematics, and misspelt keys, each with its fix."""
    for note in job.notes:
        yield f"note: {note.cause}"
        yield f"  fix: {note.fix}"


def left_out(job: Job, config: RunConfig, estimate: MemoryEstimate) -> Iterator[str]:
    """Differences that the plan does not have, each with its most bytes, and whether these still fit."""
    from ..errors import gib

    if job.left_out:
        yield "\nnot part of the plan"
    more = 0
    for one in job.left_out:
        amount = one.amount(config)
        more += amount
        yield f"  {one.text}" + (f": {gib(amount)} at most" if amount else "")
    limit, needed = estimate.device_memory, estimate.needed + more
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


def moments(job: Job, config: RunConfig, estimate: MemoryEstimate) -> list[Moment]:
    """Loading and saving in their loop, in bytes of one rank."""
    from ..config.capability import mesh_shape
    from .transfers import Sizes

    shards = estimate.world_size
    if config.parallel.strategy == "hsdp":
        shards = mesh_shape(config, shards, min(shards, job.gpus_per_node or 8))[-1]
    sizes = Sizes(estimate.n_params, estimate.largest, estimate.largest_block, shards)
    return [
        Moment(one.phase, one.ranks, one.on_device(sizes, estimate.resident), one.on_host(sizes), one.in_file(sizes),
               one.text, one.expected, one.fix)
        for one in job.transfers
    ]  # fmt: skip


def show_moments(found: list[Moment]) -> Iterator[str]:
    """A table of the moments, each followed by its reason."""
    from ..errors import gib
    from ..plan.show import columns

    rows = [("beside the steps", "ranks", "device", "host", "mapped")]
    rows += [(one.phase if one.expected else f"({one.phase})", one.ranks, gib(one.device), gib(one.host),
              gib(one.mapped)) for one in found]  # fmt: skip
    head, *lines = columns(rows, flush_left=(0, 1))
    yield head
    for line, one in zip(lines, found, strict=True):
        yield f"{line}  {one.text}"


def misfits(found: list[Moment], estimate: MemoryEstimate, ranks_per_node: int) -> Iterator[str]:
    """Moments that need more than the device or the host has, though the steps may fit, with fixes in their keys."""
    from ..errors import gib

    for one in (one for one in found if one.expected):
        device = one.device + estimate.overhead
        if estimate.device_memory is not None and device > estimate.device_memory:
            limit = gib(estimate.device_memory)
            yield from _misfit(one, f"{gib(device)} of {limit} on the device of {one.ranks}")
        if estimate.host_memory is None:
            continue
        needed = ranks_per_node * estimate.host_peak + one.host * (1 if one.ranks == "rank 0" else ranks_per_node)
        machine = ranks_per_node * estimate.host_memory
        if needed > machine:
            yield from _misfit(one, f"{gib(needed)} of {gib(machine)} on a machine's host")


def _misfit(one: Moment, amount: str) -> Iterator[str]:
    yield f"{one.phase} does not fit: {amount}: {one.text}"
    if one.fix:
        yield f"  fix: {one.fix}"


def _line(job: Job, said: Said) -> str:
    if any(problem.kind == "contradiction" and said.key in problem.keys for problem in job.problems):
        return _row(f"{said.key}: {_value(said.value)}", "→ contradicted")
    ours = [_shown(job, key, value) for key, value in said.ours.items()]
    text = ", ".join(dict.fromkeys(one for one in ours if one)) or ("nothing to set" if not said.note else "")
    return _row(f"{said.key}: {_value(said.value)}", "→ " + "; ".join(filter(None, (text, said.note))))


def _shown(job: Job, ours: str, value: Any) -> str:
    """A setting as the plan has it; pseudo-keys as what they decided."""
    if ours in ("fp16", "bf16", "tf32"):
        return f"precision.mode={job.settings['precision.mode']}" if value else f"not {ours}"
    if ours == "engine":
        return f"parallel.strategy={job.settings['parallel.strategy']}"
    if ours in ("gpus", "machines"):
        other = f" (the plan: {job.gpus})" if ours == "gpus" and job.gpus != value else ""
        return f"{value} {'rank' if ours == 'gpus' else 'machine'}{'' if value == 1 else 's'}{other}"
    if ours.startswith("optim.betas."):
        return f"optim.betas={_value(job.settings['optim.betas'])}" if "optim.betas" in job.settings else ""
    if ours.startswith("parallel.ds_config.") and ours in job.settings:
        return f"passed through as {_value(value)}"
    if ours in job.settings and job.settings[ours] != value:
        return f"{ours}={_value(job.settings[ours])}"
    return f"{ours}={_value(value)}" + ("" if ours in job.settings or value in (None, "none") else " (no effect here)")


def _others(keys: list[Said]) -> Iterator[str]:
    from .combine import unknown_key

    plain = [said.key for said in keys if said.fate == "absent" and not said.note]
    yield from (_row(said.key, f"no counterpart: {said.note}") for said in keys if said.fate == "absent" and said.note)
    yield from (_row(said.key, f"ignored there: {said.note}") for said in keys if said.fate == "ignored")
    yield from (
        _row(f"{said.key}: {_value(said.value)}", f"not planned: {said.note}")
        for said in keys
        if said.fate == "unplanned"
    )
    for said in keys:
        if said.fate == "unknown":
            hint = f"; did you mean {said.note}?" if said.note else ""
            yield _row(said.key, f"{unknown_key(said.tool, said.key)}{hint}")
    if plain:
        yield f"  without a counterpart, and without memory: {', '.join(plain)}"


def _row(left: str, right: str) -> str:
    return f"  {left:<{_WIDTH}}  {right}"


def _value(value: Any) -> str:
    from ..config.errors import shown

    return value if isinstance(value, str) else shown(value)


def as_json(job: Job) -> dict[str, Any]:
    """The mapping for programs."""
    return {
        "keys": [
            {"file": s.file, "key": s.key, "value": s.value, "fate": s.fate, "ours": s.ours, "note": s.note}
            for s in job.said
        ],
        "settings": job.settings,
        "added": [{"key": key, "value": value, "reason": why} for key, value, why in job.added],
        "not_planned": job.not_planned,
        "notes": [{"cause": note.cause, "fix": note.fix} for note in job.notes],
        "left_out": [{"text": one.text, "bytes_per_token": one.per_token} for one in job.left_out],
    }


def details(
    job: Job, config: RunConfig, estimate: MemoryEstimate, ranks_per_node: int
) -> tuple[list[str], list[str], dict[str, Any]]:
    """What a printed plan of other tools' files has beyond the estimate.

    Returns:
        (lines below the estimate, those among them that say that loading or saving does not fit, fields of the JSON).
    """
    from ..errors import printable

    transfers = moments(job, config, estimate)
    too_large = list(misfits(transfers, estimate, ranks_per_node))
    lines = [*map(printable, show_notes(job)), "", *show_moments(transfers), *too_large]
    fields: dict[str, Any] = {"from": {**as_json(job), "beside_the_steps": [asdict(moment) for moment in transfers]}}
    if job.not_planned:
        fields |= {"verdict": "not planned", "verdict_without": estimate.verdict}
    return [*lines, *left_out(job, config, estimate)], too_large, fields


def save(job: Job, folder: Path) -> Path:
    """Write the job's config as `from.yaml`, for a search over engines: without keys that only some of them take."""
    import yaml

    from ..plan.search.trial import writing
    from .translate import OF_ONE_ENGINE, nested

    path = folder / "from.yaml"
    kept = {key: value for key, value in job.settings.items() if not key.startswith(OF_ONE_ENGINE)}
    with writing(folder):
        path.write_text(yaml.safe_dump(nested(kept), sort_keys=False), encoding="utf-8")
    return path
