"""Start a run from existing weights: `model.init_from`.

Each rank reads only the ranges that it keeps, one bucket at a time. Ranks of a node that keep the same ranges share the
reading (`node_reads`), so a node requests every byte of the source once.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...errors import CheckpointError
from ...parallel.world import World
from ...strategies import Strategy
from ...strategies.base import Shard
from ..native.reader import TensorSpec
from ..native.writer import byte_view
from ..node_reads import Destination, Range, read_ranges
from ..resume import agreed
from ..stored_packed import holds_packed, packed_names, refuse_other_layers
from .detect import open_source
from .hub_names import as_the_model_names, reference_of
from .tensor_source import PIECE_BYTES, Source, find_prefix, with_prefix

BUCKET_BYTES = PIECE_BYTES // 4
"""Bytes of a bucket. All that a rank holds beyond its shard fits into one piece: the bucket, the files' headers, the
description of the model, and the exchange of weights between ranks."""
_LOG = logging.getLogger(__name__)
_FIX = "set model.init_from to weights of this model, with its sizes"
_LISTED_NAMES = 3
"""Most names that a message lists; further ones are counted."""
_SAMPLED_VALUES = 64
"""Values of each tensor by which nodes compare their sources."""


@dataclass(frozen=True)
class Loaded:
    """A source that a model was filled from."""

    path: Path
    bytes_read: int  # bytes that all ranks together requested from its files; 0 for a checkpoint of shardkit
    # name of each parameter that got new rows → its number of rows in the source, and in the model
    resized: dict[str, tuple[int, int]]


@dataclass
class _NewRows:
    """Rows that a tensor has in the model and not in the source."""

    n_rows: tuple[int, int]  # number of rows in the source, and in the model
    # this rank's memory for new rows: (index of its first element in the flattened tensor, memory)
    targets: list[tuple[int, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _Report:
    """The needs of one rank, which it sends to all ranks before they read."""

    node: int  # number of the rank's node
    ranges: list[Range]  # the ranges of the source that the rank keeps
    # source name of each tensor with new rows → its number of rows in the source, and in the model
    n_rows: dict[str, tuple[int, int]]
    digest: str  # a digest of the source as this node sees it; empty except on one rank per node


def load_weights(
    strategy: Strategy,
    world: World,
    group: dist.ProcessGroup,  # a gloo group of all ranks, to share errors and pieces
    open_source: Callable[[], Source],  # as of `opening`; the source's optimizer state is ignored
    # A parameter's name → its name in files of the model. None for a parameter that such files do not hold (an
    # adapter's), which keeps its value.
    source_name: Callable[[str], str | None] = str,
    # Parameters that may have fewer rows in the source: new rows become the mean of the old ones. One rank reads these
    # once more and sums them in float64 in the rows' order, so the mean has the same bits on any number of ranks.
    resized: Collection[str] = (),
    packed: Mapping[str, tuple[int, ...]] | None = None,  # names and shapes of weights that the caller reads itself
) -> Loaded:
    """Fill the wrapped model with the weights of a source; collective."""
    problem: CheckpointError | None = None
    destinations: dict[Range, Destination] = {}
    new_rows: dict[str, _NewRows] = {}
    read_later = set[str]()
    try:
        source = open_source()
        if holds_packed(source):
            refuse_other_layers(source, packed or {})
        destinations, new_rows = _destinations(strategy, source, source_name, resized)
        read_later = packed_names(source) or set(names_in(source, packed or {}).values())
        is_sampled = world.env.n_nodes > 1 and world.env.local_rank == 0
        digest = _sample(source, strategy.model) if is_sampled else ""
    except CheckpointError as error:
        problem = CheckpointError(error.cause, error.fix or _FIX)
    agreed(group, problem)
    n_rows = {name: rows.n_rows for name, rows in new_rows.items()}
    reports: list[_Report | None] = [None] * world.size
    dist.all_gather_object(reports, _Report(world.env.node_rank, list(destinations), n_rows, digest), group=group)
    needs = [report for report in reports if report is not None]
    digests = {need.node: need.digest for need in needs if need.digest}
    if nodes := [node for node, digest in digests.items() if digest != digests[0]]:  # ranks would train a mixture
        holders = f"node {nodes[0]} holds" if len(nodes) == 1 else f"{len(nodes)} nodes, {nodes[0]} among them, hold"
        raise CheckpointError(
            f"{source.path} of {holders} another model than that of node 0",
            "copy the folder of one node to all, or name a folder that they share",
        )
    n_rows = dict(sorted(entry for need in needs for entry in need.n_rows.items()))
    if world.is_main:
        used_names = {needed.name for need in needs for needed in need.ranges} | read_later
        if unused := sorted(name.partition(".")[2] for name in set(source.tensors) - used_names):
            _LOG.warning("%s holds %s, which the model has no place for", source.path, _listing(unused))
    ranges = [(need.node, need.ranges) for need in needs]
    agreed(group, read_ranges(source.read_into, destinations, ranges, world, group, BUCKET_BYTES))
    agreed(group, _fill_new_rows(source, new_rows, n_rows, world, group))
    strategy.weights_changed(replicas_equal=len({need.node for need in needs}) == 1)
    grown = {name.partition(".")[2]: sizes for name, sizes in n_rows.items()}
    return Loaded(source.path, int(world.sum([float(source.bytes_read())])[0]), grown)


@contextmanager
def opening(path: str | Path, model: nn.Module) -> Iterator[Callable[[], Source]]:
    """Gives a function that opens the weights at `path`, when it is called first, for all who read them until the end.
    `path`: anything that `shardkit convert` reads. Weights of a transformers model come under the model's own names."""
    opened: list[Source] = []

    @cache
    def open_once() -> Source:
        source = open_source(Path(path).expanduser(), weights_only=True)
        references = (reference_of(module) for module in model.modules() if hasattr(module, "config"))
        if (reference := next((copy for copy in references if copy is not None), None)) is not None:
            source = as_the_model_names(source, reference)
        opened.append(source)
        return source

    try:
        yield open_once
    finally:
        for source in opened:
            source.close()


def _sample(source: Source, model: nn.Module) -> str:
    """A digest of the model's own config, and of all names, shapes and a few values of each tensor in the source."""
    digest = hashlib.blake2b(digest_size=16)
    configs: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    config = next((config for config in configs if hasattr(config, "to_json_string")), None)
    digest.update(b"" if config is None else config.to_json_string().encode())
    for name, spec in sorted(source.tensors.items()):
        digest.update(repr((name, spec.shape, spec.dtype)).encode())
        middle = math.prod(spec.shape) // 2
        for piece in source.range_of(name, middle, min(_SAMPLED_VALUES, math.prod(spec.shape) - middle)):
            digest.update(byte_view(piece))
    return digest.hexdigest()


def names_in(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The source's name of each weight. `shapes`: the weights' shapes by their names in the model."""
    saved = source.by_plain_name()
    prefix = find_prefix(list(shapes), saved)
    names = {}
    for plain_name, shape in shapes.items():
        fqn = with_prefix(plain_name, prefix)
        if fqn not in saved:
            raise CheckpointError(f"{source.path} has no {fqn}", _FIX)
        names[plain_name], spec = saved[fqn]
        _check_fits(spec, fqn, Shard(fqn, shape, 0, torch.empty(0)), source, may_grow=False)
    return names


def _destinations(
    strategy: Strategy, source: Source, source_name: Callable[[str], str | None], resized: Collection[str] = ()
) -> tuple[dict[Range, Destination], dict[str, _NewRows]]:
    """Source range that this rank keeps → the memory it fills, sorted; and name of a grown tensor → its new rows."""
    shards = [
        (plain_name, shard)
        for shard in strategy.load_targets()
        if shard.name.startswith(("model.", "ema.", "buffer."))
        and (plain_name := source_name(shard.name.partition(".")[2])) is not None
    ]
    saved = source.by_plain_name()
    prefix = find_prefix([name for name, shard in shards if shard.name.startswith("model.")], saved)
    destinations: dict[Range, Destination] = {}
    new_rows: dict[str, _NewRows] = {}
    missing = dict[str, None]()
    for plain_name, shard in shards:
        fqn = with_prefix(plain_name, prefix)
        if fqn not in saved:
            if not shard.name.startswith("buffer."):  # buffers are computed; transformers does not save all of them
                missing[fqn] = None
            continue
        name, spec = saved[fqn]
        _check_fits(spec, fqn, shard, source, may_grow=plain_name in resized)
        n_old = shard.runs.below(math.prod(spec.shape))
        if n_old:
            source_range = Range(name, shard.runs._replace(length=n_old))
            destinations.setdefault(source_range, Destination(spec)).targets.append(shard.local[:n_old])
        if n_old < shard.local.numel():
            rows = new_rows.setdefault(name, _NewRows((spec.shape[0], shard.shape[0])))
            start = shard.start + (n_old // shard.run * shard.stride if shard.run else n_old)
            rows.targets += replace(shard, start=start, local=shard.local[n_old:]).ranges()
    if missing:
        raise CheckpointError(f"{source.path} has no {_listing(list(missing))}", _FIX)
    return dict(sorted(destinations.items())), new_rows


def _listing(names: Sequence[str]) -> str:
    """The first few names and the number of the further ones: `a, b, c and 2 more`."""
    n_unlisted = len(names) - _LISTED_NAMES
    return ", ".join(names[:_LISTED_NAMES]) + (f" and {n_unlisted} more" if n_unlisted > 0 else "")


def _check_fits(spec: TensorSpec, fqn: str, shard: Shard, source: Source, may_grow: bool) -> None:
    """Check that a tensor of the source has the model's shape and kind of number."""
    saved, model = tuple(spec.shape), tuple(shard.shape)
    if saved != model and not (may_grow and saved[1:] == model[1:] and 0 < saved[0] < model[0]):
        raise CheckpointError(f"{fqn} is {list(spec.shape)} in {source.path}, {list(shard.shape)} in this run", _FIX)
    if spec.dtype.is_floating_point != shard.local.dtype.is_floating_point:
        raise CheckpointError(f"{fqn} is {spec.dtype} in {source.path}, {shard.local.dtype} in this run", _FIX)


@torch.no_grad()
def _fill_new_rows(
    source: Source,
    new_rows: Mapping[str, _NewRows],
    n_rows: Mapping[str, tuple[int, int]],
    world: World,
    group: dist.ProcessGroup,
) -> CheckpointError | None:
    """Fill the new rows with the mean of the old ones; returns this rank's problem. Collective."""
    problem: CheckpointError | None = None
    for name in n_rows:
        mean = torch.zeros(math.prod(source.tensors[name].shape[1:]), dtype=torch.float64)
        if world.is_main and problem is None:
            try:
                # In float64, summed in the rows' order by one thread: the same bits on any number of ranks.
                n_saved, width = source.tensors[name].shape[0], len(mean)
                rows_per_piece = max(1, PIECE_BYTES // (16 * width))  # a piece in float64, and its sum
                total = np.zeros(width, dtype=np.float64)
                for start in range(0, n_saved, rows_per_piece):
                    piece = source.read(name, start * width, min(rows_per_piece, n_saved - start) * width)
                    total += piece.to(torch.float64).view(-1, width).numpy().sum(axis=0)
                mean = torch.from_numpy(total / n_saved)
            except CheckpointError as error:
                problem = error
        dist.broadcast(mean, src=0, group=group)
        for start, target in new_rows[name].targets if name in new_rows else ():
            # Copies of the mean, in phase: the target begins at element `start` of a tensor made of such rows.
            row, end_of_rows = mean.roll(-(start % len(mean))), len(target) - len(target) % len(mean)
            target[:end_of_rows].view(-1, len(row)).copy_(row)
            target[end_of_rows:].copy_(row[: len(target) - end_of_rows])
    return problem
