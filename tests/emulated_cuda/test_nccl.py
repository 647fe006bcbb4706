"""ProcessGroupNCCL over the emulated NCCL: the values of gloo, in the streams' order, and the watchdog's eye."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulated_cuda import needs_emulation
from tests.ranks import RankError, run_ranks

pytestmark = [pytest.mark.gpu, needs_emulation]

LARGE = 700_001  # elements: more than a slot or a mailbox holds at a time, and odd


def gpu_ranks(world: int, name: str, **kwargs: Any) -> list[Any]:
    return run_ranks(world, f"{__name__}:{name}", gpu=True, **kwargs)


def exchanged(name: str, root: int, x: torch.Tensor, group: Any) -> torch.Tensor:
    """What this rank has of `x` after an operation of all ranks, with rank `root`, or with its neighbours in a ring."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, parts = x.clone(), [torch.empty_like(x) for _ in range(world)]
    if name in ("SUM", "MAX", "MIN", "PRODUCT"):
        dist.all_reduce(out, getattr(dist.ReduceOp, name), group=group)
    elif name == "broadcast":
        dist.broadcast(out, root, group=group)
    elif name == "reduce":
        dist.reduce(out, root, group=group)
        out = out if rank == root else x  # another rank's is not defined
    elif name == "all_gather":
        dist.all_gather(parts, x, group=group)
        out = torch.cat(parts)
    elif name == "all_gather_into_tensor":
        out = x.new_empty(world * len(x))
        dist.all_gather_into_tensor(out, x, group=group)
    elif name == "reduce_scatter_tensor":
        out = x.new_empty(len(x) // world)
        dist.reduce_scatter_tensor(out, x, group=group)
    elif name == "all_to_all_single":
        dist.all_to_all_single(out, x, group=group)
    elif name == "batch_isend_irecv":
        ring = ((dist.isend, x, (rank + 1) % world), (dist.irecv, out, (rank - 1) % world))
        for request in dist.batch_isend_irecv([dist.P2POp(*message, group=group) for message in ring]):
            request.wait()
    elif rank < 2:
        (dist.send if rank == 0 else dist.recv)(out, 1 - rank, group=group)
    return out


def collectives(size: int, dtype: str) -> list[str]:
    """Names of the collectives whose result differs from gloo's. Whole numbers, so that the order of sums is free."""
    gloo = dist.new_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(rank)
    of_all = ("SUM", "MAX", "MIN", "PRODUCT", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
              "all_to_all_single", "batch_isend_irecv", "send and recv")  # fmt: skip
    rooted = [(name, root) for name in ("broadcast", "reduce") for root in range(world)]
    wrong = []
    for name, root in [*((name, 0) for name in of_all), *rooted]:
        host = torch.randint(-4, 5, (world * size,), generator=random).to(getattr(torch, dtype))
        if not torch.equal(exchanged(name, root, host, gloo), exchanged(name, root, host.cuda(), None).cpu()):
            wrong.append(f"{name} {root}")
    return wrong


@pytest.mark.parametrize(("world", "size", "dtype"), [(2, LARGE, "float32"), (3, 5, "float16"), (4, 1000, "int64")])
def test_collectives_give_what_gloo_gives(world: int, size: int, dtype: str) -> None:
    assert gpu_ranks(world, "collectives", size=size, dtype=dtype) == [[]] * world


def rounding(dtype: str) -> None:
    """Two ranks' sum, average and scaled sum are those of float32, rounded once."""
    rank = dist.get_rank()
    kind: torch.dtype = getattr(torch, dtype)
    random = torch.Generator().manual_seed(0)
    wide = torch.cat(
        [
            torch.randn(2, 5000, generator=random),
            torch.randn(2, 5000, generator=random) * 1e-6,  # subnormal in float16
            torch.randn(2, 500, generator=random) * 6e4,  # up to its infinity
            torch.tensor([[float("inf"), float("nan"), 0.0], [1.0, 1.0, -0.0]]),
        ],
        dim=1,
    ).to(kind)
    total = wide[0].float() + wide[1].float()
    cases = [(dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / 2)]
    if dtype != "bfloat16":  # torch hands NCCL a float32's bytes as the factor there
        cases.append((dist._make_nccl_premul_sum(0.25), total / 4))
    for op, wanted in cases:
        mine = wide[rank].cuda()
        dist.all_reduce(mine, op)
        torch.testing.assert_close(mine.cpu(), wanted.to(kind), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(dtype: str) -> None:
    gpu_ranks(2, "rounding", dtype=dtype)


def late_collective() -> list[float]:
    """A sum read before and after its wait; the other rank comes once this one has looked."""
    rank = dist.get_rank()
    gloo = dist.new_group(backend="gloo")
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        dist.barrier(gloo)
    work = dist.all_reduce(x, async_op=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        before = x[0].item()
    if rank == 0:
        dist.barrier(gloo)
    work.wait()
    return [before, x[0].item()]


def test_a_collective_runs_beside_the_program_until_it_is_waited_for() -> None:
    assert gpu_ranks(2, "late_collective")[0] == [2.0, 4.0]


def subgroups() -> float:
    """A sum in each half of four ranks: the communicators are split from the world's."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(x, group=halves[rank // 2])
    return x.item()


def test_subgroups_sum_apart() -> None:
    assert gpu_ranks(4, "subgroups") == [1.0, 1.0, 5.0, 5.0]


def disagree() -> None:
    x = torch.ones(4 + dist.get_rank(), device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()


def test_ranks_that_disagree_fail_instead_of_hanging() -> None:
    with pytest.raises(RankError):
        gpu_ranks(2, "disagree", timeout=60)
