"""The two arms of the MFU comparison, and their turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.hardware.cards import gpu_peak_flops
from shardkit.parallel.weights import Weights
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from shardkit.tasks.load import load_task

from .. import bare, common
from ..overhead import write_tokens
from .cases import Figures, Where
from .mfu import Model, overrides
from .target import settings

WARMUP = 2
"""Untimed turns of each arm: compilation, and the allocator's first segments."""
Steps = Callable[[int], list[float]]
"""Takes this many optimizer steps, waits for the device, and returns their losses."""


def in_turns(model: Model, where: Where) -> Figures:
    """Seconds per step of both arms, turn by turn; the first arm alternates."""
    device = torch.device("cpu" if where.dry else "cuda")
    tokens = write_tokens(where.folder)
    run_settings = settings(where, overrides(model), [
        f"data.path={tokens}", "data.shuffle=false", f"run.dir={where.folder / 'run'}", "train.eval_samples=0",
        f"train.max_steps={(model.turns + WARMUP) * model.steps}", "checkpoint.at_end=false",
        "memory.plan=false",
        f"train.max_norm={bare.MAX_NORM}", f"optim.lr={bare.LR}", "optim.schedule=constant",
        f"optim.weight_decay={bare.WEIGHT_DECAY}",
    ])  # fmt: skip
    with start(load_config(None, run_settings)) as job:
        trainer = Trainer(job)
        records = trainer.recorded_steps()
        losses_of = (record["loss"] for record in records)  # ledger, metrics and progress included
        data = batches(tokens, model, device)
        loop = Bare(job.config, job.model, data, device)
        arms: dict[str, Steps] = {"shardkit": partial(taken_of, losses_of, device), "bare": loop.steps}
        times, losses = timed(arms, model.turns, model.steps)
        per_token = getattr(trainer.task, "flops_per_token", lambda: None)()
        records.close()  # type: ignore[attr-defined]
        del loop, arms, trainer
    worst = max(abs(ours - other) for ours, other in zip(losses["shardkit"], losses["bare"], strict=True))
    on_cuda = device.type == "cuda"
    return {
        "step_s": times, "losses": losses, "loss_difference": worst, "flops_per_token": per_token,
        "tokens_per_step": model.seq * model.micro * model.accum, "precision": model.precision,
        "peak_flops": gpu_peak_flops(torch.cuda.get_device_name(), model.precision) if on_cuda else None,
        "peak_allocated": torch.cuda.max_memory_allocated() if on_cuda else None,
    }  # fmt: skip


def timed(arms: Mapping[str, Steps], turns: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step of each arm's turns, those to warm up left out, and the losses of all its steps."""

    def turn(take: Steps) -> tuple[float, list[float]]:
        began = time.perf_counter()
        losses = take(steps)
        return (time.perf_counter() - began) / steps, losses

    taken = common.in_turns({arm: partial(turn, take) for arm, take in arms.items()}, turns + WARMUP)
    times = {arm: [took for took, _ in each[WARMUP:]] for arm, each in taken.items()}
    return times, {arm: [loss for _, losses in each for loss in losses] for arm, each in taken.items()}


def taken_of(losses: Iterator[float], device: torch.device, count: int) -> list[float]:
    """As `Steps`, of a loop that yields the loss of each step."""
    taken = [next(losses) for _ in range(count)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return taken


def batches(tokens: str, model: Model, device: torch.device) -> Iterator[list[Any]]:
    """Each step's micro-batches in file order, in pinned memory."""
    micro = bare.micro_batches(tokens, model.seq, model.micro)
    while True:
        step = [next(micro) for _ in range(model.accum)]
        yield [(x.pin_memory(), y.pin_memory()) for x, y in step] if device.type == "cuda" else step


class _Copied(Weights):
    """Parameters with the values of another model."""

    def __init__(self, values: dict[str, nn.Parameter]) -> None:
        super().__init__(0, lambda fqn, full, generator: None)
        self._values = values

    def fill(self, fqn: str, shape: torch.Size, out: torch.Tensor, start: int = 0) -> None:
        out.copy_(self._values[fqn].detach().view(-1)[start : start + out.numel()])


def _recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a module's forward; one function for all layers lets torch.compile compile them once."""
    return checkpoint(type(self).forward, self, *args, use_reentrant=False, **kwargs)


class Bare:
    """A hand-written loop: attention recomputed, blocks compiled, autocast, fused AdamW, no device synchronisation.

    Args:
        like: the model whose weights it starts from.
    """

    def __init__(self, config: RunConfig, like: nn.Module, data: Iterator[list[Any]], device: torch.device) -> None:
        task = load_task(config)
        weights = _Copied(dict(like.named_parameters()))
        model = weights.build(task.build_model, None)
        if config.precision.mode == "pure_bf16":
            for param in model.parameters():
                param.data = param.data.bfloat16()
        blocks = list(model.blocks if hasattr(model, "blocks") else model.model.layers)  # type: ignore[union-attr, arg-type]
        for block in blocks:
            attention = block.attn if hasattr(block, "attn") else block.self_attn
            attention.forward = MethodType(_recomputed, attention)
            block.compile()
        weights.materialise(model, device)
        self.model, self.data, self.device = model.train(), data, device
        self.optimizer = bare.adamw(model)
        self.next = next(data)

    def steps(self, count: int) -> list[float]:
        losses = [self._step() for _ in range(count)]
        return [loss.item() for loss in losses]

    def _step(self) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        targets = sum(y.numel() for _, y in self.next)
        for micro in self.next:
            x, y = (part.to(self.device, non_blocking=True) for part in micro)
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = self.model(x, y)
            loss = loss.float() / targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), bare.MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.next = next(self.data)  # while the device works
        return total
