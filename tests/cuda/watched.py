"""A user's loop on a GPU with and without `shardkit.watch`: what it asks of CUDA, what the hooks cost, how it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.memory.ledger import MemoryLedger
from tests.cuda.steady import HELD

WARM, MEASURED, SIZE = 4, 8, 256


class Loop:
    """Accumulation over two micro-batches, and a loss that is kept on the GPU."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(4))
        self.model = nn.Sequential(*blocks).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.inputs = torch.ones(8, SIZE, device="cuda")

    def step(self) -> torch.Tensor:
        for _ in range(2):
            loss: torch.Tensor = self.model(self.inputs).pow(2).mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def calls(loop: Loop) -> list[dict[str, int]]:
    """CUDA's calls of each step, after warm-up."""
    import emucuda

    found = []
    for index in range(WARM + MEASURED):
        gc.disable()
        with emucuda.counting() as made:
            loop.step()
        gc.enable()
        if index >= WARM:
            found.append({name: made[name] for name in HELD if made[name]})
    return found


def cost(folder: str) -> dict[str, Any]:
    """Calls without and with the watch, and seconds of its hooks for a step that gathers nothing."""
    plain = calls(Loop())
    loop = Loop()
    with shardkit.watch(loop.model, loop.optimizer, run_dir=folder, every=3, tensorboard=False) as watching:
        watched = calls(loop)
        spent = [hooks_s(watching.ledger)]
        for _ in range(50):
            watching.log(loss=loop.step())
            spent.append(hooks_s(watching.ledger))
    losses = [json.loads(line).get("loss") for line in (Path(folder) / "metrics.jsonl").open()]
    of_a_step = median(after - before for before, after in pairwise(spent))  # one that waits for the CPU says nothing
    return {"plain": plain, "watched": watched, "hooks_s": of_a_step, "losses": losses}


def hooks_s(ledger: MemoryLedger) -> float:
    """Seconds of all hooks so far, without those of gathering."""
    return ledger.overhead_s - ledger.gather_s


def in_a_tool(tool: str, folder: str) -> dict[str, Any]:
    """Calls of the steps of a tool's loop without and with its integration."""
    if tool != "deepspeed":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    loops = {"accelerate": _accelerate, "deepspeed": _deepspeed, "lightning": _lightning, "trainer": _trainer}
    made = [loops[tool](at) for at in ("", folder)]
    return {"plain": made[0], "watched": made[1]}


class _Steps:
    """The calls between one step's end and the next one's, after warm-up."""

    def __init__(self) -> None:
        self.found: list[dict[str, int]] = []
        self._index, self._before = 0, {}

    def end(self) -> None:
        import emucuda

        now = emucuda.counts()
        if self._index > WARM:
            self.found.append({name: now[name] - self._before[name] for name in HELD if now[name] > self._before[name]})
        self._index, self._before = self._index + 1, now


def _maybe(folder: str, watch: Callable[[], Any]) -> Any:
    return watch() if folder else contextlib.nullcontext()


def _accelerate(folder: str) -> list[dict[str, int]]:
    from accelerate import Accelerator

    from shardkit.integrations.accelerate import watch

    accelerator, loop, steps = Accelerator(), Loop(), _Steps()
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)
    with _maybe(folder, lambda: watch(accelerator, model, optimizer, run_dir=folder, every=3, tensorboard=False)):
        for _ in range(WARM + MEASURED):
            accelerator.backward(model(loop.inputs).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.end()
    return steps.found


def _deepspeed(folder: str) -> list[dict[str, int]]:
    import deepspeed

    from shardkit.integrations.deepspeed import watch
    from tests.cuda.parity_ranks import join

    if not dist.is_initialized():
        join("nccl")
    loop, steps = Loop(), _Steps()
    config = {
        "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=loop.model, optimizer=loop.optimizer, config=config)
    with _maybe(folder, lambda: watch(engine, run_dir=folder, every=3, tensorboard=False)):
        for _ in range(WARM + MEASURED):
            engine.backward(engine(loop.inputs).pow(2).mean())
            engine.step()
            steps.end()
    engine.destroy()
    return steps.found


def _trainer(folder: str) -> list[dict[str, int]]:
    import transformers

    from shardkit.integrations.transformers import watch

    steps = _Steps()

    class Counts(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.end()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=256))
    args = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=WARM + MEASURED, per_device_train_batch_size=2, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_steps=1000, logging_first_step=False,
    )  # fmt: skip
    data = [{"input_ids": torch.ones(16, dtype=torch.long), "labels": torch.ones(16, dtype=torch.long)}] * 64
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[Counts()])
    with _maybe(folder, lambda: watch(trainer, run_dir=folder, every=3, tensorboard=False)):
        trainer.train()
    return steps.found


def _lightning(folder: str) -> list[dict[str, int]]:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from shardkit.integrations.lightning import ShardkitCallback

    steps = _Steps()

    class Net(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.loop = Loop()
            self.net = self.loop.model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.loop.optimizer

    class Counts(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            steps.end()

    watching = [ShardkitCallback(folder, every=3, tensorboard=False)] if folder else []
    trainer = Trainer(
        accelerator="cuda", devices=1, max_steps=WARM + MEASURED, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*watching, Counts()],
    )  # fmt: skip
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8 * (WARM + MEASURED), SIZE), batch_size=8))
    return steps.found


def out_of_memory(folder: str) -> dict[str, Any]:
    """The post-mortem of a batch that is too large for the card."""
    loop = Loop()
    try:
        with shardkit.watch(loop.model, loop.optimizer, run_dir=folder, tensorboard=False):
            loop.step()
            loop.step()
            loop.inputs = torch.ones(200_000, SIZE, device="cuda")
            loop.step()
    except torch.OutOfMemoryError as error:
        found: dict[str, Any] = json.loads((Path(folder) / "oom" / "rank0.json").read_text())
        return {**found, "notes": error.__notes__}
    return {}
