"""A checkpoint from any layout of DTensors loads into any other, bit for bit, and holds every element once."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardkit.checkpoint.native import manifest as manifests
from shardkit.checkpoint.native.manifest import CorruptCheckpoint, RunState, find_hole
from shardkit.checkpoint.native.reader import CheckpointReader, TensorSpec
from shardkit.checkpoint.native.writer import RangeWriter, check_plans, plan_save
from shardkit.checkpoint.node_reads import Destination, Range, read_ranges
from shardkit.checkpoint.quantized_base import _range_of
from shardkit.errors import CheckpointError, ConfigError
from shardkit.parallel.runs import Runs, runs_of
from shardkit.parallel.weights import Weights
from shardkit.strategies import base
from tests.checkpoint import fakes
from tests.ranks import run_ranks


class Strided:
    """FSDP2's placement of a dimension that another axis of the mesh has cut before."""

    dim, split_factor = 0, 2


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((10, 6), (4,), (Shard(0),)),
    "columns": ((10, 6), (4,), (Shard(1),)),
    "columns, uneven": ((10, 9), (4,), (Shard(1),)),
    "fewer rows than ranks": ((3, 6), (4,), (Shard(0),)),
    "replicas of rows": ((10, 6), (2, 4), (Replicate(), Shard(0))),
    "rows x columns": ((10, 8), (4, 2), (Shard(0), Shard(1))),
    "rows x columns, uneven": ((10, 9), (4, 2), (Shard(0), Shard(1))),
    "one row on the last ranks": ((5, 8), (4, 2), (Shard(0), Shard(1))),
    "rows twice": ((10, 6), (2, 4), (Shard(0), Shard(0))),
    "rows of rows": ((10, 6), (2, 4), (Strided(), Shard(0))),
    "experts, then experts": ((8, 6, 4), (2, 2), (Strided(), Shard(0))),
    "experts, then their rows": ((8, 6, 4), (2, 4), (Shard(1), Shard(0))),
    "experts, then their columns": ((8, 6, 4), (2, 4), (Shard(2), Shard(0))),
    "columns of all experts": ((8, 6, 4), (4, 2), (Shard(0), Shard(2))),
    "replicas of rows x columns": ((12, 8), (2, 2, 2), (Replicate(), Shard(0), Shard(1))),
    "vector, replicated": ((6,), (2, 2), (Shard(0), Replicate())),
}


def parts_of(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any]) -> list[Runs]:
    coordinates = itertools.product(
        *(range(1 if isinstance(p, Replicate) else n) for n, p in zip(mesh, placements, strict=True))
    )
    return [runs_of(shape, mesh, coordinate, placements) for coordinate in coordinates]


def indices(runs: Runs) -> list[int]:
    """Every element, by the definition."""
    run = runs.run or max(runs.length, 1)
    return [runs.start + at // run * runs.stride + at % run for at in range(runs.length)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_hold_each_element_once_in_runs_of_one_distance(layout: str) -> None:
    shape, mesh, placements = LAYOUTS[layout]
    parts = parts_of(shape, mesh, placements)
    assert sorted(itertools.chain(*map(indices, parts))) == [*range(math.prod(shape))]
    parts = [part for part in parts if part.length]
    assert find_hole(math.prod(shape), parts) is None
    for part in parts:
        below = [part.below(element) for element in range(math.prod(shape) + 1)]
        assert below == [sum(index < element for index in indices(part)) for element in range(math.prod(shape) + 1)]
        blocks = [
            b.start + row * part.stride + at
            for b in part.blocks(0, part.length)
            for row in range(b.rows)
            for at in range(b.width)
        ]
        assert blocks == indices(part)
    for at in range(len(parts)):
        assert find_hole(math.prod(shape), parts[:at] + parts[at + 1 :]) is not None or len(parts) == 1
        assert find_hole(math.prod(shape), [*parts, parts[at]]) is not None


def test_two_inner_dimensions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \[8, 6, 4\] is cut along more than one inner dimension"):
        runs_of((8, 6, 4), (2, 2), (0, 0), (Shard(1), Shard(2)))


@pytest.mark.parametrize("step", [3, 8, 13, 64])
def test_packed_bytes_that_lie_in_several_ranges_are_filled_from_pieces_of_any_length(step: int) -> None:
    strategy: Any = SimpleNamespace(facts=base.Facts(shards_parameters=True))
    world: Any = SimpleNamespace(rank=0, size=2)
    whole = torch.arange(64, dtype=torch.uint8).view(8, 8)
    for column in (0, 4):
        local = torch.zeros(12, dtype=torch.uint8)
        part = _range_of(base.Shard("model.q.packed", (8, 8), 16 + column, local, 0, 4, 8), strategy, world)
        assert (part.start, part.end, part.counts) == (16, 40, column == 0)
        for start in range(0, 64, step):
            part.take(whole.view(-1)[start : start + step], start)
        assert torch.equal(local.view(3, 4), whole[2:5, column : column + 4])


def test_a_hole_between_columns_is_found_without_listing_runs() -> None:
    """Four million runs."""
    n, width = 4_000_000, 1000
    halves = [Runs(0, n * 400, 400, width), Runs(400, n * 600, 600, width)]
    assert find_hole(n * width, halves) is None
    assert find_hole(n * width, [halves[0], Runs(401, n * 599, 599, width)]) == 400
    assert find_hole(n * width, [halves[0], Runs(400, (n - 1) * 600, 600, width)]) == (n - 1) * width + 400
    assert find_hole(n * width, [halves[0], Runs(400, n * 600, 300, 500)]) is not None


@pytest.mark.parametrize("chunk_bytes", [4, 20, 64, 10_000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_hold_each_element_once(layout: str, chunk_bytes: int) -> None:
    shape, mesh, placements = LAYOUTS[layout]
    flat = torch.arange(math.prod(shape))
    plans = []
    for part in parts_of(shape, mesh, placements):
        shard = base.Shard("model.w", shape, part.start, flat[indices(part)], 0, part.run, part.stride)
        assert [n for start, piece in shard.ranges() for n in range(start, start + len(piece))] == indices(part)
        plan, contents = plan_save([shard], chunk_bytes)
        for (_, runs), content in zip(plan.chunks, contents, strict=True):
            assert content.tolist() == indices(runs) and content.nbytes <= max(chunk_bytes, 8)
        plans.append(plan)
    check_plans(plans)


def random_layout(draw: random.Random, world: int, dims: int) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    mesh = draw.choice([(world,), (1, world), (world, 1), *([(2, 2)] if world == 4 else [])])
    inner = draw.randrange(1, dims) if dims > 1 else 0
    return mesh, tuple(draw.choice([Replicate(), Shard(0), Shard(inner)]) for _ in mesh)


make_mesh = cache(partial(init_device_mesh, "cpu"))


def distributed(full: torch.Tensor, mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    return distribute_tensor(full, make_mesh(mesh), placements, src_data_rank=None)


def shard_of(name: str, tensor: DTensor) -> base.Shard:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    runs = runs_of(tensor.shape, mesh.shape, coordinate, tensor.placements)
    local = tensor.to_local().reshape(-1)
    assert local.numel() == runs.length
    replica = sum(at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
    return base.Shard(name, tuple(tensor.shape), runs.start, local, replica, runs.run, runs.stride)


def drawn_shard(draw: random.Random, name: str, full: torch.Tensor, world: int) -> list[base.Shard]:
    """This rank's shard in a drawn layout over the first ranks, as DTensor lays it out where these are all."""
    mesh, placements = random_layout(draw, world, full.dim())
    if world == dist.get_world_size():
        return [shard_of(name, distributed(full, mesh, placements))]
    if dist.get_rank() >= world:
        return []
    coordinate = divmod(dist.get_rank(), mesh[1]) if len(mesh) == 2 else (dist.get_rank(),)
    runs = runs_of(full.shape, mesh, coordinate, placements)
    replica = sum(at for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())
    local = full.view(-1)[indices(runs)]
    return [base.Shard(name, tuple(full.shape), runs.start, local, replica, runs.run, runs.stride)]


def fuzz(folder: str, seeds: int) -> int:
    """Write each tensor from a drawn layout, read it into another; returns the number of chunks of several runs."""
    rank, several = dist.get_rank(), 0
    for seed in range(seeds):
        draw = random.Random(seed)
        names = [
            f"{kind}{index}{state}" for index in range(4) for kind, state in (("model.", ""), ("optim.", ".exp_avg"))
        ]
        shapes = [tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3))) for _ in range(4)]
        fulls, written = {}, list[base.Shard]()
        saving, loading = draw.choice([1, 2, 4, 4]), draw.choice([1, 2, 4, 4])
        for index, name in enumerate(names):
            dtype = torch.bfloat16 if index % 2 and seed % 2 else torch.float32
            generator = torch.Generator().manual_seed(seed * 100 + index)
            fulls[name] = torch.randn(shapes[index // 2], generator=generator).to(dtype)
            written += drawn_shard(draw, name, fulls[name], saving)
        path = Path(folder) / f"step_{seed:08d}"
        chunk_bytes = draw.choice([16, 64, 1000])
        writer = RangeWriter(path, rank, RunState(seed), "plain", 4, {})
        writer.write([shard for shard in written if shard.local.numel()], chunk_bytes, dist.group.WORLD)  # type: ignore[arg-type]
        with CheckpointReader(path) as reader:
            several += sum(chunk.run > 0 for entry in reader.manifest.tensors.values() for chunk in entry.chunks)
            size = sum(full.nbytes for full in fulls.values())
            chunks = [chunk for entry in reader.manifest.tensors.values() for chunk in entry.chunks]
            itemsizes = [entry.itemsize for entry in reader.manifest.tensors.values() for _ in entry.chunks]
            assert sum(c.length * n for c, n in zip(chunks, itemsizes, strict=True)) == size, (
                "replicas are written once"
            )
            for name, full in fulls.items():
                assert torch.equal(reader.read(name), full.view(-1)), (seed, name)
                start = draw.randint(0, full.numel())
                count = draw.randint(0, full.numel() - start)
                assert torch.equal(reader.read(name, start, count), full.view(-1)[start : start + count])
            expected = [shard for name, full in fulls.items() for shard in drawn_shard(draw, name, full, loading)]
            targets = [replace(shard, local=torch.zeros_like(shard.local)) for shard in expected]
            held = [target for target in targets if target.local.numel()]
            reader.fill(held)
            for target, shard in zip(targets, expected, strict=True):
                assert torch.equal(target.local, shard.local), (seed, target.name)
                target.local.zero_()
            # As a resume reads what ranks of a node share: by pieces, each byte once.
            everyone: list[Any] = [None] * 4
            dist.all_gather_object(everyone, (0, [Range(target.name, target.runs) for target in held]))
            wanted = {Range(t.name, t.runs): Destination(TensorSpec(t.shape, t.local.dtype), [t.local]) for t in held}
            problem = read_ranges(reader.read_into, wanted, everyone, fakes.world(), dist.group.WORLD, 64)  # type: ignore[arg-type]
            assert problem is None
            for target, shard in zip(targets, expected, strict=True):
                assert torch.equal(target.local, shard.local), (seed, target.name)
    return several


def test_any_layout_loads_into_any_other(tmp_path: Path) -> None:
    assert all(count > 50 for count in run_ranks(4, "tests.checkpoint.test_runs:fuzz", folder=str(tmp_path), seeds=60))


def columns(folder: str) -> None:
    """A checkpoint of a matrix whose columns two ranks hold."""
    full = torch.arange(4000.0).view(40, 100)
    shard = shard_of("model.w", distributed(full, (2,), (Shard(1),)))
    RangeWriter(Path(folder) / "step_00000001", dist.get_rank(), RunState(1), "plain", 2, {}).write(
        [shard], 4000, dist.group.WORLD
    )  # type: ignore[arg-type]


@pytest.fixture
def of_columns(tmp_path: Path) -> Path:
    run_ranks(2, "tests.checkpoint.test_runs:columns", folder=str(tmp_path))
    return tmp_path / "step_00000001"


def test_a_damaged_piece_is_found_by_its_file(of_columns: Path) -> None:
    file = of_columns / "rank_00001.bin"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    with CheckpointReader(of_columns) as reader:
        assert [problem.split()[0] for problem in reader.problems()] == [str(file)]
        with pytest.raises(CorruptCheckpoint, match=r"rank_00001.bin does not match its checksum .* in model.w"):
            reader.read("model.w")
        left = base.Shard("model.w", (40, 100), 0, torch.empty(2000), 0, 50, 100)
        reader.fill([left])
        assert torch.equal(left.local, torch.arange(4000.0).view(40, 100)[:, :50].reshape(-1))
        with pytest.raises(CorruptCheckpoint, match=r"rank_00001.bin does not match"):
            reader.fill([base.Shard("model.w", (40, 100), 50, torch.empty(2000), 0, 50, 100)])


@pytest.mark.parametrize("runs", [[50, 0], [0, 100], [100, 100], [7, 100], [50, 101], [-50, 100], [50], [50, 100, 1]])
def test_impossible_runs_are_refused(of_columns: Path, runs: list[int]) -> None:
    body = json.loads((of_columns / "manifest.json").read_text())["manifest"]
    for chunk in body["tensors"]["model.w"]["chunks"]:
        chunk[4:-1] = runs
    text = manifests._canonical(body)
    content = f'{{"digest":"{manifests._digest(text)}","manifest":{text}}}'.encode()
    with pytest.raises(CorruptCheckpoint):
        manifests.parse(content, "m")


def test_the_first_schema_loads_unchanged(saved: Path) -> None:
    """It had the same chunks, none of several runs."""
    file = saved / "step_00000003" / "manifest.json"
    body = json.loads(file.read_text())["manifest"]
    assert all(len(chunk) == 5 for tensor in body["tensors"].values() for chunk in tensor["chunks"])
    text = manifests._canonical({**body, "schema": 1})
    file.write_text(f'{{"digest":"{manifests._digest(text)}","manifest":{text}}}')
    plain = fakes.Plain()
    plain.fill(3)
    with CheckpointReader(file.parent) as reader:
        for name, full in plain.wholes.items():
            assert torch.equal(reader.read(name), full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((300, 4000), (3, 4), (Shard(0), Shard(1))),
        ((16, 96, 700), (2, 4), (Shard(1), Shard(0))),
        ((5, 7), (2, 2), (Shard(0), Shard(1))),
    ],
)
def test_initial_weights_of_a_part_are_those_of_the_whole(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...], dtype: torch.dtype
) -> None:
    weights = Weights(7, lambda fqn, full, generator: torch.nn.init.trunc_normal_(full, std=0.02, generator=generator))
    full = torch.empty(math.prod(shape), dtype=dtype)
    weights.fill("w", torch.Size(shape), full)
    for start, length, run, stride in parts_of(shape, mesh, placements):
        part = torch.full((length,), torch.nan, dtype=dtype)
        drawn = weights.values_drawn
        weights.fill("w", torch.Size(shape), part, start, run, stride)
        assert torch.equal(part, full[indices(Runs(start, length, run, stride))])
        span = length if not run else (length // run - 1) * stride + run
        assert weights.values_drawn - drawn <= span + 2 * 2**18 or math.prod(shape) < 2**18


def test_ranks_that_lack_a_column_are_named() -> None:
    flat = torch.zeros(5)
    shards = [base.Shard("model.w", (5, 3), column, flat, 0, 1, 3) for column in (0, 2)]
    with pytest.raises(CheckpointError, match=r"element 1 of model\.w is held by no rank, or by two"):
        check_plans([plan_save([shard])[0] for shard in shards])
