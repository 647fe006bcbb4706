"""`python -m benchmarks gpu` on emulated cards: every part starts, is interrupted, and goes on; no speed is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import REPO
from benchmarks.gpu import EMULATED
from benchmarks.gpu.store import first_speed
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), needs_emulation]

FEW = {
    "accuracy": "single, fp32, none", "ranks": "debug, 2 ranks", "choices": "debug", "ladder": "+ checkpointing: step",
    "largest": "planned split", "categories": "SwinIR", "mfu": "1",
}  # fmt: skip
"""A text in the names of one or two quick cases of each part."""
LIMIT_S = 200


def command(part: str, out: Path) -> list[str]:
    options = ["--part", part, "--only", FEW[part], "--out", str(out), "--host-memory", "3GiB", "--budget-s", "300"]
    return [sys.executable, "-m", "benchmarks", "gpu", "--emulated", "--dry-run", *options]


def found(path: Path) -> dict[str, Any]:
    """Results by case, under "predicted" and "measured"."""
    cases: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    return cases


def interrupted(argv: list[str], path: Path) -> None:
    """End the command as soon as its file holds a result, or a part of one."""
    with subprocess.Popen(argv, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and not found(path) and time.monotonic() < deadline:
            time.sleep(0.1)  # another process writes the file
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "run it again to go on" in said


LONG = ("accuracy", "ranks", "choices", "largest")
NOT_TINY = "packed"
"""Numbers of tiny tensors are computed, and of bytes that bitsandbytes' kernels did not write none is finite."""
PARTS = [pytest.param(part, marks=pytest.mark.release if part in LONG else ()) for part in EMULATED if part != NOT_TINY]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_starts_is_interrupted_and_goes_on(part: str, tmp_path: Path) -> None:
    path = tmp_path / f"gpu_{part}.json"
    interrupted(command(part, tmp_path), path)
    before = found(path)
    done = subprocess.run(command(part, tmp_path), cwd=REPO, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and f"{part}: complete" in done.stdout, done.stdout + done.stderr
    held, after = json.loads(path.read_text()), found(path)
    assert held["emulated"] is True and first_speed(held) is None
    assert all(case["measured"]["outcome"] in ("ok", "out of memory") for case in after.values()), after
    for name, case in before.items():
        for what, earlier in case.items():
            if earlier["complete"]:
                assert after[name][what] == earlier, "it is not run again"
            for arm, trials in earlier.get("arms", {}).items():
                assert after[name][what]["arms"][arm][: len(trials)] == trials, "it goes on with what it had"
