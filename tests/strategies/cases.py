"""A small ragged training job that every strategy runs on the same data, and what it reports back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from shardkit.config.schema import ModelConfig
from shardkit.models.transformer import Block, Transformer, init_parameter
from shardkit.parallel.precision import to_device
from shardkit.run.job import Job, start
from shardkit.strategies.base import Update

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""
GLOBAL_BATCH, ACCUM, STEPS, SEQ = 24, 2, 8, 24
MODEL = ModelConfig(vocab_size=48, max_seq_len=SEQ, d_model=32, n_layers=2, n_heads=2, loss_chunk_size=64)

# ZeRO-3 keeps small parameters whole by default; these make it shard everything even in a tiny model.
PARTITION_ALL = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
}


def on_cpus(case: str) -> dict[str, Any]:
    """Settings of a case without a GPU: a strategy that shards all it can, `+optimizer` and `+param` for offload."""
    strategy, *offloaded = case.split("+")
    out: dict[str, Any] = {"parallel.strategy": strategy, "run.device": "cpu"}
    out |= {f"parallel.offload_{part}": "cpu" for part in offloaded}
    if strategy == "zero3":
        out["parallel.ds_config"] = PARTITION_ALL
    if strategy == "hsdp":
        out["parallel.dp_replicate"] = 2
    return out


OPTIMIZERS = {
    "adamw_clipped": {"optim.name": "adamw", "optim.lr": 3e-3, "train.max_norm": 0.5},
    "sgd_unclipped": {"optim.name": "sgd", "optim.lr": 0.2, "optim.weight_decay": 0.0, "train.max_norm": None},
}


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's global batch: tokens and targets [GLOBAL_BATCH, SEQ], each row cut to its own length."""
    g = torch.Generator().manual_seed(1000 + step)
    start_at = torch.randint(0, 6, (GLOBAL_BATCH, 1), generator=g)
    tokens = (start_at + torch.arange(SEQ + 1) * 5) % 48
    lengths = torch.randint(2, SEQ + 1, (GLOBAL_BATCH,), generator=g)
    targets = tokens[:, 1:].clone()
    targets[torch.arange(SEQ)[None, :] >= lengths[:, None]] = -100
    return tokens[:, :-1].contiguous(), targets


def micro_batches(step: int, rank: int, world: int, accum: int = ACCUM) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share: the rows split evenly over micro-batches, then over ranks."""
    tokens, targets = samples(step)
    out = []
    for chunk_t, chunk_y in zip(tokens.chunk(accum), targets.chunk(accum), strict=True):
        out.append((chunk_t.chunk(world)[rank], chunk_y.chunk(world)[rank]))
    return out


def loss_fn(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0], batch[1])


def n_targets(batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    return int((batch[1] != -100).sum())


def overrides(case: str, world: int, optimizer: str = "adamw_clipped", **extra: Any) -> dict[str, Any]:
    """Settings of a case (`on_cpus`) for the global batch."""
    return {
        **on_cpus(case), "train.grad_accum_steps": ACCUM, "train.micro_batch_size": GLOBAL_BATCH // ACCUM // world,
        **OPTIMIZERS[optimizer], **extra,
    }  # fmt: skip


def wrap(job: Job, model: ModelConfig = MODEL, build: Callable[[ModelConfig], Transformer] = Transformer) -> None:
    job.wrap(partial(build, model), init_parameter=partial(init_parameter, model), block_classes=(Block,))


def train(settings: dict[str, Any], rank: int, world: int, steps: int = STEPS, *built: Any) -> Curve:
    """The curve of a model that `built` describes to `wrap`."""
    with start(None, settings) as job:
        wrap(job, *built)
        curve = []
        for step in range(steps):
            batches = micro_batches(step, rank, world, settings["train.grad_accum_steps"])
            result = job.step([to_device(batch, job.world.device) for batch in batches], loss_fn, n_targets)
            curve.append((result.loss, result.grad_norm))
    gc.collect()
    return curve


def assert_curve(found: Curve, want: Curve, name: object, loss: float = 1e-5, norm: float = 1e-4) -> None:
    """Each step's loss is the wanted one within `loss`, its norm within a share `norm`."""
    for step, ((value, size), (want_value, want_size)) in enumerate(zip(found, want, strict=True)):
        assert abs(value - want_value) <= loss, f"{name} step {step}: loss {value} instead of {want_value}"
        assert abs(size - want_size) <= norm * want_size, f"{name} step {step}: norm {size} instead of {want_size}"


def curves(
    names: list[str], optimizer: str = "adamw_clipped", steps: int = STEPS, extra: dict[str, Any] | None = None
) -> dict[str, Curve]:
    """Train each case in turn, in the process group this rank already has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: train(overrides(name, world, optimizer, **(extra or {})), rank, world, steps) for name in names}


# Sizes that do not divide evenly, so that padding shows.
UNEVEN = ModelConfig(vocab_size=50, max_seq_len=SEQ, d_model=36, n_layers=2, n_heads=2, loss_chunk_size=64)


def state_bytes(names: list[str], optimizer: str = "adamw_clipped") -> dict[str, dict[str, int]]:
    """Bytes of each kind of state on this rank after a step's last backward, before its update.

    `NAME frozen` is a model with a frozen embedding and a buffer.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        name: _measure(overrides(name.removesuffix(" frozen"), world, optimizer), rank, world, "frozen" in name)
        for name in names
    }


BUFFER = 25


def partly_frozen(config: ModelConfig = UNEVEN) -> Transformer:
    """A model whose embedding is not trained, with a buffer of `BUFFER` numbers."""
    model = Transformer(config)
    model.tok_emb.requires_grad_(False)
    model.register_buffer("seen", torch.zeros(BUFFER))
    return model


def _measure(settings: dict[str, Any], rank: int, world: int, frozen: bool) -> dict[str, int]:
    with start(None, settings) as job:
        wrap(job, UNEVEN, partly_frozen if frozen else Transformer)
        counted = count_before_update(job)
        for index in range(2):
            job.step(micro_batches(index, rank, world), loss_fn, n_targets)
    gc.collect()
    return counted


def count_before_update(job: Job) -> dict[str, int]:
    """Bytes of each kind of state after the last backward of the last step."""
    counted: dict[str, int] = {}
    take_step = job.strategy.step

    def step(request: Any) -> Update:
        counted.clear()
        counted.update(count_storages(job.strategy.state_tensors()))
        return take_step(request)

    job.strategy.step = step
    return counted


def count_storages(state: Any) -> dict[str, int]:
    """Bytes per kind, each storage once; counted here independently of the ledger."""
    seen: set[int] = set()
    out: dict[str, int] = {}
    for kind, tensor in state:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # a DTensor's own part
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            out[kind] = out.get(kind, 0) + storage.nbytes()
    return out


@dataclass(frozen=True)
class Ragged:
    """The job as a case of `graphs.campaign`: a model with a feature, and settings beside the optimizer's."""

    optimizer: str = "adamw_clipped"
    feature: str = "plain"
    extra: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    steps: ClassVar[int] = 5
    rows: ClassVar[int] = GLOBAL_BATCH // ACCUM
    prebuilt: ClassVar[bool] = False
    resumes: ClassVar[bool] = False

    @property
    def settings(self) -> dict[str, Any]:
        return {"train.grad_accum_steps": ACCUM, **OPTIMIZERS[self.optimizer], **dict(self.extra)}

    def build(self) -> Transformer:
        model = Transformer(MODEL.model_copy(update={"tie_weights": self.feature == "tied"}))
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in model.named_parameters():
            init_parameter(MODEL, name, parameter, generator)
        if self.feature == "frozen":
            model.tok_emb.requires_grad_(False)
            model.blocks[0].requires_grad_(False)
        return model

    def batches(self, step: int, rank: int, world: int) -> list[Any]:
        return micro_batches(step, rank, world, self.settings["train.grad_accum_steps"])

    def all_batches(self, step: int, world: int) -> list[Any]:
        return self.batches(step, 0, 1)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch)

    def n_targets(self, batch: Any) -> int:
        return n_targets(batch)
