"""Runs whose loss is finite and whose gradient is not, from one batch on, as functions for `run_ranks`."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.errors import TrainingError
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.strategies.cases import PARTITION_ALL

STEPS, BAD_STEP, WIDTH, ROWS = 8, 5, 6, 4
MARKS = {"fine": 1.0, "nan": float("nan"), "inf": float("inf"), "overflow": 1e30}


class Spoil(torch.autograd.Function):
    """The identity, whose gradient is multiplied by the product of the batch's marks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(marks)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0].prod(), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Model(nn.Module):
    """Two blocks and a head. The gradient is spoiled between the blocks: the first one's is, the head's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        x = Spoil.apply(self.blocks[0](x.to(self.head.weight.dtype)), marks)
        out: torch.Tensor = self.head(self.blocks[1](x))
        return out.float().square().sum()


class Task:
    """The last row of the global batch of step `BAD_STEP` carries a mark that spoils the gradient of its rank."""

    block_classes = (Block,)

    def __init__(self, config: Any, how: str = "nan") -> None:
        self.mark = MARKS[how]

    def build_model(self) -> nn.Module:
        return Model()

    def dataset(self, split: str) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(7)
        rows = [(torch.randn(WIDTH, generator=generator), torch.tensor(1.0)) for _ in range(ROWS * STEPS)]
        rows[ROWS * BAD_STEP - 1][1].fill_(self.mark)
        return rows

    def n_targets(self, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        return len(batch[0])

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return model(*batch)


def settings(case: str, folder: str, how: str, **extra: Any) -> dict[str, Any]:
    """`case`: a strategy, `+optimizer` where its state is on the host, `@` and what tells it from others."""
    strategy, *offloaded = case.partition("@")[0].split("+")
    out: dict[str, Any] = {f"parallel.offload_{what}": "cpu" for what in offloaded}
    out |= {
        "task.factory": "tests.run.gradients:Task", "task.args": {"how": how}, "run.dir": folder, "run.device": "cpu",
        "parallel.strategy": strategy, "train.max_steps": STEPS,
        "train.micro_batch_size": ROWS // (dist.get_world_size() if dist.is_initialized() else 1),
        "data.shuffle": False, "optim.lr": 1e-2, "train.max_norm": 1.0, "logging.tensorboard": False,
        "logging.every": 1000, "checkpoint.every_steps": 1, "checkpoint.keep_last": 20,
    }  # fmt: skip
    if strategy == "zero3":
        out["parallel.ds_config"] = PARTITION_ALL
    return out | extra


def ends(cases: dict[str, dict[str, Any]], folder: str, how: str) -> dict[str, dict[str, Any]]:
    """How each run ends: the error's words, the steps recorded and saved, and the weights that it leaves in memory."""
    out = {}
    for case, extra in cases.items():
        path = Path(folder) / case
        said: list[Any] = []
        with start(None, settings(case, str(path), how, **extra)) as job:
            try:
                Trainer(job).fit()
            except TrainingError as error:
                said = [str(error), error.exit_code]
            spoiled = sorted({s.name for s in job.strategy.shards() if not s.local.isfinite().all()})
        gc.collect()
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        saved = sorted(int(p.name.removeprefix("step_")) for p in (path / "checkpoints").glob("step_*"))
        out[case] = {"said": said, "lines": lines, "saved": saved, "spoiled": spoiled}
    return out


def losses(case: str, folder: str, **extra: Any) -> list[float]:
    """Of the steps that a run takes on good data."""
    with start(None, settings(case, folder, "fine", **extra)) as job:
        found = [record["loss"] for record in Trainer(job).recorded_steps()]
    gc.collect()
    return found
