"""Runs that split layers or experts over ranks beside other settings, and the same runs in one process."""

from __future__ import annotations

import gc
import os
import random
import zlib
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardkit.config.schema import OptimConfig
from shardkit.errors import ConfigError
from shardkit.parallel.optim import parameter_groups
from shardkit.run.job import start
from shardkit.tasks.load import load_task
from tests.parallel.expert_runs import FAMILIES, OPTIMIZERS, ROWS, SEQ, STEPS, Ran, assembled, batch

_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    axis: {"task.name": "hf_causal_lm", "model.hf": {**_SIZES, "model_type": kind, **FAMILIES.get(kind, {}), **keys}}
    for axis, kind, keys in (("tp", "qwen3", {}), ("ep", "mixtral", {"intermediate_size": 64}))
}
LORA = {"adapter.type": "lora", "adapter.r": 4, "adapter.targets": ["q_proj", "o_proj"]}
FACTS: dict[str, dict[str, Any]] = {
    **{
        policy: {"activation.policy": policy} for policy in ("full", "selective", "selective_op", "every_k")
    },
    "offloaded activations": {"activation.offload": "cpu", "activation.offload_min_bytes": 0},
    "offloaded parameters": {"parallel.offload_param": "cpu"},
    **{mode: {"precision.mode": mode} for mode in ("bf16", "pure_bf16", "fp16", "fp8")},
    "lora": LORA,
    "lora everywhere": {**LORA, "adapter.targets": "all-linear"},
    "4 bits": {**LORA, "model.quantize": {"bits": 4}},
    "4 bits, scales too": {
        **LORA, "adapter.targets": "all-linear", "model.quantize": {"bits": 4, "double": True}
    },
    "4-bit experts": {**LORA, "adapter.targets": "all-linear", "model.quantize": {"bits": 4, "experts": True}},
    "4-bit experts, scales too": {
        **LORA, "adapter.targets": "all-linear", "model.quantize": {"bits": 4, "experts": True, "double": True}
    },
    "compiled": {"compile.enabled": True},
    "budget": {"compile.enabled": True, "activation.policy": "budget", "activation.budget": 0.3},
    **{
        f"adamw {kernel}": {**OPTIMIZERS["adamw"], "optim.implementation": kernel}
        for kernel in ("fused", "foreach", "for_loop")
    },
    "muon": {**OPTIMIZERS["adamw"], "optim.name": "muon"},
    "adamw8bit": {**OPTIMIZERS["adamw"], "optim.name": "adamw8bit"},
    "averages": {"train.ema_decay": 0.5},
    "tiles": {"model.mlp_chunks": 3},
    "clipped": {"train.max_norm": 0.05},
    "gathered": {"parallel.reshard_after_forward": False},
    "reduced once": {"parallel.no_sync": True},
    "whole logits": {"model.loss_chunk_size": 0},
}  # fmt: skip
"""What can stand beside a split layer or split experts."""
AXES: dict[str, dict[str, Any]] = {
    "tp": {"parallel.tp": 2}, "tp, cp": {"parallel.tp": 2, "parallel.cp": 2},
    "tp, replicas": {"parallel.tp": 2, "parallel.strategy": "hsdp", "parallel.dp_shard": 1},
    "ep": {"parallel.ep": 2}, "ep of all": {"parallel.ep": 4}, "ep, cp": {"parallel.ep": 2, "parallel.cp": 2},
    "tp, ep": {"parallel.tp": 2, "parallel.ep": 4}, "tp, sequence": {"parallel.tp": 2, "parallel.tp_sequence": True},
}  # fmt: skip


def case(axis: str, *facts: str) -> dict[str, Any]:
    """The settings of an axis beside some facts, the last of which win."""
    settings = {
        "parallel.strategy": "fsdp",
        **MODELS["ep" if "ep" in axis.split(", ") or axis[:2] == "ep" else "tp"],
        **OPTIMIZERS["sgd"],
        **AXES[axis],
    }
    for fact in facts:
        settings |= FACTS[fact]
    return settings


def drawn(seed: int) -> tuple[str, ...]:
    """An axis and three facts."""
    draws = random.Random(seed)
    return draws.choice(list(AXES)), *draws.sample(list(FACTS), 3)


def is_exact(settings: dict[str, Any]) -> bool:
    return settings.get("precision.mode", "fp32") == "fp32"


def alone(settings: dict[str, Any]) -> dict[str, Any]:
    """The same training in one process; in bf16 by the same engine, whose casts are its own."""
    engine = "single" if is_exact(settings) else "fsdp"
    return {key: value for key, value in settings.items() if not key.startswith("parallel.")} | {
        "parallel.strategy": engine
    }


def run(settings: dict[str, Any]) -> Ran:
    """Train by `settings` in this rank's world, on the same rows in any world."""
    cp = settings.get("parallel.cp", 1)
    data_ranks = dist.get_world_size() // settings.get("parallel.tp", 1)
    full = {
        "run.device": "cpu", "train.seq_len": SEQ, "train.micro_batch_size": ROWS // data_ranks,
        "optim.schedule": "constant", "optim.weight_decay": 0.0, **settings,
    }  # fmt: skip
    with ExitStack() as stack:
        # Muon orthogonalises in bf16, whose rounding would hide an error.
        stack.enter_context(patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone))
        if settings.get("compile.enabled"):  # inductor takes minutes, and its code is that of any other model
            torch.compiler.reset()
            stack.enter_context(
                patch.object(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
            )
        job = stack.enter_context(start(None, full))
        task: Any = load_task(job.config)
        job.wrap(task.build_model, init_parameter=task.init_parameter, block_classes=task.block_classes)
        strategy, gradients = job.strategy, list[dict[str, torch.Tensor]]()
        fill_packed(strategy)
        take = strategy.step

        def step(request: Any) -> Any:
            named = {name: strategy.gradient(p) for name, p in strategy.model.named_parameters()}
            gradients.append(assembled({name: grad for name, grad in named.items() if grad is not None}))
            return take(request)

        strategy.step = step  # type: ignore[method-assign]
        steps = []
        for number in range(STEPS):
            rows: dict[str, Any] = {
                key: rows[job.world.data_rank :: job.world.data_size] for key, rows in batch(number).items()
            }
            if cp > 1:
                rows["lengths"] = [SEQ] * len(rows["tokens"])
                rows = task.split_sequences(rows, job.world.loss_rank % cp, cp)
            result = job.step([rows], task.loss, lambda piece: int((piece["targets"] != -100).sum()))
            steps.append((result.loss, result.grad_norm))
        with strategy.evaluating():  # the averages, if there are any
            weights = assembled(dict(strategy.model.named_parameters()))
    return Ran(steps, gradients, weights)


def fill_packed(strategy: Any) -> None:
    """Give weights in 4 bits some values, the same in any world: the trainer packs them, and no task does."""
    for shard in strategy.shards():
        part = shard.name.rpartition(".")[2]
        if part not in ("packed", "absmax", "nested"):
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
        whole = torch.randint(0, 256, shard.shape, dtype=torch.uint8, generator=generator)
        if part != "packed":
            n_scales = whole.numel() // 4
            whole = (0.05 + 0.1 * torch.rand(n_scales, generator=generator)).view(torch.uint8)
        for at, values in shard.ranges():
            values.copy_(whole.view(-1)[at : at + values.numel()])
    strategy.weights_changed()


def overflow() -> tuple[list[bool], float]:
    """Whether each parameter keeps its values in a step in which rank 3 overflows, and the next scale of the loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, part, placements in zip(model, (mesh["dp"], mesh), ([Shard(0)], [Shard(0), Shard(1)]), strict=True):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), part, placements))
    optimizer = torch.optim.SGD(parameter_groups(OptimConfig(), model), lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    params, before = list(model.parameters()), [param.to_local().clone() for param in model.parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    if dist.get_rank() == 3:
        params[1].grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return [torch.equal(param.to_local(), old) for param, old in zip(params, before, strict=True)], scaler.get_scale()


def attempts_on_cards(cases: dict[str, dict[str, Any]]) -> dict[str, Ran | str]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # gloo for what is offloaded: its norm is summed on the CPU.
    store = dist.FileStore(os.environ["RANKS_STORE"], world)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world)
    return attempts({name: {**settings, "run.device": "cuda"} for name, settings in cases.items()})


def attempts(cases: dict[str, dict[str, Any]]) -> dict[str, Ran | str]:
    """What each case trained, or why it was refused."""
    done: dict[str, Ran | str] = {}
    for name, settings in cases.items():
        try:
            done[name] = run(settings)
        except ConfigError as error:
            done[name] = str(error)
        gc.collect()
        dist.barrier()
    return done
