"""A job's output, as `shardkit logs` prints it."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import pytest

from shardkit.errors import LaunchError
from shardkit.launch.slurm.queue import show_logs


def test_a_pipe_in_place_of_an_output_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "slurm-7.out")
    with pytest.raises(LaunchError, match=r"slurm-7\.out is not a regular file"):
        show_logs(str(tmp_path), follow=False)


def test_an_output_is_copied_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "slurm-7.out").write_bytes(b"step 1\rstep 2\n")
    out = BytesIO()
    show_logs(str(tmp_path), follow=False, out=out)
    assert out.getvalue() == b"step 1\rstep 2\n"
