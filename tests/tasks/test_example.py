"""The worked example of docs/tasks.md, driven through nothing but the Task protocol."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardkit.config.schema import RunConfig
from shardkit.data.loader import StepLoader
from shardkit.data.order import BatchSchedule
from shardkit.tasks.base import Task
from shardkit.tasks.load import load_task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = RunConfig.model_validate(yaml.safe_load((EXAMPLES / "my_task.yaml").read_text()))
    yield load_task(config), config
    sys.modules.pop("my_task", None)


def mean_loss(task: Any, model: torch.nn.Module, batches: list[Any]) -> torch.Tensor:
    """Over all targets of the micro-batches, as the trainer weighs them."""
    total = sum(task.n_targets(batch) for batch in batches)
    return torch.stack([task.loss(model, batch) for batch in batches]).sum() / total


def test_it_is_a_task_and_learns(example: Any) -> None:
    task, config = example
    assert isinstance(task, Task)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr)
    micro, accum = config.train.micro_batch_size, config.train.grad_accum_steps
    dataset = task.dataset("train")
    plan = BatchSchedule(len(dataset), micro * accum, micro, accum, 0, 1, seed=0, shuffle=True, drop_last=False)
    losses = []
    for step in StepLoader(dataset, plan, task.collate, n_steps=20):
        loss = mean_loss(task, model, [batch for batch, _ in step.micro_batches])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.85, abs=0.4)  # ln 128: it knows nothing yet
    assert sum(losses[-3:]) / 3 < losses[0] - 1.5
    with torch.no_grad():
        validation = mean_loss(task, model, [task.collate(task.dataset("val"))])
    assert validation < losses[0] - 1.0
