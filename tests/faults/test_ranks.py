"""A rank that is killed and a rank that hangs: the job ends within a bounded time, and names the rank and the cause."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from tests.launch import jobs
from tests.launch.jobs import command, run, with_marker

HOST = socket.gethostname()
BOUND_S = 90


@pytest.mark.release
@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("kill", 137, ["error: rank 1 failed: killed by SIGKILL", "1 other rank(s) ended because of it: 0"]),
        ("hang", 1, ["no progress for 4 s at step 3", f"did not arrive: rank 1 on {HOST} (step 3, forward, "]),
    ],
)
def test_the_job_ends_and_names_the_rank(how: str, code: int, words: list[str], tmp_path: Path) -> None:
    argv = jobs.settings(tmp_path / "run", how, run__step_timeout_s=4, memory__interval=1)
    began = time.monotonic()
    done = run(command("--nproc-per-node", "2", *argv), timeout=BOUND_S, FAULTS=str(tmp_path))
    assert time.monotonic() - began < BOUND_S
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert with_marker(f"FAULTS={tmp_path}") == [], "processes are left"
    for name in ("metrics.jsonl", "memory.jsonl"):
        lines = [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2]
    assert not (tmp_path / "run/oom").exists()
