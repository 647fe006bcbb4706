"""A user's loop on a GPU with and without `shardkit.watch`: what it asks of CUDA, what the hooks cost, how it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.memory.ledger import MemoryLedger
from shardkit.report.read import read_run
from tests.cuda import gpu_ranks
from tests.cuda.steady import HELD
from tests.emulated_cuda import needs_emulation
from tests.emulated_cuda.counters import counting, counts
from tests.integrations.loops import KINDS, NUMEL

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
    found = []
    for index in range(WARM + MEASURED):
        gc.disable()
        with counting() as made:
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
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    made = [{"lightning": _lightning, "trainer": _trainer}[tool](at) for at in ("", folder)]
    return {"plain": made[0], "watched": made[1]}


class _Steps:
    """The calls between one step's end and the next one's, after warm-up."""

    def __init__(self) -> None:
        self.found: list[dict[str, int]] = []
        self._index, self._before = 0, {}

    def end(self) -> None:
        now = counts()
        if self._index > WARM:
            self.found.append({name: now[name] - self._before[name] for name in HELD if now[name] > self._before[name]})
        self._index, self._before = self._index + 1, now


def _trainer(folder: str) -> list[dict[str, int]]:
    import transformers

    from shardkit.integrations.transformers import watch

    steps = _Steps()

    class Counts(transformers.TrainerCallback):
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
    with watch(trainer, run_dir=folder, every=3, tensorboard=False) if folder else contextlib.nullcontext():
        trainer.train()
    return steps.found


def _lightning(folder: str) -> list[dict[str, int]]:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from shardkit.integrations.lightning import ShardkitCallback

    steps = _Steps()

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.loop = Loop()
            self.net = self.loop.model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.loop.optimizer

    class Counts(Callback):
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


pytestmark = [pytest.mark.gpu, needs_emulation]


def test_watching_asks_nothing_of_cuda_in_a_step(tmp_path: Path) -> None:
    (found,) = gpu_ranks(1, "tests.cuda.test_watching:cost", folder=str(tmp_path))
    assert found["plain"] == found["watched"], "no wait, copy or allocation more, whether or not memory is gathered"
    assert all(loss is not None for loss in found["losses"][-50:]), "a loss on the GPU is recorded without waiting"
    assert found["hooks_s"] < 2e-3, "hooks of a step with two micro-batches, at one thread of a busy machine"


@pytest.mark.parametrize("tool", ["trainer", "lightning"])
def test_watching_a_tools_loop_asks_nothing_of_cuda_in_a_step(tool: str, tmp_path: Path) -> None:
    pytest.importorskip({"trainer": "transformers"}.get(tool, tool))
    env = {"EMUCUDA_DEVICES": "1"}  # the Trainer puts a model on all cards that it sees
    (found,) = gpu_ranks(1, "tests.cuda.test_watching:in_a_tool", env=env, tool=tool, folder=str(tmp_path / "run"))
    recorded = {"copy_d2h": 1} if tool == "lightning" else {}  # the callback records the loss, and nobody waits for it
    assert len(found["plain"]) > 3 and found["watched"] == [{**calls, **recorded} for calls in found["plain"]]
    assert (tmp_path / "run" / "memory.jsonl").exists()


@pytest.mark.multigpu
@pytest.mark.release
@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        # torch's counters of steps are on the host
        ("fsdp", (2 * NUMEL, 0, 2 * NUMEL, 4 * NUMEL)),
        ("zero2", (4 * NUMEL, 2 * NUMEL, 2 * NUMEL, 4 * NUMEL)),
        ("zero3", (2 * NUMEL, 2 * NUMEL, 2 * NUMEL, 4 * NUMEL)),
    ],
)
def test_accelerates_sharded_ranks_are_counted_to_the_byte(
    engine: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    found = gpu_ranks(2, "tests.integrations.loops:of_accelerate", folder=str(tmp_path), engine=engine)[0]
    assert found["ranks"] == [dict(zip(KINDS, expected, strict=True))] * 2
    assert found["steps"] == [1, 2, 3] and len(found["losses"]) == 3
    run = read_run(tmp_path)
    assert [run.setting(key) for key in ("parallel.strategy", "train.grad_accum_steps")] == [engine, 2]


@pytest.mark.multigpu
@pytest.mark.release
def test_a_trainers_ranks_of_fsdp2_are_counted_to_the_byte(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.integrations import test_transformers as trainer

    trainer.train(tmp_path, args={"use_cpu": False, "fsdp": True})
    state = trainer.NUMEL // 2 * 4
    expected = dict(zip(KINDS, (state, 0, state, 2 * state + 4 * trainer.TENSORS), strict=True))
    assert trainer.counted(tmp_path) == [expected] * 2
    assert read_run(tmp_path / "run").setting("parallel.strategy") == "fsdp"


def test_memory_that_runs_out_on_a_gpu_is_explained(tmp_path: Path) -> None:
    (found,) = gpu_ranks(
        1, "tests.cuda.test_watching:out_of_memory", env={"EMUCUDA_MEMORY": "1G"}, folder=str(tmp_path)
    )
    assert (found["kind"], found["phase"], found["step"], found["gaps"]) == ("device", "forward", 3, [])
    assert found["memory"]["exact"] and 0 <= found["request"] - 200_000 * 256 * 4 < 2 * 2**20, "torch rounds it up"
    changes = [one["change"] for one in found["advice"]]
    assert (
        any(change.startswith("train.micro_batch_size=") for change in changes) and "activation.policy=full" in changes
    )
    assert found["row"]["state"]["optimizer"]["device"] > 0
    assert "ran out of memory in forward of step 3" in found["notes"][-1]
