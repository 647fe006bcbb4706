"""A checkpoint from a stranger cannot run code or reach other files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from shardkit.errors import CheckpointError
from tests.checkpoint import fakes


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.bin", ".metadata"])
def test_a_pickle_is_not_opened(name: str, saved: Path, tmp_path: Path) -> None:
    bomb = pickle.dumps(Touch(tmp_path / "was_here"))
    pickle.loads(bomb)
    (tmp_path / "was_here").rmdir()  # it does work
    for path in sorted(saved.glob("step_*")):
        (path / name).write_bytes(bomb)
    checkpoints = fakes.checkpointer(saved, fakes.Plain())
    try:
        if name == ".metadata":
            assert checkpoints.resume(saved) is not None, "a file that is not ours means nothing"
        else:
            with pytest.raises(CheckpointError, match="none of the 3"):
                checkpoints.resume(saved)
    finally:
        checkpoints.close()
    assert not (tmp_path / "was_here").exists()
