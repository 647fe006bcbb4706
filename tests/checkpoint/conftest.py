"""A process group of one rank, for what needs no second; a small disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint import fakes
from tests.disks import mounted


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a file system of 4 MiB."""
    with mounted(tmp_path / "run" / "checkpoints", lazily=True) as folder:
        yield folder
