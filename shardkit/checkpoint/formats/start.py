"""Start a run from existing weights: `model.init_from`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ...errors import CheckpointError
from ...strategies import Strategy
from ...strategies.base import Shard
from ..format.reader import TensorInfo
from ..resume import agreed
from .source import PIECE_BYTES, Source
from .sources import open_source

_LOG = logging.getLogger(__name__)
_FIX = "set model.init_from to weights of this model, with its sizes"


def load_weights(strategy: Strategy, group: dist.ProcessGroup, path: str | Path) -> Path:
    """Fill the wrapped model with the weights at `path`; collective. Each rank reads the ranges it keeps.

    Args:
        group: a gloo group of all ranks, to share their errors.
        path: anything that `shardkit convert` reads; its optimizer state is ignored.

    Returns:
        The checkpoint that was read.

    Raises:
        CheckpointError: on every rank: a weight is missing or has another shape, or the source cannot be trusted.
    """
    source, problem = None, None
    try:
        source = open_source(Path(path), weights_only=True)
        _fill(strategy, source, dist.get_rank(group) == 0)
    except CheckpointError as error:
        problem = CheckpointError(error.cause, error.fix or _FIX)
    finally:
        if source is not None:
            source.close()
    agreed(group, problem)
    assert source is not None
    strategy.weights_changed()
    return source.path


def _fill(strategy: Strategy, source: Source, is_main: bool) -> None:
    targets = [
        s for s in strategy.load_targets() if s.name.startswith(("model.", "ema.", "buffer.")) and s.local.numel()
    ]
    held = {name.partition(".")[2]: (name, info) for name, info in source.tensors.items()}
    held |= {alias: held[name] for alias, name in source.ties.items() if name in held}
    shift = _shift([s.name.partition(".")[2] for s in targets if s.name.startswith("model.")], held)
    used = set()
    for shard in targets:
        fqn = _moved(shard.name.partition(".")[2], shift)
        if fqn not in held and shard.name.startswith("buffer."):
            continue  # computed by the model; transformers does not save all of them
        name, info = _matching(held, fqn, shard, source)
        used.add(name)
        _read(source, name, info, shard)
    left = sorted(set(source.tensors) - used)
    if left and is_main:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        _LOG.warning("%s holds %s%s, which the model has no place for", source.path, left[0], more)


Shift = tuple[str, str]
"""(prefix to remove from the model's names, prefix to add instead) to get the source's names."""


def _shift(wanted: list[str], held: Mapping[str, object]) -> Shift:
    """Find the prefix by which the source's names differ, if any: from a wrapper, or from a task's heads."""
    for name in wanted:
        if name in held:
            return "", ""
    for name in wanted:
        for other in held:
            if other.endswith(f".{name}") and _fits(("", other.removesuffix(name)), wanted, held):
                return "", other.removesuffix(name)
            if name.endswith(f".{other}") and _fits((name.removesuffix(other), ""), wanted, held):
                return name.removesuffix(other), ""
    return "", ""


def _fits(shift: Shift, wanted: list[str], held: Mapping[str, object]) -> bool:
    return all(_moved(name, shift) in held for name in wanted)


def _moved(name: str, shift: Shift) -> str:
    return shift[1] + name.removeprefix(shift[0])


def _matching(
    held: Mapping[str, tuple[str, TensorInfo]], fqn: str, shard: Shard, source: Source
) -> tuple[str, TensorInfo]:
    if fqn not in held:
        raise CheckpointError(f"{source.path} has no {fqn}", _FIX)
    name, info = held[fqn]
    if tuple(info.shape) != tuple(shard.shape):
        raise CheckpointError(f"{fqn} is {list(info.shape)} in {source.path}, {list(shard.shape)} in this run", _FIX)
    if info.dtype.is_floating_point != shard.local.dtype.is_floating_point:
        raise CheckpointError(f"{fqn} is {info.dtype} in {source.path}, {shard.local.dtype} in this run", _FIX)
    return name, info


@torch.no_grad()
def _read(source: Source, name: str, info: TensorInfo, shard: Shard) -> None:
    """Read this rank's range, a piece at a time, into the run's own dtype (masters are fp32: no bit is lost)."""
    step = PIECE_BYTES // info.dtype.itemsize
    for at in range(0, shard.local.numel(), step):
        piece = torch.empty(min(step, shard.local.numel() - at), dtype=info.dtype)
        source.read_into(name, shard.start + at, piece)
        shard.local[at : at + piece.numel()].copy_(piece)
