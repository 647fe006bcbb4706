"""A process group of one rank, for what needs no second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint import fakes


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def saved(alone: None, tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1, 2 and 3."""
    fakes.save_steps(str(tmp_path / "checkpoints"), [1, 2, 3])
    return tmp_path / "checkpoints"
