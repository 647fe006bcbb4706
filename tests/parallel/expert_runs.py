"""Runs whose experts are split over ranks, and the same runs in one process: every gradient and weight."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.errors import ConfigError
from shardkit.parallel import experts as experts_module
from shardkit.parallel.runs import runs_of
from shardkit.run.block_calls import plain
from shardkit.run.job import start
from shardkit.tasks.load import load_task

SEQ, ROWS, STEPS = 16, 8, 3
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_DEEP = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
                  "norm_topk_prob": True},
    "olmoe": {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**_DEEP, "n_group": 1},
    "deepseek_v3": {**_DEEP, "n_group": 2, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "gpt_oss": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8,
                "sliding_window": 8},
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # The step is the gradient: a wrong factor, which AdamW would hide, shows in the weights.
    "sgd": {"optim.name": "sgd", "optim.lr": 0.3, "optim.weight_decay": 0.0, "train.max_norm": None},
    "clipped": {"optim.name": "sgd", "optim.lr": 0.3, "optim.weight_decay": 0.0, "train.max_norm": 0.05},
    "adamw": {"optim.name": "adamw", "optim.lr": 3e-3, "optim.eps": 1e-4, "train.max_norm": 0.5},
}


def hf(family: str, **keys: Any) -> dict[str, Any]:
    return {"task.name": "hf_causal_lm", "model.hf": {"model_type": family, **_SIZES, **FAMILIES[family], **keys}}


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


@dataclass
class Ran:
    steps: list[tuple[float, float]]  # (loss, norm)
    gradients: list[dict[str, torch.Tensor]]  # of each step, before clipping
    weights: dict[str, torch.Tensor]  # after them


def batch(step: int, seq: int = SEQ) -> dict[str, torch.Tensor]:
    """The step's rows, with as many targets as no other row has, and padding behind some of them."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 64, (ROWS, seq), generator=generator)
    targets = tokens.roll(-1, 1)
    for row in range(ROWS):
        targets[row, seq - 1 - row - step :] = -100
    return {"tokens": tokens, "targets": targets, "real": (targets != -100) | (torch.arange(seq) < seq - 4)}


def assembled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor whole, from the parts that ranks hold; parts that several hold have to be equal."""
    parts: list[Any] = []
    for name, tensor in tensors.items():
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None:
            parts.append((name, tensor.shape, (0, tensor.numel(), 0, 0), tensor.detach().clone().view(-1)))
        else:
            held = runs_of(tensor.shape, mesh.shape, mesh.get_coordinate(), tensor.placements)
            parts.append((name, tuple(tensor.shape), tuple(held), tensor.to_local().detach().clone().view(-1)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    out: dict[str, torch.Tensor] = {}
    for name, shape, (begin, length, run, stride), local in (part for rank in everyone for part in rank):
        full = out.setdefault(name, torch.full(shape, float("nan")))
        if length:
            rows = (length // run, run) if run else (1, length)
            full.view(-1)[begin:].as_strided(rows, (stride, 1)).copy_(local.float().view(rows))
    return out


def unused(model: nn.Module, experts: list[int]) -> nn.Module:
    """No rank chooses these experts of any layer: each one's rows go to an expert before it."""

    chosen = torch.tensor(experts)

    def choose_another(module: nn.Module, args: Any, out: Any) -> Any:
        logits, weights, index = out
        return logits, weights, torch.where(torch.isin(index, chosen), index - min(experts), index)

    for module in model.modules():
        if hasattr(module, "top_k") and hasattr(module, "weight"):
            module.register_forward_hook(choose_another)
    return model


def run(
    settings: dict[str, Any],
    accum: int = 1,
    dead: list[int] | None = None,
    seq: int = SEQ,
    products: str = "grouped_mm",
) -> Ran:
    """Train by `settings` in this rank's world, on the same rows in any world."""
    world = dist.get_world_size()
    full = {
        "run.device": "cpu", "train.seq_len": seq, "train.grad_accum_steps": accum,
        "train.micro_batch_size": max(1, ROWS // accum // world), "optim.schedule": "constant", **settings,
    }  # fmt: skip
    cp = settings.get("parallel.cp", 1)
    with start(None, full) as job:
        task: Any = load_task(job.config)
        if dead is not None:  # the loop over experts that have rows: fused kernels use every weight
            products = "eager"
        assert task.hf.reference.config._experts_implementation == "grouped_mm"
        task.hf.config._experts_implementation = products
        for name, buffer in task.hf.reference.named_buffers():
            if name.endswith("e_score_correction_bias"):  # it chooses experts, and is not trained
                buffer.copy_(torch.linspace(0.0, 0.3, len(buffer)))

        def build() -> nn.Module:
            model: nn.Module = task.build_model()
            return model if dead is None else unused(model, dead)

        job.wrap(build, init_parameter=task.init_parameter, block_classes=task.block_classes)
        strategy, gradients = job.strategy, list[dict[str, torch.Tensor]]()
        take = strategy.step

        def step(request: Any) -> Any:
            named = {plain(name): strategy.gradient(p) for name, p in strategy.model.named_parameters()}
            gradients.append(assembled({name: grad for name, grad in named.items() if grad is not None}))
            return take(request)

        strategy.step = step
        steps = []
        for number in range(STEPS):
            rows = {key: rows[job.world.data_rank :: job.world.data_size] for key, rows in batch(number, seq).items()}
            size = len(rows["tokens"]) // accum
            pieces = [{k: v[at * size : (at + 1) * size] for k, v in rows.items()} for at in range(accum)]
            if cp > 1:
                pieces = [
                    task.split_sequences({**piece, "lengths": [seq] * size}, job.world.loss_rank % cp, cp)
                    for piece in pieces
                ]
            result = job.step(pieces, task.loss, lambda piece: int((piece["targets"] != -100).sum()))
            steps.append((result.loss, result.grad_norm))
        names = {plain(name): param for name, param in strategy.model.named_parameters()}
        weights = {name.removeprefix("model."): tensor for name, tensor in state(job).items()}
        weights = {name: tensor for name, tensor in weights.items() if name in names}
    gc.collect()
    dist.barrier()
    return Ran(steps, gradients, weights)


def state(job: Any) -> dict[str, torch.Tensor]:
    """Every weight and moment, from the parts that ranks write to checkpoints: each once."""
    parts = [(s.name, s.shape, tuple(s.runs), s.local.detach().clone()) for s in job.strategy.shards() if not s.replica]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    held, out = dict[str, int](), dict[str, torch.Tensor]()
    for name, shape, (begin, length, run, stride), local in (part for rank in everyone for part in rank):
        full = out.setdefault(name, torch.full(shape, float("nan")))
        held[name] = held.get(name, 0) + length
        if length:
            rows = (length // run, run) if run else (1, length)
            full.view(-1)[begin:].as_strided(rows, (stride, 1)).copy_(local.view(rows))
    assert all(held[name] == full.numel() and not full.isnan().any() for name, full in out.items())
    return out


def leg(settings: dict[str, Any], folder: str, step: int) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Load the folder's checkpoint of `step`, if it is not the first, take two steps and save; the state before and
    after them, and their losses."""
    world = dist.get_world_size()
    full = {**hf("mixtral"), **OPTIMIZERS["adamw"], "run.device": "cpu", "train.seq_len": SEQ, **settings}
    full |= {"train.micro_batch_size": ROWS // world, "optim.schedule": "constant"}
    with start(None, full) as job:
        task: Any = load_task(job.config)
        job.wrap(task.build_model, init_parameter=task.init_parameter, block_classes=task.block_classes)
        saves = Checkpointer(job.strategy, job.world, job.config.checkpoint, folder, timeout_s=60, chunk_bytes=1024)
        if step:
            loaded = saves.resume(Path(folder) / f"step_{step:08d}")
            assert loaded is not None
        before, losses = state(job), []
        for number in range(step, step + 2):
            rows = {
                key: rows[job.world.data_rank :: job.world.data_size] for key, rows in batch(number % STEPS).items()
            }
            losses.append(job.step([rows], task.loss, lambda piece: int((piece["targets"] != -100).sum())).loss)
        saves.save(RunState(step=step + 2))
        saves.close()
        after = state(job)
    gc.collect()
    return before, after, losses


def runs(cases: dict[str, dict[str, Any]]) -> dict[str, Ran]:
    return {name: run(**case) for name, case in cases.items()}


def distance(found: Ran, expected: Ran) -> tuple[float, str]:
    """The largest difference of a gradient or weight, as a share of its tensor's largest value; and its name."""
    worst = 0.0, ""
    pairs = [("weights", found.weights, expected.weights)]
    pairs += [(f"step {n}", *both) for n, both in enumerate(zip(found.gradients, expected.gradients, strict=True))]
    for label, tensors, others in pairs:
        assert tensors.keys() == others.keys(), (label, tensors.keys() ^ others.keys())
        for name, tensor in tensors.items():
            largest = float(others[name].abs().max())
            off = float((tensor - others[name]).abs().max())
            if not off <= worst[0] * largest:
                worst = off / max(largest, 1e-12), f"{label}: {name}"
    return worst


def exchanges(policies: list[str]) -> dict[str, int]:
    """All-to-alls of a step, by the policy of recomputation."""
    counts = {}
    for policy in policies:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run({**hf("mixtral"), **OPTIMIZERS["sgd"], "parallel.strategy": "fsdp", "parallel.ep": 2,
                 "activation.policy": policy})  # fmt: skip
        counts[policy] = sum(event.count for event in profiler.key_averages() if event.key == "gloo:all_to_all")
    return counts


@contextmanager
def fault(name: str) -> Iterator[None]:
    """One of the silent faults of expert parallelism."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "default factor":
            shard_experts = experts_module.shard_experts

            def without_factor(model: nn.Module, parallel: Any, n_losses: int, *rest: Any) -> None:
                shard_experts(model, parallel, parallel.among_groups.size(), *rest)

            patch.setattr("shardkit.strategies.fsdp.shard_experts", without_factor)
        elif name == "forced sum":  # where one group holds all experts
            fsdp: Any = experts_module.FSDPModule
            force = fsdp.set_force_sum_reduction_for_comms
            patch.setattr(fsdp, "set_force_sum_reduction_for_comms", lambda module, _: force(module, True))
        elif name == "rows of all":  # where ranks share layers
            make = experts_module.ExpertParallel.__init__
            patch.setattr(experts_module.ExpertParallel, "__init__", lambda self, *args: make(self, *args[:2]))
        else:
            assert name == "none"
        yield


def faulty(name: str, cases: dict[str, dict[str, Any]]) -> dict[str, Ran]:
    with fault(name):
        return runs(cases)


class OwnExperts(nn.Module):
    """A user's own experts, by the hook of docs/wide.md."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, 8, 16) * 0.1)
        self.bias = nn.Parameter(torch.zeros(num_experts, 8))
        self.down = nn.Parameter(torch.randn(num_experts, 16, 8) * 0.1)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            row, choice = torch.where(index == expert)
            inner = nn.functional.linear(hidden[row], self.up[expert], self.bias[expert]).relu()
            out = out.index_add(0, row, nn.functional.linear(inner, self.down[expert]) * weights[row, choice, None])
        return out


class OwnBlock(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(16), nn.Linear(16, num_experts), OwnExperts(num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x).flatten(0, 1)
        weights, index = self.router(hidden).softmax(-1).topk(2, -1)
        return x + self.experts(hidden, index, weights).view(x.shape)


class Own(nn.Module):
    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(OwnBlock(num_experts) for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def own_loop(settings: dict[str, Any]) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    with start(None, {"run.device": "cpu", **OPTIMIZERS["sgd"], **settings}) as job:
        job.wrap(Own)

        def loss(model: nn.Module, piece: dict[str, torch.Tensor]) -> torch.Tensor:
            logits, targets = model(piece["tokens"]).flatten(0, 1), piece["targets"].flatten()
            return nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)

        steps = []
        for number in range(STEPS):
            rows = {key: rows[job.world.data_rank :: job.world.data_size] for key, rows in batch(number).items()}
            result = job.step([rows], loss, lambda piece: int((piece["targets"] != -100).sum()))
            steps.append((result.loss, result.grad_norm))
        return steps, assembled(dict(job.strategy.model.named_parameters()))


def refused(build: str, ep: int) -> tuple[str, str]:
    """What is said of a model that cannot split its experts."""
    model = {"none": lambda: nn.Sequential(nn.Linear(4, 4)), "three": lambda: Own(3)}[build]
    settings = {"parallel.strategy": "fsdp", "parallel.ep": ep, "run.device": "cpu"}
    with pytest.raises(ConfigError) as caught, start(None, settings) as job:
        job.wrap(model)
    return caught.value.cause, caught.value.fix
