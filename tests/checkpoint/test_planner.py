"""Ranks write every element once, in chunks, and read only what overlaps; whatever does not fit is named."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shardkit.checkpoint.native.manifest import Chunk, TensorEntry
from shardkit.checkpoint.native.reader import _parts
from shardkit.checkpoint.native.writer import check_plans, plan_save
from shardkit.checkpoint.resume import matching_entry, refuse_leftovers
from shardkit.errors import CheckpointError
from shardkit.parallel.runs import Runs
from shardkit.strategies.base import Shard

CHUNK_BYTES = 4000  # 1000 elements of fp32


def shard(start: int, length: int, replica: int = 0, name: str = "model.w", total: int = 5000,
          dtype: torch.dtype = torch.float32) -> Shard:  # fmt: skip
    return Shard(name, (total,), start, torch.arange(start, start + length, dtype=dtype), replica)


def test_a_range_is_cut_into_chunks_and_each_holds_its_own_elements() -> None:
    plan, contents = plan_save([shard(0, 2500), shard(3000, 2000)], CHUNK_BYTES)
    ranges = [(0, 1000), (1000, 1000), (2000, 500), (3000, 1000), (4000, 1000)]
    assert plan.chunks == [("model.w", Runs(*pair)) for pair in ranges]
    assert [content.tolist() for content in contents] == [[*range(start, start + n)] for start, n in ranges]
    assert plan.n_bytes == 4 * 4500


def test_replicas_write_nothing() -> None:
    plan, contents = plan_save([shard(3000, 2000), shard(0, 3000, replica=1)], CHUNK_BYTES)
    assert plan.chunks == [("model.w", Runs(3000, 1000)), ("model.w", Runs(4000, 1000))] and len(contents) == 2
    owner, _ = plan_save([shard(0, 3000)], CHUNK_BYTES)
    check_plans([plan, owner])


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([[shard(0, 2000)], [shard(2001, 2999)]], "element 2000 of model.w is held by no rank, or by two"),
        ([[shard(0, 2000)], [shard(1999, 3001)]], "element 1999 of model.w is held by no rank, or by two"),
        ([[shard(0, 5000, replica=1)]], "element 0 of model.w is held by no rank"),
        ([[shard(0, 2000)], [shard(2000, 3000, total=6000)]], "ranks disagree about the shape of model.w"),
        ([[shard(0, 2000)], [shard(2000, 3000, dtype=torch.int32)]], "ranks disagree about the dtype of model.w"),
    ],
)
def test_a_save_that_would_lack_an_element_is_refused(ranks: list[list[Shard]], problem: str) -> None:
    plans = [plan_save(shards, CHUNK_BYTES)[0] for shards in ranks]
    with pytest.raises(CheckpointError, match=problem):
        check_plans(plans)


def saved(name: str = "model.w", cuts: tuple[int, ...] = (0, 1000, 2000, 5000)) -> TensorEntry:
    chunks = [Chunk(low, high - low, file=0, offset=4 * low, crcs=(0,)) for low, high in pairwise(cuts)]
    return TensorEntry(name, "float32", (cuts[-1],), tuple(chunks))


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, 5000, [(0, 0, 0, 1000), (1, 0, 1000, 1000), (2, 0, 2000, 3000)]),
        (1000, 1000, [(1, 0, 0, 1000)]),
        (999, 1002, [(0, 999, 0, 1), (1, 0, 1, 1000), (2, 0, 1001, 1)]),
        (2500, 10, [(2, 500, 0, 10)]),
    ],
)
def test_a_load_reads_the_parts_of_chunks_that_overlap_and_no_more(
    start: int, length: int, expected: list[tuple[int, int, int, int]]
) -> None:
    """(chunk, first element in it, first element of the target, number of elements)."""
    entry, target = saved(), shard(start, length).local
    parts = [*_parts(entry, shard(start, length))]
    planned = [(entry.chunks.index(chunk), first, int(part[0]) - start, len(part)) for chunk, first, part in parts]
    assert planned == expected
    assert torch.cat([part for _, _, part in parts]).tolist() == target.tolist()


def test_another_shape_or_type_is_never_reshaped_or_cast() -> None:
    tensors = {"model.w": saved()}
    with pytest.raises(CheckpointError, match=r"model\.w is \[5000\] in the checkpoint, \[6000\] in this run"):
        matching_entry(tensors, shard(0, 10, total=6000))
    with pytest.raises(CheckpointError, match=r"model\.w is float32 in the checkpoint, float16 in this run"):
        matching_entry(tensors, shard(0, 10, dtype=torch.float16))
    with pytest.raises(CheckpointError, match=r"the checkpoint has no model\.v"):
        matching_entry(tensors, shard(0, 10, name="model.v"))


@pytest.mark.parametrize(
    ("run_names", "dropped"),
    [
        (["model.a", "model.b"], "model.c, which"),
        (["model.a"], "model.b and 1 more, which"),
        ([], "model.a and 2 more, which"),
    ],
)
def test_what_a_run_would_drop_is_named_and_counted(run_names: list[str], dropped: str) -> None:
    tensors = {name: saved(name) for name in ("model.c", "model.a", "model.b", "rng.0.cpu")}
    with pytest.raises(CheckpointError, match=f"the checkpoint holds {dropped} this run has no place for"):
        refuse_leftovers(tensors, run_names)
    refuse_leftovers(tensors, ["model.a", "model.b", "model.c"])
