"""Fill a quantised base: read or draw its weights a piece at a time, pack each piece, and drop it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError, gib
from ..models.quantized import BaseQuantizer
from ..parallel.runs import Runs
from ..parallel.weights import Weights, even_range, exchange
from ..parallel.world import World
from ..strategies import Strategy
from ..strategies.base import Shard
from .formats.start import names_in
from .formats.tensor_source import Source
from .frozen_base import WordSums, as_checksum
from .resume import agreed, together
from .stored_packed import StoredLayers, holds_packed

PIECE = 2**20
"""Weights of a piece. A rank holds two pieces unpacked at once: one is read while the one before it is packed."""
_SCALE_BYTES = 4
_LISTED = 6
"""Most parts of a base that the line about it lists; further ones are summed."""


@dataclass(frozen=True)
class LayerPiece:
    """Consecutive weights of a layer, about `PIECE` of them at most."""

    name: str  # the layer's weight in the wrapped model
    start: int  # the first element of the flattened weight
    end: int  # after the last element
    dtype: torch.dtype  # the type that they are wanted in


Pieces = Callable[[Iterable[LayerPiece]], Iterator[torch.Tensor]]
"""Reads or draws pieces in order, each as a 1-D tensor."""
OpenReader = Callable[[ExitStack], Pieces | StoredLayers]
"""Opens the source of weights; the stack closes it."""


@dataclass(frozen=True)
class _Range:
    """Bytes of a packed tensor that this rank fills."""

    runs: Runs  # where they are in the whole tensor
    local: torch.Tensor
    counts: bool  # whether no other rank fills the same bytes for the digest; of rows' parts, the rows

    @property
    def start(self) -> int:
        """The first byte in the whole tensor; of parts of rows (tensor parallelism), that of their first row."""
        return self.runs.start - self.runs.start % self.runs.stride if self.runs.run else self.runs.start

    @property
    def end(self) -> int:
        """The byte after the last one, or after its row."""
        n_rows = self.runs.length // self.runs.run if self.runs.run else 0
        return self.start + (n_rows * self.runs.stride or self.runs.length)

    def take(self, packed: torch.Tensor, start: int) -> None:
        """Copy those bytes of a piece that this rank has; the piece begins at byte `start` of the tensor."""
        low, high = self.runs.below(start), self.runs.below(start + packed.numel())
        for block in self.runs.blocks(low, high):
            rows = packed[block.start - start :].as_strided((block.rows, block.width), (self.runs.stride, 1))
            self.local[block.offset :][: rows.numel()].view(rows.shape).copy_(rows)


def fill_quantized(
    strategy: Strategy,
    model: nn.Module,
    world: World,
    group: dist.ProcessGroup,
    quantizer: BaseQuantizer,
    base_name: Callable[[str], str | None],
    open_reader: OpenReader,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Fill the packed weights of the wrapped `model`; collective.

    Each rank packs the blocks of its own shard; of tensors that every rank holds whole, an even part that it sends.
    `base_name`: maps a parameter's name to its name in the model without the adapter. `dtype`: the type from which
    weights are packed. Returns the checksum of each layer's weight, unpacked and in `dtype`, by its name in the model
    without the adapter; of its packed bytes if it was read packed.
    """
    tensors = {shard.name.removeprefix("model."): shard for shard in strategy.load_targets()}
    names_in_model = (fqn.removeprefix("module.") for fqn, _ in model.named_parameters())
    packed = [fqn for fqn in names_in_model if fqn.endswith(".packed")]
    # The packed layers' names in the wrapped model → those in the model without the adapter.
    layers = {fqn.removesuffix(".packed"): (base_name(fqn) or "").removesuffix(".packed") for fqn in packed}
    parts = ("packed", "absmax", "nested")[: 3 if quantizer.double else 2]
    ranges = {
        name: {part: _range_of(tensors.get(f"{name}.{part}"), strategy, world) for part in parts} for name in layers
    }
    checksums: dict[str, int] = {}
    problem: CheckpointError | None = None
    with ExitStack() as at_end:
        source = together(group, partial(open_reader, at_end))
        try:
            if isinstance(source, StoredLayers):
                weights = {name: quantizer.weights[layer] for name, layer in layers.items()}
                checksums = {name: _take_stored(source, weights[name], ranges[name]) for name in layers}
            else:
                checksums = _pack_layers(layers, ranges, quantizer, source, dtype, group)
        except CheckpointError as error:
            problem = error
    agreed(group, problem)
    if not strategy.facts.shards_parameters and world.size > 1:  # every rank holds all, and has filled a part
        exchange([tensors[f"{name}.{part}"].local for name in layers for part in parts])
    strategy.weights_changed(replicas_equal=True)
    names = sorted(layers)
    sums = torch.tensor([checksums[name] for name in names], dtype=torch.int64)
    dist.all_reduce(sums, group=group)
    return {quantizer.weights[layers[name]]: total for name, total in zip(names, sums.tolist(), strict=True)}


@dataclass(frozen=True)
class _Packed:
    """A layer whose packed bytes are filled, and whose scales are not."""

    checksum: int  # of this rank's part of the weight
    first_block: int  # the block of the first scale
    scales: torch.Tensor  # fp32, 1-D
    failed: bool = False  # whether a rank could not read the layer


@torch.no_grad()
def _take_stored(stored: StoredLayers, weight: str, ranges: dict[str, _Range]) -> int:
    """Fill this rank's bytes of one layer with those of a folder; returns their checksum."""
    checksum, range_sum = 0, WordSums()
    for part, of_part in ranges.items():
        for begin in range(of_part.start, of_part.end, PIECE):
            piece = torch.empty(min(PIECE, of_part.end - begin), dtype=torch.uint8)
            stored.read_into(weight, part, begin, piece)
            of_part.take(piece, begin)
            checksum += as_checksum(range_sum(piece, begin)) if of_part.counts else 0
    return checksum


def _range_of(shard: Shard | None, strategy: Strategy, world: World) -> _Range:
    """The bytes of a packed tensor that this rank fills: its shard, or an even part of a tensor that it holds whole."""
    if shard is None:
        return _Range(Runs(0, 0), torch.empty(0, dtype=torch.uint8), counts=False)
    if strategy.facts.shards_parameters:  # who has the first part of the rows counts them
        begins_rows = not shard.run or shard.start % shard.stride == 0
        return _Range(shard.runs, shard.local, shard.replica == 0 and begins_rows)
    start, end = even_range(shard.local.numel(), world.rank, world.size)
    return _Range(Runs(start, end - start), shard.local[start:end], counts=True)


def _pack_layers(
    layers: dict[str, str],
    ranges: dict[str, dict[str, _Range]],
    quantizer: BaseQuantizer,
    read: Pieces,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> dict[str, int]:
    """Fill this rank's bytes of every layer, and return the checksums of what it packed; collective. Pieces of all
    layers are read as one sequence: a layer's first piece is read while the last one before it is packed."""
    pieces: dict[str, list[LayerPiece]] = {}
    for name, layer in layers.items():
        weight = name + quantizer.weights[layer].removeprefix(layer)
        pieces[name] = _pieces_of(weight, math.prod(quantizer.shapes[layer]), ranges[name], quantizer, dtype)
    content, range_sum = read(chain.from_iterable(pieces.values())), WordSums()
    checksums: dict[str, int] = {}
    for name, layer in layers.items():
        packed, problem = _Packed(0, 0, torch.empty(0)), None
        try:
            packed = _pack_layer(pieces[name], content, ranges[name], quantizer, range_sum)
        except CheckpointError as error:
            problem = error
        if quantizer.double:  # it needs the scales of all blocks together; equal blocks have equal ones, none negative
            n_blocks = math.prod(quantizer.shapes[layer]) // quantizer.block_size
            scales = torch.zeros(n_blocks + 1)
            scales[packed.first_block : packed.first_block + packed.scales.numel()] = packed.scales
            scales[n_blocks] = float(problem is not None)
            dist.all_reduce(scales, dist.ReduceOp.MAX, group=group)
            of_all = scales[:n_blocks].to(packed.scales.device)
            packed = _Packed(packed.checksum, 0, of_all, bool(scales[n_blocks]))
        if problem is not None:
            raise problem
        if packed.failed:
            break
        checksums[name] = packed.checksum
        for part, state in quantizer.state(packed.scales).items():
            ranges[name][part].take(state, packed.first_block * _SCALE_BYTES)
    return checksums


def _pieces_of(
    weight: str, n_weights: int, ranges: dict[str, _Range], quantizer: BaseQuantizer, dtype: torch.dtype
) -> list[LayerPiece]:
    """Whole blocks that cover this rank's packed bytes of a layer, and its scales unless those are known later."""
    block, packed, of_scales = quantizer.block_size, ranges["packed"], ranges["absmax"]
    spans = [(2 * packed.start, 2 * packed.end)] if packed.local.numel() else []
    if of_scales.local.numel() and not quantizer.double:
        spans.append((of_scales.start // _SCALE_BYTES * block, -(-of_scales.end // _SCALE_BYTES) * block))
    if not spans:
        return []
    low = min(start for start, _ in spans) // block * block
    high = min(-(-max(end for _, end in spans) // block) * block, n_weights)
    step = max(PIECE // block, 1) * block
    return [LayerPiece(weight, start, min(start + step, high), dtype) for start in range(low, high, step)]


@torch.no_grad()
def _pack_layer(
    pieces: list[LayerPiece],
    content: Iterator[torch.Tensor],
    ranges: dict[str, _Range],
    quantizer: BaseQuantizer,
    range_sum: WordSums,
) -> _Packed:
    """Fill this rank's packed bytes of one layer with the next of the `content`."""
    packed = ranges["packed"]
    device = packed.local.device
    if not pieces:
        return _Packed(0, 0, torch.empty(0, device=device))
    low, high = pieces[0].start, pieces[-1].end
    scales = torch.empty((high - low) // quantizer.block_size, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for piece in pieces:
        weights = next(content).to(device)
        if packed.counts:
            begin, end = max(piece.start, 2 * packed.start), min(piece.end, 2 * packed.end)
            if begin < end:
                total += range_sum(weights[begin - piece.start : end - piece.start], begin)
        packed_bytes, piece_scales = quantizer.pack(weights)
        packed.take(packed_bytes, piece.start // 2)
        scales[(piece.start - low) // quantizer.block_size :][: piece_scales.numel()] = piece_scales
    return _Packed(as_checksum(total), low // quantizer.block_size, scales)


def drawing(weights: Weights, quantizer: BaseQuantizer, base_name: Callable[[str], str | None]) -> OpenReader:
    """Draw weights as the run's seed does without `model.quantize`."""

    def draw(pieces: Iterable[LayerPiece]) -> Iterator[torch.Tensor]:
        for piece in pieces:
            shape = quantizer.shapes[(base_name(piece.name) or "").removesuffix(".weight")]
            drawn = torch.empty(piece.end - piece.start, dtype=piece.dtype)
            weights.fill(piece.name, torch.Size(shape), drawn, piece.start)
            yield drawn

    return lambda at_end: draw


def reading(
    open_source: Callable[[], Source], quantizer: BaseQuantizer, base_name: Callable[[str], str | None]
) -> OpenReader:
    """Read weights from the source opened by `opening`; weights already packed by bitsandbytes are copied unchanged."""

    def open_reader(at_end: ExitStack) -> Pieces | StoredLayers:
        source = open_source()
        if holds_packed(source):
            return StoredLayers(source, weight_shapes(quantizer), quantizer.settings, quantizer.code)
        stored = names_in(source, weight_shapes(quantizer))
        thread = at_end.enter_context(ThreadPoolExecutor(1))

        def read(piece: LayerPiece) -> torch.Tensor:
            tensor_name = stored[base_name(piece.name) or ""]
            return source.read(tensor_name, piece.start, piece.end - piece.start).to(piece.dtype)

        def read_ahead(pieces: Iterable[LayerPiece]) -> Iterator[torch.Tensor]:
            ahead: Future[torch.Tensor] | None = None
            for piece in pieces:
                before, ahead = ahead, thread.submit(read, piece)
                if before is not None:
                    yield before.result()
            if ahead is not None:
                yield ahead.result()

        return read_ahead

    return open_reader


def weight_shapes(quantizer: BaseQuantizer) -> dict[str, tuple[int, ...]]:
    """The shapes of the packed layers' weights, by their names in files of the model."""
    return {weight: quantizer.shapes[layer] for layer, weight in quantizer.weights.items()}


def describe(model: nn.Module, quantizer: BaseQuantizer, kind: str) -> str:
    """One line: the share of the base's values that is packed, its bytes, and the parts that are not, with theirs."""
    packed, scales, n_packed = 0, 0, sum(map(math.prod, quantizer.shapes.values()))
    unpacked: Counter[str] = Counter()
    n_values, has_stacked_experts = n_packed, False
    for fqn, param in model.named_parameters():
        if param.requires_grad:
            continue
        shape = getattr(param, "ds_shape", param.shape)  # under ZeRO-3 the tensor itself is empty
        n_bytes = math.prod(shape) * param.element_size()
        if fqn.endswith(".packed"):
            packed += n_bytes
        elif fqn.endswith((".absmax", ".nested")):
            scales += n_bytes
        else:
            n_values += math.prod(shape)
            unpacked[_shortened(fqn.removeprefix("module."))] += n_bytes
            has_stacked_experts |= len(shape) == 3 and ".experts." in fqn
    parts = unpacked.most_common()
    listed = ", ".join(f"{name} {gib(n_bytes)}" for name, n_bytes in parts[:_LISTED])
    if parts[_LISTED:]:
        listed += f" and {len(parts) - _LISTED} smaller parts {gib(sum(n_bytes for _, n_bytes in parts[_LISTED:]))}"
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in frozen})
    return (
        f"quantised: {len(quantizer.shapes)} layers, {n_packed / max(n_values, 1):.1%} of the base, in {kind} "
        f"({gib(packed)}, scales {gib(scales)}); in {' and '.join(dtypes)}: {listed or 'nothing'}"
        + ("; model.quantize.experts=true packs the experts" if has_stacked_experts else "")
    )


def _shortened(fqn: str) -> str:
    """A parameter's name with `*` for the numbers of layers, and without its last part if that says nothing."""
    return re.sub(r"\.\d+(?=\.)", ".*", fqn).replace(".base_layer.", ".").removesuffix(".weight")
