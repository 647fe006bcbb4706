"""`shardkit launch` on real ranks: what the terminal shows, where logs are, how it ends."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from shardkit.launch.failures import job_starts
from shardkit.launch.local import launcher, processes
from shardkit.launch.local.rendezvous import ReservedPort
from tests.commands import python_m
from tests.launch.jobs import REPO, command, environment, losses, run, settings, started, until_line, with_marker
from tests.slurm.cluster import until

TWO = ["--nproc-per-node", "2"]


_SILENT = "local rank 1: ended without a word, most likely killed"  # torchrun blames its peer
FIXED = dict(train__deterministic="true", checkpoint__every_steps=1, train__max_steps=8)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that nothing disturbs, in place of an earlier one in a directory of a hostile name."""
    folder = tmp_path_factory.mktemp("plain") / "my 'run' $(touch hacked)"
    (folder / "logs/20260101-000000-node0-1").mkdir(parents=True)
    (folder / ".shardkit").mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder, run(command(*TWO, *settings(folder, run__overwrite="true", **FIXED)))


@pytest.mark.slow
def test_rank_0_is_shown_and_every_rank_is_logged(plain: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, process = plain
    assert process.returncode == 0, process.stderr
    assert "files written:" in process.stdout and "step 8/8" in process.stdout
    logs = list(folder.glob("logs/*/*/attempt_0/[01]/stdout.log"))
    assert len(logs) == 2, "overwriting a run leaves the logs of the launcher that is writing there"
    assert not (folder / "logs/20260101-000000-node0-1").exists() and not (REPO / "hacked").exists()
    assert sorted(losses(folder)) == [1, 2, 3, 4, 5, 6, 7, 8]

    first, shown = process.stdout.splitlines()[:2]
    assert first.startswith("starting 2 ranks ")
    assert shown.startswith("$ ") and "torch.distributed.run" in shown and "--nproc-per-node 2" in shown


@pytest.mark.slow
def test_the_printed_command_is_what_runs(plain: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, process = plain
    shown = process.stdout.splitlines()[1]
    in_a_shell = ["bash", "-c", shown[2:] + " --print-config"]
    before = set(folder.glob("logs/*/*/attempt_0/[01]/stdout.log"))
    again = subprocess.run(in_a_shell, cwd=REPO, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    logs = set(folder.glob("logs/*/*/attempt_0/[01]/stdout.log")) - before
    assert len(logs) == 2
    for log in logs:  # other tests count those of the run, in any order
        log.unlink()


@pytest.mark.slow
def test_the_first_failing_ranks_traceback_is_whole_and_others_are_one_line(tmp_path: Path) -> None:
    process = run(command(*TWO, *settings(tmp_path / "run", "raise")), code=1)
    assert process.stderr.count("Traceback (most recent call last)") == 1, process.stderr
    assert "in go_wrong" in process.stderr
    assert "error: rank 1 failed: ValueError: the cat sat on the GPU" in process.stderr
    assert "elastic" not in process.stderr and "torchrun" not in process.stderr
    assert f"logs: {tmp_path}/run/logs/" in process.stderr


@pytest.mark.slow
def test_a_user_error_is_its_two_lines_even_with_restarts_left(tmp_path: Path) -> None:
    process = run(command(*TWO, "--max-restarts", "3", *settings(tmp_path / "run", "refuse")), code=2)
    lines = [line for line in process.stderr.splitlines() if not line.startswith(("step ", "["))]
    assert lines == ["error: sample 7 is empty", "  fix: remove it"]
    assert not list((tmp_path / "run/logs").glob("*/*/attempt_1/*/error.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "said"),
    [("nowhere.invalid", "does not resolve on this machine"), ("127.0.0.1", "something listens there")],
)
def test_nodes_that_cannot_meet_are_told_why_in_time(host: str, said: str, tmp_path: Path) -> None:
    """torchrun would wait for a minute, or for good where another program holds the port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        meet = ["--nnodes", "2", "--rdzv-endpoint", f"{host}:{other.getsockname()[1]}"]
        process = run(command(*TWO, *meet, *settings(tmp_path / "run", run__init_timeout_s=2)), timeout=60, code=2)
    cause, fix = process.stderr.splitlines()
    assert cause.startswith(f"error: no rank started: the nodes did not meet at {host}:") and said in cause
    assert fix.startswith("  fix: ") and "run.init_timeout_s=2 s" in fix


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint(
    tmp_path: Path, plain: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    process = run(command(*TWO, "--max-restarts", "1", *settings(tmp_path / "run", "kill", **FIXED)), code=0)
    assert "resuming from" in process.stdout and ", step 2" in process.stdout, process.stderr
    assert losses(tmp_path / "run") == losses(plain[0])
    reasons = [reason for _, reason in job_starts.restarts(tmp_path / "run")]
    assert reasons == [*set(reasons) & {"local rank 1: killed by SIGKILL (exit code -9)", _SILENT}]
    assert f"started 2 times; ended before: 1 x {reasons[0]}" in process.stdout


def test_a_run_that_somebody_deleted_ends_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "run/logs/x"
    assert launcher._verdict(launcher.Ended(1, None, False), gone, tmp_path / "run", 0) == 1
    said = capsys.readouterr().err
    assert f"cannot read {gone}/torchrun.log: No such file or directory" in said
    assert "error: " in said and "exit code 1" in said and "Traceback" not in said


def test_ranks_end_with_a_torchrun_that_is_killed_while_they_wait_for_others(tmp_path: Path) -> None:
    """Plain torchrun, whose ranks hold the store themselves: rank 1 never comes."""
    meet = ["--nproc-per-node", "1", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    argv = [sys.executable, "-m", "torch.distributed.run", *meet, "-m", "tests.launch.waiting", *settings(tmp_path)]
    marker = f"TEST_MARKER={tmp_path}"
    torchrun = started(argv, TEST_MARKER=str(tmp_path), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        until_line(torchrun, "joining")
        torchrun.kill()
        torchrun.wait()
        # It would wait for run.init_timeout_s, half an hour.
        until(lambda: with_marker(marker) == [], 120, lambda: f"left: {with_marker(marker)}")
    finally:
        for pid in with_marker(marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    argv = command(*TWO, *settings(tmp_path / "run", "wait", train__max_steps=100_000))
    marker = f"TEST_MARKER={tmp_path}"
    (tmp_path / "tmp").mkdir()
    process = started(argv, TEST_MARKER=str(tmp_path), TMPDIR=str(tmp_path / "tmp"))
    until_line(process, "step 1/")
    assert set(listening(with_marker(marker))) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    meeting = list((tmp_path / "tmp").glob("shardkit-*"))
    assert [folder.stat().st_mode & 0o777 for folder in meeting] == [0o700]
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert with_marker(marker) == []
    assert not meeting[0].exists()
    (sweep_s,) = processes.sweep.__defaults__ or ()
    assert launcher._STOP_S + sweep_s < 10, "docs/launch.md: within 10 seconds, whatever the ranks do"


@pytest.mark.release
def test_ctrl_c_at_any_moment_ends_everything_within_10_seconds(tmp_path: Path) -> None:
    seed = time.time_ns()
    moments = random.Random(seed)
    for number in range(8):
        marker = f"{tmp_path}/{number}"
        argv = command("--nproc-per-node", "2", *settings(tmp_path / f"run{number}", "wait", train__max_steps=100_000))
        process = started(argv, TEST_MARKER=marker)
        until_line(process, "starting 2 ranks")  # it has taken over its signals; before, Python ends by itself
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


def listening(pids: list[int]) -> list[str]:
    """Addresses on which these processes wait for connections; those that have ended meanwhile have none."""
    found: list[str] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            sockets = psutil.Process(pid).net_connections()
            found += [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    return found


@pytest.mark.slow
def test_preempted_ranks_save_and_make_exit_code_75(tmp_path: Path) -> None:
    argv = command(*TWO, *settings(tmp_path / "run", "wait", train__max_steps=100_000))
    process = started(argv, TEST_MARKER=str(tmp_path))
    until_line(process, "step 1/")
    for pid in with_marker(f"TEST_MARKER={tmp_path}"):  # as Slurm does: every process of the step
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    error, _ = process.communicate(timeout=60)
    assert process.returncode == 75, error
    assert "stopped by SIGUSR2 after step " in error
    last = max(losses(tmp_path / "run"))
    assert (tmp_path / f"run/checkpoints/step_{last:08d}").is_dir(), error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "extra", "said", "fix"),
    [
        ("build", {}, r"task.factory=\S+: build_model failed at .*/tasks.py:\d+: KeyError: 'no ", "correct that"),
        ("nothing", {"train__micro_batch_size": 10**8},
         "train.micro_batch_size=100000000 is more than the 64 samples of the training split", "set it to 64 or less"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_or_filled_is_two_lines(
    how: str, extra: dict[str, int], said: str, fix: str, tmp_path: Path
) -> None:
    process = python_m("shardkit.train", *settings(tmp_path / "run", how, **extra), code=2)
    cause, advice = process.stderr.splitlines()
    assert re.match(f"error: {said}", cause) and advice.startswith(f"  fix: {fix}"), process.stderr


TOOLS = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["accelerate", "deepspeed"])
def test_other_launchers_start_the_same_module(tool: str, tmp_path: Path) -> None:
    pytest.importorskip(tool, reason=f"needs {tool}")
    port = ReservedPort()  # deepspeed asks for a number; nobody else is given this one
    # On CPUs accelerate starts several ranks only under --multi_gpu, or through mpirun; port 0: the system picks one.
    words = {
        "accelerate": ["launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
                       "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m"],
        "deepspeed": ["--num_gpus", "2", "--master_port", str(port.port), "--module"],
    }  # fmt: skip
    argv = [str(TOOLS / tool), *words[tool], "shardkit.train", "--config", str(REPO / "configs/ddp.yaml")]
    variables = {"DS_ACCELERATOR": "cpu"} if tool == "deepspeed" else {}
    try:
        run([*argv, *settings(tmp_path / "run")], code=0, **variables)
    finally:
        port.close()
    first, *_ = (tmp_path / "run/memory.jsonl").read_text().splitlines()
    assert len(json.loads(first)["ranks"]) == 2
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_two_jobs_at_once_on_one_host(tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            command("--nproc-per-node", "2", *settings(tmp_path / name)),
            cwd=REPO, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    ends = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
