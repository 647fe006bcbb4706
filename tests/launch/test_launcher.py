"""`shardkit launch` on real ranks: what the terminal shows, where logs are, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.jobs import REPO, command, environment, losses, run, settings, with_marker

pytestmark = pytest.mark.dist
TWO = ["--nproc-per-node", "2"]


def test_rank_0_is_shown_and_every_rank_is_logged(tmp_path: Path) -> None:
    folder = tmp_path / "my 'run' $(touch hacked)"
    done = run(command(*TWO, *settings(folder, model__n_heads=4)), cwd=REPO)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()[0]
    assert shown.startswith("$ ") and "torch.distributed.run" in shown and "--nproc-per-node 2" in shown
    assert "files written:" in done.stdout and "step 6/6" in done.stderr
    assert len(list(folder.glob("logs/*/*/attempt_0/[01]/stdout.log"))) == 2
    assert not (REPO / "hacked").exists()
    assert sorted(losses(folder)) == [1, 2, 3, 4, 5, 6]

    # the printed command is what runs: as it stands, in a shell
    again = subprocess.run(
        ["bash", "-c", shown[2:] + " run.overwrite=true"], cwd=REPO, env=environment(), capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    logs = list(folder.glob("logs/*/*/attempt_0/[01]/stdout.log"))
    assert len(logs) == 4, "overwriting a run leaves the logs of the launcher that is writing there"


def test_the_first_failing_ranks_traceback_is_whole_and_others_are_one_line(tmp_path: Path) -> None:
    done = run(command(*TWO, *settings(tmp_path / "run", "raise")))
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert "in go_wrong" in done.stderr and "error: rank 1 failed: ValueError: the cat sat on the GPU" in done.stderr
    assert "elastic" not in done.stderr and "torchrun" not in done.stderr
    assert f"logs: {tmp_path}/run/logs/" in done.stderr


def test_a_user_error_is_its_two_lines_even_with_restarts_left(tmp_path: Path) -> None:
    done = run(command(*TWO, "--max-restarts", "3", *settings(tmp_path / "run", "refuse")))
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("step ", "["))]
    assert lines == ["error: sample 7 is empty", "  fix: remove it"]
    assert not list((tmp_path / "run/logs").glob("*/*/attempt_1/*/error.json"))


def test_a_config_error_starts_no_rank(tmp_path: Path) -> None:
    done = run(command(*TWO, *settings(tmp_path / "run", train__max_stps=3)))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown key train.max_stps")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("how", "code", "said"), [("kill", 137, "memory"), ("abort", 134, "native code")])
def test_a_signals_likely_cause_is_told(how: str, code: int, said: str, tmp_path: Path) -> None:
    done = run(command(*TWO, *settings(tmp_path / "run", how)))
    assert done.returncode == code, done.stderr
    assert "error: rank 1 failed: killed by SIG" in done.stderr
    cause = next(line for line in done.stderr.splitlines() if "likely cause" in line)
    assert said in cause


def test_a_killed_rank_is_restarted_from_the_last_checkpoint(tmp_path: Path) -> None:
    fixed = dict(train__deterministic="true", checkpoint__every_steps=1, train__max_steps=8)
    plain = run(command(*TWO, *settings(tmp_path / "plain", **fixed)))
    assert plain.returncode == 0, plain.stderr
    done = run(command(*TWO, "--max-restarts", "1", *settings(tmp_path / "run", "kill", **fixed)))
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr and ", step 2" in done.stderr, done.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR2, 0)])
def test_ctrl_c_leaves_no_process_and_slurms_warning_is_not_for_the_launcher(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    steps = 100_000 if code else 12
    argv = command(*TWO, *settings(tmp_path / "run", "wait", train__max_steps=steps))
    marker = f"TEST_MARKER={tmp_path}"
    process = subprocess.Popen(
        argv, cwd=REPO, env=environment(TEST_MARKER=str(tmp_path)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"step 1/"):
            break
    process.send_signal(number)
    began = time.monotonic()
    process.stderr.read()
    assert process.wait(60) == code
    if code:
        assert time.monotonic() - began < 10
    assert with_marker(marker) == []


def test_preempted_ranks_make_exit_code_75_and_can_go_on(tmp_path: Path) -> None:
    argv = command(*TWO, *settings(tmp_path / "run", "wait", train__max_steps=60))
    process = subprocess.Popen(argv, cwd=REPO, env=environment(TEST_MARKER=str(tmp_path)), stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"step 1/"):
            break
    for pid in with_marker(f"TEST_MARKER={tmp_path}"):  # as Slurm does: every process of the step
        os.kill(pid, signal.SIGUSR2)
    error = process.stderr.read().decode()
    assert process.wait(60) == 75, error
    assert "saved and stopped for SIGUSR2" in error
    done = run(command(*TWO, *settings(tmp_path / "run", "nothing", train__max_steps=60, run__resume="true")))
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path / "run")) == list(range(1, 61))
