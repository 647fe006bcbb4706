"""Nothing is left behind: not after a hundred starts, not after Ctrl-C at any moment."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.jobs import REPO, command, environment, settings, with_marker

pytestmark = pytest.mark.dist


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_a_hundred_starts_and_stops_leave_nothing_behind(tmp_path: Path) -> None:
    drivers, count = [], 50
    for name in ("a", "b"):  # side by side: twice as many cycles, and each could take the other's port
        (tmp_path / name).mkdir()
        argv = [sys.executable, "-m", "tests.launch.cycles", str(count), str(tmp_path / name)]
        env = environment(TEST_MARKER=str(tmp_path))
        drivers.append(subprocess.Popen(argv, cwd=REPO, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [driver.communicate(timeout=1200)[0] for driver in drivers]
    for driver, output in zip(drivers, outputs, strict=True):
        assert driver.returncode == 0
        found = json.loads(output.splitlines()[-1])
        assert found["codes"] == [0] * (count + 1)
        assert found["before"] == found["after"]
        assert found["after"]["processes"] == 0 and found["after"]["listening"] == 0
        print(f"{count} cycles of 2 ranks: {found['after']}")
    assert with_marker(f"TEST_MARKER={tmp_path}") == []


@pytest.mark.release
def test_ctrl_c_at_any_moment_ends_everything_within_10_seconds(tmp_path: Path) -> None:
    seed = time.time_ns()
    moments = random.Random(seed)
    for number in range(8):
        marker = f"{tmp_path}/{number}"
        argv = command("--nproc-per-node", "2", *settings(tmp_path / f"run{number}", "wait", train__max_steps=100_000))
        process = subprocess.Popen(
            argv, cwd=REPO, env=environment(TEST_MARKER=marker), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        process.stdout.readline()  # the launcher has taken over its signals; before, Python ends by itself
        delay = moments.uniform(0, 6)
        time.sleep(delay)  # the moment is what is tested
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        try:
            code = process.wait(30)
        finally:
            process.kill()
        took = time.monotonic() - began
        said = f"seed {seed}, Ctrl-C {delay:.2f} s after the start, gone {took:.2f} s later with {code}"
        assert took < 10 and code == 130, said
        assert with_marker(f"TEST_MARKER={marker}") == [], said
        print(said)
