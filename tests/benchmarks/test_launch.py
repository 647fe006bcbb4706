"""The benchmark of launching times what the loop calls today."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launch import watching
from benchmarks.overhead import on_two_ranks, write_tokens


@pytest.mark.release
@pytest.mark.dist
@pytest.mark.covers("benchmarks/launch.py", "shardkit/run/agreement.py", "shardkit/run/watchdog.py")
def test_every_watched_call_takes_some_of_a_step(tmp_path: Path) -> None:
    shares = on_two_ranks(watching, limit_s=240, tokens=write_tokens(tmp_path), folder=str(tmp_path), steps=4)
    assert 0 < shares["reduction"] < 0.5
    assert 0 < shares["watchdog"] < shares["reduction"]
    assert 0 < shares["preemption flag"] < shares["reduction"]
