"""torch.compile of a user's own model: what shardkit says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._dynamo.utils import counters

import shardkit

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    with inductor.patch(compile_threads=1):  # more threads would outlive the test
        yield
    torch.compiler.reset()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Broken(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum().item() > 0:  # a value decides
            y = y + 1
        return y.relu()


class GivenUp(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for _ in range(2):  # a break inside of it ends the compilation of the whole function
            if y.sum().item() > 0:
                y = y + 1
        return y.relu()


@pytest.mark.parametrize("kind", [Plain, Broken, GivenUp])
def test_graph_breaks_are_said_with_their_reason(kind: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    settings = ["compile.enabled=true", "run.device=cpu", "memory.plan=false"]
    with shardkit.start(None, settings) as job:
        job.wrap(nn.Sequential(kind(), kind()))
        x = torch.ones(2, 8)
        for _ in range(2):
            job.step([x], lambda model, batch: model(batch).sum(), lambda batch: 16)
    said = [record.getMessage() for record in caplog.records if "broke its graphs" in record.getMessage()]
    assert len(said) == (kind is not Plain)
    if said:
        assert re.search(r"broke its graphs [12] times in the first step: .*item", said[0]), said
