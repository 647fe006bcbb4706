"""Load a checkpoint: choose it, read this rank's ranges, and fall back to an older one if it is damaged."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..parallel.world import World
from ..strategies import Strategy
from ..strategies.base import Shard
from . import rng
from .native import layout
from .native.manifest import FILE_NAME, CorruptCheckpoint, Manifest, RunState, TensorEntry
from .native.reader import CheckpointReader, TensorSpec
from .native.writer import dtype_name
from .node_reads import Destination, Range, read_ranges

T = TypeVar("T")
BUCKET_BYTES = 64 * 2**20
"""Host memory of the exchange of what ranks share."""


def main_only(world: World, group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Run `action`, which changes the file system, on rank 0 while the other ranks wait; collective."""
    problem = None
    if world.is_main:
        try:
            action()
        except OSError as error:
            prefix = f"{error.filename}: " if error.filename else "run.dir: "
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            fix = "make room on its disk" if is_full else "check the owner and mode of run.dir"
            problem = CheckpointError(f"{prefix}{error.strerror}", fix)
    agreed(group, problem)


def agreed(group: dist.ProcessGroup, problem: Exception | None) -> None:
    """Raise one rank's problem on every rank, so that all end alike: a damaged checkpoint before other problems, and
    the lowest rank's before others'; collective."""
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    if raised := [error for error in problems if error is not None]:
        raise min(raised, key=lambda error: not isinstance(error, CorruptCheckpoint)) from problem


def together(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """What `action` returns on this rank. If it raises on a rank, it does so on every rank; see `agreed`."""
    problem: Exception | None = None
    try:
        returned = action()
    except Exception as error:
        problem = error
    agreed(group, problem)
    return returned


_LOG = logging.getLogger(__name__)


def candidates(source: Path) -> list[Path]:
    """The checkpoints at `source`, newest first: `source` itself, or those of a run or of a checkpoints folder."""
    if (source / FILE_NAME).exists() or layout.step_of(source) is not None:
        return [source]
    return layout.checkpoints(source / "checkpoints") or layout.checkpoints(source)


def resume(
    strategy: Strategy,
    world: World,
    group: dist.ProcessGroup,
    source: Path,
    on_corrupt: Literal["previous", "error"],
    own_root: Path | None = None,
    accept: Callable[[RunState], None] | None = None,
    left_out: Collection[str] = (),
) -> tuple[Path, RunState] | None:
    """Load the newest intact checkpoint of `source` into the strategy; collective.

    `own_root`: the folder to which this run saves. Checkpoints in it that are damaged, or newer than the loaded one,
    are renamed, because the run will write those steps again. `accept`: raises if the run's state does not suit the
    caller; called before anything is loaded. `left_out`: names of tensors that checkpoints of this run do not hold.
    Returns the checkpoint's path and the state of its run; `None` if `source` has no checkpoint.
    """
    paths: list[Path] = []
    main_only(world, group, lambda: paths.extend(candidates(source)))
    box = [paths]
    dist.broadcast_object_list(box, group=group, group_src=0)
    [paths] = box
    if not paths:
        return None
    damaged: list[Path] = []
    for path in paths:
        try:
            run = _load(strategy, world, group, path, accept, left_out)
        except CorruptCheckpoint as error:
            if on_corrupt == "error" or paths == [source]:
                raise CheckpointError(error.cause, _fix(path)) from error
            damaged.append(path)
            if world.is_main:
                _LOG.warning("%s; trying the checkpoint before it", error.cause)
            oldest_problem = error
            continue
        if own_root is not None:
            main_only(world, group, partial(_set_aside, own_root, path, damaged))
        return path, run
    raise CheckpointError(
        f"none of the {len(damaged)} checkpoints in {paths[0].parent} is intact; the oldest: {oldest_problem.cause}",
        "restore them from a copy, or start over with run.overwrite=true",
    )


def _fix(path: Path) -> str:
    """The fix to print for a damaged checkpoint: names an older one if there is one."""
    older = [p.name for p in layout.checkpoints(path.parent) if p != path]
    if not older:
        return "restore it from a copy, or start over with run.overwrite=true"
    return f"set checkpoint.on_corrupt=previous with run.resume=true, or resume from {path.parent / older[0]}"


def _set_aside(root: Path, loaded: Path, damaged: list[Path]) -> None:
    """Rename the checkpoints after the loaded one, because the run is about to write their steps again."""
    if loaded.parent.resolve() != root.resolve():
        return
    step = layout.step_of(loaded) or 0
    for path in layout.checkpoints(root):
        if (layout.step_of(path) or 0) > step:
            suffix = layout.CORRUPT if path in damaged else layout.SUPERSEDED
            _LOG.warning("%s is set aside as %s", path.name, layout.renamed(path, suffix).name)
            layout.fsync_folder(root)
    try:
        layout.point_latest(root)
    except OSError as error:  # a full disk; `latest` must not name a checkpoint that was set aside
        _LOG.warning("%s/%s cannot be written: %s", root, layout.LATEST, error.strerror)
        (root / layout.LATEST).unlink(missing_ok=True)


def _load(
    strategy: Strategy,
    world: World,
    group: dist.ProcessGroup,
    path: Path,
    accept: Callable[[RunState], None] | None,
    left_out: Collection[str],
) -> RunState:
    """Load one checkpoint into the strategy; collective. See `resume` for the arguments."""
    with together(group, partial(CheckpointReader, path)) as reader:
        manifest = reader.manifest
        if accept is not None:
            accept(manifest.run)
        strategy.create_optimizer_state(stateless(manifest))
        shards = [s for s in strategy.load_targets() if s.name not in left_out and s.local.numel()]
        everyone: list[Any] = [None] * world.size
        own = [Range(shard.name, shard.runs) for shard in shards]
        dist.all_gather_object(everyone, (world.env.node_rank, own), group=group)
        # All ranks' names are needed: with flat partitions, a rank knows only its own.
        refuse_leftovers(manifest.tensors, [needed.name for _, ranges in everyone for needed in ranges])
        generators, prefix = dict[str, Shard](), f"rng.{world.rank}."
        if manifest.world_size == world.size:  # else a rank's sequence of random numbers means nothing
            for name, t in manifest.tensors.items():
                if name.startswith(prefix):
                    state = torch.empty(t.numel, dtype=getattr(torch, t.dtype))
                    generators[name.removeprefix(prefix)] = Shard(name, t.shape, 0, state)
        together(group, lambda: [matching_entry(manifest.tensors, s) for s in (*shards, *generators.values())])
        holders = Counter(key for node, ranges in everyone if node == world.env.node_rank for key in set(ranges))
        alone = [shard for shard, key in zip(shards, own, strict=True) if holders[key] == 1]
        together(group, lambda: reader.fill([*alone, *generators.values()]))
        shared: dict[Range, Destination] = {}
        for shard, key in sorted(zip(shards, own, strict=True), key=lambda pair: pair[1]):
            if holders[key] > 1:
                spec = TensorSpec(tuple(shard.shape), shard.local.dtype)
                shared.setdefault(key, Destination(spec)).targets.append(shard.local)
        sharing = [(node, [key for key in ranges if holders[key] > 1]) for node, ranges in everyone]
        agreed(group, read_ranges(reader.read_into, shared, sharing, world, group, BUCKET_BYTES, manifest.block_bytes))
    strategy.after_load(manifest.scalars)
    if generators:
        rng.restore({kind: shard.local for kind, shard in generators.items()}, world.device)
    else:
        rng.reseed(manifest.run.seed, world.loss_rank, manifest.run.step)
    return manifest.run


def stateless(manifest: Manifest) -> set[str]:
    """Names of the saved parameters without optimizer state, which no step has used; empty if none has any state."""
    names = (
        name.removeprefix("optim.") for name in (*manifest.tensors, *manifest.scalars) if name.startswith("optim.")
    )
    with_state: set[str] = set()
    for name in names:  # the parameter's name, then the state's name of one part or two (`exp_avg.scale`)
        parameter = name.rpartition(".")[0]
        with_state |= {parameter, parameter.rpartition(".")[0]}
    saved = {name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")}
    return saved - with_state if with_state else set()


def matching_entry(tensors: Mapping[str, TensorEntry], shard: Shard) -> TensorEntry:
    """The saved tensor from which a range is filled."""
    entry = tensors.get(shard.name)
    if entry is None:
        raise CheckpointError(f"the checkpoint has no {shard.name}", _state_fix(shard.name))
    if entry.shape != tuple(shard.shape):
        raise CheckpointError(
            f"{shard.name} is {list(entry.shape)} in the checkpoint, {list(shard.shape)} in this run",
            "resume with the same model sizes",
        )
    if entry.dtype != dtype_name(shard.local.dtype):
        raise CheckpointError(
            f"{shard.name} is {entry.dtype} in the checkpoint, {dtype_name(shard.local.dtype)} in this run",
            "resume with the precision it was saved with: types are never cast silently",
        )
    return entry


def refuse_leftovers(tensors: Mapping[str, TensorEntry], run_names: Sequence[str]) -> None:
    """Refuse a checkpoint with a weight, moment or buffer that is none of the run's, `run_names`: it would be lost."""
    dropped = sorted({n for n, t in tensors.items() if n.startswith(_KINDS) and t.numel} - set(run_names))
    if dropped:
        others_counted = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
        raise CheckpointError(
            f"the checkpoint holds {dropped[0]}{others_counted}, which this run has no place for",
            _state_fix(dropped[0]),
        )


_KINDS = ("model.", "optim.", "buffer.", "ema.")


def _state_fix(name: str) -> str:
    """The fix to print if a run and a checkpoint do not hold the same kinds of state."""
    if name.startswith("optim."):
        return "set optim.name and its keys to those of the checkpoint"
    if name.startswith("ema."):
        return "set train.ema_decay if the checkpoint has a moving average, leave it out if not"
    return "resume with the same model"
