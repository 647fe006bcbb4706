"""Jobs that are preempted, run into their time limit, are cancelled, or lose a node, on a real Slurm cluster."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.disks import mounted
from tests.launch.jobs import losses, settings
from tests.slurm.cluster import SCRIPT, Cluster, last_step, read, reasons, record, steady, until, with_task
from tests.slurm.tasks import broken_node


@pytest.mark.release
@pytest.mark.timeout(400)
def test_preempted_without_grace_in_each_start_up_it_trains_all_the_same(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm gives no time, keeps no accounts here, and forgets that it preempted: such starts are nobody's fault."""
    output, run_dir = tmp_path / "out", tmp_path / "run"
    args = steady(run_dir, steps=3)
    job = cluster.sbatch("srun", output, args, "--partition=brusque", "--time=3", ranks=1)
    for restart in range(3):
        assert cluster.wait_for_start(job, restart, output), read(output)
        until(lambda: f", start {restart + 1}," in read(output), 60, lambda: read(output))  # noqa: B023
        cluster.preempt()
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert reasons(run_dir) == ["preempted"] * 3 + ["done"], record(run_dir)
    assert sorted(losses(run_dir)) == [1, 2, 3]
    assert "longer than what --signal leaves before the time limit" in read(output), "only sbatch knows its --signal"


@pytest.mark.parametrize("style", [pytest.param("torchrun", marks=pytest.mark.release), "srun"])
def test_a_killed_rank_gives_the_jobs_exit_code_and_reason(style: str, cluster: Cluster, tmp_path: Path) -> None:
    output, run_dir = tmp_path / "out", tmp_path / "run"
    job = cluster.sbatch(style, output, settings(run_dir, "kill"), ranks=1)
    assert cluster.wait(job, output) == "FAILED", read(output)
    assert cluster.field(job, "ExitCode") == "137:0", read(output)
    (reason,) = reasons(run_dir)
    assert reason.startswith("failed: rank 1: killed by SIGKILL (exit code "), reason
    assert "error: rank 1 failed: killed by SIGKILL" in read(output)


@pytest.mark.release
@pytest.mark.timeout(400)
def test_a_run_longer_than_the_time_limit_is_a_chain_of_starts(cluster: Cluster, tmp_path: Path) -> None:
    """A limit of one minute, reached for real; each start goes on where the one before it saved."""
    output, run_dir = tmp_path / "out", tmp_path / "run"
    options = ["--time=1", "--signal=B:USR2@20"]
    job = cluster.sbatch("srun", output, steady(run_dir, steps=500), *options, ranks=1)
    assert cluster.wait(job, output, 300) == "COMPLETED", read(output)
    restarts = int(cluster.field(job, "Restarts"))
    assert restarts >= 1, read(output)
    assert reasons(run_dir) == ["saved after USR2"] * restarts + ["done"]
    assert sorted(losses(run_dir)) == list(range(1, 501))
    assert f"started {restarts + 1} times; ended before: {restarts} x saved after USR2" in read(output)


@pytest.mark.release
def test_a_job_whose_node_dies_is_queued_again_and_finishes(
    cluster: Cluster, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    output, run_dir = tmp_path / "out", tmp_path / "run"
    job = cluster.sbatch("torchrun", output, steady(run_dir, checkpoint__every_steps=5), ranks=1)
    cluster.wait_for_step(run_dir, 12, output)
    cluster.call("bash", str(SCRIPT), "kill-node", str(cluster.folder), "n2")
    try:
        until(lambda: "PENDING" in cluster.field(job, "JobState"), 60, lambda: read(output))
    finally:
        cluster.call("bash", str(SCRIPT), "start-node", str(cluster.folder), "n2")
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert losses(run_dir) == undisturbed
    assert "started 2 times; ended before: " in read(output)


@pytest.mark.release
def test_ranks_that_outlive_their_node_give_way_to_the_queued_job(
    cluster: Cluster, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """slurmd dies, its tasks live on; Slurm queues the job again, and starts it elsewhere."""
    output, run_dir = tmp_path / "out", tmp_path / "run"
    job = cluster.sbatch("srun", output, steady(run_dir, steps=2000, checkpoint__every_steps=50), nodes=1, ranks=2)
    cluster.wait_for_step(run_dir, 60, output)
    node = cluster.field(job, "NodeList")
    os.kill(int((cluster.folder / "pids" / node).read_text()), signal.SIGKILL)
    try:
        until(lambda: len(errors_of(run_dir, job, 0)) == 2, 120, lambda: read(output))
        until(lambda: cluster.field(job, "Restarts") == "1", 60, lambda: read(output))
    finally:
        cluster.call("bash", str(SCRIPT), "start-node", str(cluster.folder), node)
    for error in errors_of(run_dir, job, 0):
        assert error["exit_code"] == 6 and f"Slurm job {job} of test (restart 1)" in error["message"], error
    cluster.wait_for_step(run_dir, max(losses(run_dir)) + 20, output)
    cluster.call("scancel", job)
    cluster.wait(job, output)
    steps = sorted(losses(run_dir))
    assert steps == list(range(1, len(steps) + 1)), "each step once"


def errors_of(run_dir: Path, job: str, restart: int) -> list[dict[str, Any]]:
    """What the ranks of a start recorded."""
    folder = run_dir / f"logs/slurm-{job}.{restart}/errors"
    return [json.loads(path.read_text())["shardkit"] for path in folder.glob("*.json")]


@pytest.mark.slow
def test_a_save_that_finds_no_room_is_no_reason_to_queue_again(
    cluster: Cluster, tmp_path: Path, small_disk: Path
) -> None:
    output, run_dir = tmp_path / "out", tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(small_disk)
    job = cluster.sbatch("srun", output, steady(run_dir, steps=100_000), nodes=1, ranks=1)
    after = cluster.call("sbatch", "--parsable", f"--dependency=afterok:{job}", f"-o{tmp_path}/after", "--wrap=id")
    cluster.wait_for_step(run_dir, 3, output)
    cluster.call("scancel", "--batch", "--signal=USR2", job)
    assert cluster.wait(job, output) == "FAILED", read(output)
    assert cluster.field(job, "ExitCode") == "5:0" and cluster.field(job, "Restarts") == "0"
    assert f"error: the last save, of step {last_step(run_dir)}, failed: rank 0: " in read(output)
    assert "queued again" not in read(output) and "saved and stopped" not in read(output)
    assert reasons(run_dir)[0].startswith("failed: the last save, of step")
    until(lambda: cluster.field(after.strip(), "Reason") == "DependencyNeverSatisfied", 20, lambda: read(output))
    cluster.call("scancel", after.strip())
    assert not (tmp_path / "after").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system too small for a checkpoint."""
    with mounted(tmp_path / "disk") as disk:
        yield disk


@pytest.mark.release
def test_a_node_whose_hardware_fails_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    output, run_dir = tmp_path / "out", tmp_path / "run"
    job = cluster.sbatch("srun", output, with_task(run_dir, "Faulty"), nodes=1, ranks=1)
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    broken = read(broken_node(run_dir))
    assert cluster.field(job, "ExcNodeList") == broken != cluster.field(job, "NodeList")
    assert cluster.field(job, "Restarts") == "1"
    assert reasons(run_dir) == [f"node at fault: {broken}", "done"]
    assert f"queued again without {broken}" in read(output)
