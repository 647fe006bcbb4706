"""Five lines around a loop that stays as it is, as README.md and docs/memory.md have them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from shardkit.memory import MemoryLedger, read_jsonl
from shardkit.memory.rows import SCHEMA, gather_json
from tests.memory.samples import gpu_row
from tests.ranks import REPO


class Loop:
    """Somebody's training loop with accumulation and an evaluation."""

    def __init__(self) -> None:
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(2):
                self.model(torch.ones(1, 64)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                self.model(torch.ones(1, 64))


@pytest.mark.parametrize(("steps", "gathered"), [(10, [1, 2, 4, 8, 10]), (8, [1, 2, 4, 8])])
def test_a_loop_is_accounted_without_changing_it(steps: int, gathered: list[int], tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "memory.jsonl"
    ledger = MemoryLedger.from_env("cpu", interval=4)
    with ledger.watch(loop.model, loop.optimizer, path=path):
        loop.run(steps)
    records = list(read_jsonl(path))
    assert [step for step, _ in records] == gathered
    row = dict(records)[8][0]
    n_params = 64 * 64 + 64
    assert [row.state[kind].device for kind in ("params", "grads", "optimizer")] == [
        4 * n_params, 4 * n_params, 8 * n_params + 8
    ]  # fmt: skip
    assert set(row.phases) == {"forward", "backward", "update"}
    assert 0 < row.step_time_s < 10
    assert "peak" in ledger.table()


def test_hooks_are_gone_afterwards_and_an_error_passes_through(tmp_path: Path) -> None:
    loop = Loop()
    ledger = MemoryLedger.from_env("cpu")
    with pytest.raises(RuntimeError, match="shapes"), ledger.watch(loop.model, loop.optimizer):
        loop.model(torch.ones(1, 3))
    assert ledger.open_phase is None
    asked = ledger.overhead_s
    loop.run(steps=1)
    assert ledger.overhead_s == asked


def test_an_optimizer_is_needed() -> None:
    with pytest.raises(TypeError, match="at least one optimizer"):
        MemoryLedger("cpu").watch(nn.Linear(1, 1))


def example(page: str) -> str:
    """The page's first block of Python that makes a ledger."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", (REPO / page).read_text(), re.DOTALL)
    return next(block for block in blocks if "MemoryLedger.from_env()" in block)


@pytest.mark.parametrize("page", ["README.md", "docs/memory.md"])
def test_the_five_lines_around_a_loop_work_as_they_stand(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    code = example(page)
    assert len([line for line in code.splitlines() if line.strip()]) == 5
    exec(code, {"model": model, "optimizer": optimizer, "train": train})
    gathers = list(read_jsonl(tmp_path / "memory.jsonl"))
    assert [step for step, _ in gathers] == [1, 2, 3]
    state = gathers[-1][1][0].state
    assert state["params"].device == 4 * (16 * 16 + 16)
    assert "optimizer" in capsys.readouterr().out


def test_every_field_of_memory_jsonl_is_documented() -> None:
    text = (REPO / "docs" / "memory.md").read_text()
    schema = text.partition("## memory.jsonl")[2].partition("## The table")[0]
    assert f'"schema": {SCHEMA}' in schema
    names = set(re.findall(r'"(\w+)": ', json.dumps(gather_json(20, 1.0, [gpu_row(0)]))))
    assert names > {"params", "update", "host_mem"}
    assert [name for name in names if f'"{name}"' not in schema and f"`{name}`" not in schema] == []
