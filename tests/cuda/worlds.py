"""A program for `tests/cuda/test_rehearsed_worlds.py`: three steps under several engines, and each one's peaks.

`worlds.py MODE…` on four ranks; `bound` among the modes gives the process group its device, so that groups are split.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(4)])


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(blocks().cuda())


def fsdp() -> nn.Module:
    model = blocks().cuda()
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def hsdp() -> nn.Module:
    model = blocks().cuda()
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = blocks().cuda()
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, WIDTH, device="cuda")).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_zero3() -> None:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = blocks()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3):
        x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
        engine.backward(engine(x).pow(2).mean())
        engine.step()


def talk() -> None:
    """Objects, host tensors and barriers, over NCCL and gloo."""
    world, rank = dist.get_world_size(), dist.get_rank()
    gloo = dist.new_group(backend="gloo")
    for group in (None, gloo):
        names: list[str | None] = [None] * world
        dist.all_gather_object(names, f"rank {rank}", group=group)
        objects = ["from rank 0"] if rank == 0 else [None]
        dist.broadcast_object_list(objects, src=0, group=group)
        gathered: list[str | None] | None = [None] * world if rank == 0 else None
        dist.gather_object(f"rank {rank}", gathered, dst=0, group=group)
        assert names[0] == "rank 0" and objects == ["from rank 0"] and (rank or gathered == names)
        dist.barrier(group)
    dist.monitored_barrier(gloo)
    total = torch.ones(3)
    dist.all_reduce(total, group=gloo)
    assert total.tolist() == [world] * 3


def asynchronous_tensor_parallel() -> None:
    """Products of gathered rows, and rows that are summed and scattered, through symmetric memory."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group().group_name
    enable_symm_mem_for_group(group)
    weight = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    for rows in (64, 64, 256):  # the last needs a larger workspace
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        _, (gathered,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, group)
        assert gathered.shape == (2 * rows, WIDTH)
        assert torch.ops.symm_mem.fused_matmul_reduce_scatter(gathered, weight, "sum", 0, group).shape == x.shape


def main(modes: Iterable[str]) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if "bound" in modes else None)
    engines = {"ddp": ddp, "fsdp": fsdp, "hsdp": hsdp, "tp": tensor_parallel}
    torch.autograd.set_multithreading_enabled(False)  # its thread may hold activations for longer on a busy machine
    for mode in modes:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if mode in engines:
            train(engines[mode]())
        elif mode == "zero3":
            train_zero3()
        elif mode == "talk":
            talk()
        elif mode == "symmetric":
            asynchronous_tensor_parallel()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"PEAK {mode} {dist.get_rank()} {allocated} {reserved}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
