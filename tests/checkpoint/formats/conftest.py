"""Folders of other tools and of runs, each made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.texts import write_words


@pytest.fixture(scope="session")
def foreign_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed and DCP wrote at world 2: a folder with truth.pt for each of `foreign.CASES`, and dcp-axes."""
    root = tmp_path_factory.mktemp("foreign")
    run_ranks(2, "tests.checkpoint.formats.foreign:make_all", root=str(root))
    return root


@pytest.fixture(scope="session")
def runs_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs at world 2: a folder per case of `runs.CASES`."""
    root = tmp_path_factory.mktemp("runs")
    write_words(root)
    run_ranks(2, "tests.checkpoint.formats.runs:train_all", root=str(root))
    return root


@pytest.fixture(scope="session")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small state dict of torch.save."""
    file = tmp_path_factory.mktemp("plain") / "weights.pt"
    generator = torch.Generator().manual_seed(0)
    torch.save({f"layer{i}.weight": torch.randn(40, 30, generator=generator) for i in range(3)}, file)
    return file
