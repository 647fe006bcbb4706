from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.common import (
    RESULTS,
    median_ci,
    one_case_a_line,
    stamp,
    unmeasured,
    write_result,
)
from tests.slurm.cluster import until


def test_arms_take_turns_and_everyone_goes_first_as_often() -> None:
    calls: list[str] = []

    def step(arm: str) -> int:
        calls.append(arm)
        return len(calls)

    taken = common.in_turns({arm: partial(step, arm) for arm in "abc"}, rounds=4)
    assert "".join(calls) == "abcbcacababc"
    assert taken == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}


def test_a_command_that_takes_too_long_ends_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert common.output_of([sys.executable, "-c", "print('done'); raise SystemExit(3)"], 60) == (3, "done\n")
    begun = tmp_path / "begun"
    child = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    grandchild = f"open({str(begun)!r}, 'w').close(); import time; time.sleep(600)"
    wait = subprocess.Popen.wait

    def wait_once_it_has_begun(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout == 0.1:
            until(begun.exists, 100, lambda: "the child has not begun")
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_it_has_begun)
    assert common.output_of([sys.executable, "-c", child, grandchild], 0.1) == (None, "begun\n")
    until(lambda: str(begun) not in running(), 60, running)


def running() -> str:
    """The command lines of all processes; one that was killed may stand there until it gets a core once more."""
    return subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("n", "low", "high"),
    # Ranks of the classic table for 95 % intervals of a median (e.g. Conover, Practical Nonparametric Statistics).
    [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15), (25, 8, 18), (30, 10, 21), (100, 40, 61)],
)
def test_interval_is_the_classic_pair_of_order_statistics(n: int, low: int, high: int) -> None:
    samples = list(range(1, n + 1))
    random.Random(n).shuffle(samples)
    assert median_ci(samples) == ((n + 1) / 2, low, high)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_too_few_samples_have_no_interval(n: int) -> None:
    with pytest.raises(ValueError, match=f"{n} samples are too few"):
        median_ci([1.0] * n)


def test_a_result_names_the_machine_and_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    path = write_result("speed", {"ratio": 1.01})
    written = json.loads(path.read_text())
    assert path.name == "speed.json"
    assert written["ratio"] == 1.01
    known = {
        "cpu", "cores", "memory_gib", "gpus", "platform", "python", "torch", "deepspeed", "shardkit", "commit", "date",
    }  # fmt: skip
    assert set(written["environment"]) == known
    assert written["environment"]["cores"] >= 1


def test_an_interrupted_measurement_goes_on_with_what_this_commit_lacks() -> None:
    found = {"ddp": {"measured": stamp()}, "fsdp": {"measured": {"commit": "of another day"}}, "zero2": {}}
    assert unmeasured(["single", "ddp", "fsdp", "zero2"], found) == ["single", "fsdp", "zero2"]


def test_recorded_results_are_in_that_layout() -> None:
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 10
    for path in files:
        text = path.read_text()
        assert text == one_case_a_line(json.loads(text)) + "\n", f"write {path.name} with benchmarks.common.write_json"
