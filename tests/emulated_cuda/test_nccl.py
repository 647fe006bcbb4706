"""ProcessGroupNCCL over the emulated NCCL: the values of gloo, in the streams' order, and the watchdog's eye."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulated_cuda import needs_emulation
from tests.ranks import RankError, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.dist, needs_emulation]

LARGE = 700_001  # elements: more than a slot or a mailbox holds at a time, and odd


def gpu_ranks(world: int, name: str, **kwargs: Any) -> list[Any]:
    return run_ranks(world, f"{__name__}:{name}", gpu=True, **kwargs)


def collectives(size: int, dtype: str) -> list[str]:
    """Names of the collectives whose result differs from gloo's. Whole numbers, so that the order of sums is free."""
    gloo = dist.new_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(rank)
    wrong = []

    def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.randint(-4, 5, (number,), generator=random).to(getattr(torch, dtype))
        return host, host.cuda()

    def compare(name: str, host: torch.Tensor, gpu: torch.Tensor) -> None:
        if not torch.equal(host, gpu.cpu()):
            wrong.append(name)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        host, gpu = data(size)
        dist.all_reduce(host, op, group=gloo)
        dist.all_reduce(gpu, op)
        compare(f"all_reduce {op}", host, gpu)
    for root in range(world):
        host, gpu = data(size)
        dist.broadcast(host, root, group=gloo)
        dist.broadcast(gpu, root)
        compare(f"broadcast from {root}", host, gpu)
        host, gpu = data(size)
        dist.reduce(host, root, group=gloo)
        dist.reduce(gpu, root)
        if rank == root:
            compare(f"reduce to {root}", host, gpu)
    host, gpu = data(size)
    gathered = [torch.empty_like(host) for _ in range(world)]
    dist.all_gather(gathered, host, group=gloo)
    into = torch.empty(world * size, dtype=gpu.dtype, device="cuda")
    dist.all_gather_into_tensor(into, gpu)
    compare("all_gather_into_tensor", torch.cat(gathered), into)
    lists = [torch.empty_like(gpu) for _ in range(world)]
    dist.all_gather(lists, gpu)
    compare("all_gather", torch.cat(gathered), torch.cat(lists))

    host, gpu = data(world * size)
    dist.all_reduce(host, group=gloo)
    mine = torch.empty(size, dtype=gpu.dtype, device="cuda")
    dist.reduce_scatter_tensor(mine, gpu)
    compare("reduce_scatter_tensor", host.chunk(world)[rank], mine)

    host, gpu = data(world * size)
    received = torch.empty_like(gpu)
    dist.all_to_all_single(received, gpu)
    parts = [torch.empty_like(host) for _ in range(world)]
    dist.all_gather(parts, host, group=gloo)
    compare("all_to_all_single", torch.cat([part.chunk(world)[rank] for part in parts]), received)

    host, gpu = data(size)
    before, after = torch.empty_like(host), torch.empty_like(gpu)
    to, source = (rank + 1) % world, (rank - 1) % world
    requests = [dist.isend(host, to, group=gloo), dist.irecv(before, source, group=gloo)]
    for request in requests:
        assert request is not None
        request.wait()
    both = [dist.P2POp(dist.isend, gpu, to), dist.P2POp(dist.irecv, after, source)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    compare("batch_isend_irecv", before, after)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(gpu if rank == 0 else after, 1 - rank)
        if rank == 1:
            dist.recv(before, 0, group=gloo)
            compare("recv", before, after)
        else:
            dist.send(host, 1, group=gloo)
    dist.barrier()
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
    assert work is not None
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
