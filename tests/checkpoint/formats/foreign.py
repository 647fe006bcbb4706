"""Folders as DeepSpeed and torch.distributed.checkpoint write them, and what was in memory when they did."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.strategies.base import Shard
from shardkit.strategies.states import buffer_shards
from shardkit.strategies.zero.state import frozen_shards, zero3_shards, zero12_shards
from tests.zero_ops import leave_out_shm

Truth = dict[str, torch.Tensor]
"""Whole tensors by shardkit's names."""


class Net(nn.Module):
    """Odd sizes, a tied head, frozen weights, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 5)
        self.back = nn.Linear(5, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(4))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.frozen(self.norm(self.embed(tokens)))))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, 13, (8, 2), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens[:, 0]).float(), tokens[:, 1])


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay or not: two groups, whose order is not the model's."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


CASES = ("zero1-bf16", "zero2-fp32", "zero3-bf16", "dcp", "dcp-flat")


def make_all(root: str, cases: tuple[str, ...] = CASES) -> None:
    for case in cases:
        name, _, variant = case.partition("-")
        if name == "dcp":
            dcp_folder(f"{root}/{case}", variant)
        else:
            deepspeed_folder(f"{root}/{case}", int(name[-1]), variant)
        gc.collect()
    axes_folder(f"{root}/dcp-axes")


def cube() -> torch.Tensor:
    return torch.arange(4 * 6 * 10, dtype=torch.float32).view(4, 6, 10)


def axes_folder(folder: str) -> None:
    """The same tensor cut along each of its axes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as Along
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    cut = {
        name: distribute_tensor(cube(), mesh, [Along(axis)]) for axis, name in enumerate(("layers", "rows", "columns"))
    }
    dcp.save({"model": cut}, checkpoint_id=folder)


def deepspeed_folder(folder: str, stage: int, precision: str, steps: int = 3) -> None:
    """Train with DeepSpeed itself and let it save; rank 0 leaves what the masters and moments are in truth.pt."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    leave_out_shm()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(
            dist_backend="gloo", auto_mpi_discovery=False, verbose=False, dist_init_required=False
        )
    torch.manual_seed(0)
    linear = nn.functional.linear
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "bf16": {"enabled": precision == "bf16"},
    }
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 30}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for step in range(steps):
        engine.backward(loss_of(engine, 2 * step + dist.get_rank()))
        engine.step()
    truth = deepspeed_state(engine, stage)
    engine.save_checkpoint(folder, client_state={"epoch": 4})
    if dist.get_rank() == 0:
        torch.save(truth, Path(folder) / "truth.pt")
    dist.barrier()
    nn.functional.linear = linear
    engine.destroy()


def deepspeed_state(engine: Any, stage: int) -> Truth:
    """Masters, moments, frozen weights and buffers that the engine holds, whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fqns = {id(param): name for name, param in engine.module.named_parameters()}
    held = list((zero3_shards if stage == 3 else zero12_shards)(engine.optimizer, fqns, rank))
    held += frozen_shards(engine.module, stage, rank, rank, world)
    held += buffer_shards(engine.module, rank)
    everyone: list[list[Shard]] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, [replace(shard, local=shard.local.clone()) for shard in held])
    truth: Truth = {}
    for shard in (shard for shards in everyone for shard in shards if shard.replica == 0):
        whole = truth.setdefault(shard.name, torch.empty(shard.shape, dtype=shard.local.dtype))
        whole.view(-1)[shard.start : shard.start + shard.local.numel()] = shard.local
    return truth


def dcp_folder(folder: str, layout: str = "") -> None:
    """Train under FSDP2 and save with torch.distributed.checkpoint; rank 0 leaves the whole state in truth.pt."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    for step in range(3):
        loss_of(model, 2 * step + dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = layout == "flat"
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    state: dict[str, Any] = {**weights, **moments} if flat else {"model": weights, "optim": moments, "epoch": 4}
    dcp.save(state, checkpoint_id=folder)
    truth: Truth = {}
    for name, param in model.named_parameters():
        truth[f"model.{name}"] = param.detach().full_tensor()
        for key in ("exp_avg", "exp_avg_sq"):
            if key in optimizer.state.get(param, {}):
                truth[f"optim.{name}.{key}"] = optimizer.state[param][key].full_tensor()
    truth |= {f"buffer.{name}": b.clone() for name, b in model.named_buffers() if "scratch" not in name}
    if dist.get_rank() == 0:
        torch.save(truth, Path(folder) / "truth.pt")
    dist.barrier()
