"""`shardkit submit` on a real Slurm cluster, and what it refuses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.launch.jobs import REPO, losses, settings
from tests.slurm.cluster import Cluster, read


def test_submit_queues_shows_follows(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / 'my "run" $(touch hacked) it\'s %j 100%'
    held = tmp_path / "held"
    held.touch()
    run = settings(folder, model__n_heads=4, task__args__held_while=held)
    args = ["configs/ddp.yaml", *run, "--nodes=2", "--gpus-per-node=0"]
    args += ["--ranks-per-node=1", "--cpus-per-task=2", "--style=srun", "--name", 'a "name" $(id)']
    process = cluster.shardkit("submit", *args)
    assert process.returncode == 0, process.stderr
    job = process.stdout.split()[2]
    assert f"{folder}/logs/slurm-{job}.out" in process.stdout and "warning" not in process.stderr
    output = folder / f"logs/slurm-{job}.out"
    commands = dict(line.strip().split(": ", 1) for line in process.stdout.splitlines()[1:])
    assert job in cluster.call(*shlex.split(commands["state"]))
    assert shlex.split(commands["follow"]) == ["tail", "-F", str(output)]
    assert shlex.split(commands["end it"]) == ["scancel", job]
    held.unlink()
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert "files written:" in read(output) and "step 6/6" in read(output), read(output)
    assert {p.name for p in (folder / "submit/1").iterdir()} >= {"config.yaml", "job.sbatch", "code.json", "job_id"}
    assert not list(REPO.glob("hacked")) and not list(tmp_path.glob("hacked"))


@pytest.mark.release
def test_an_array_trains_one_run_per_index_after_the_job_it_depends_on(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.call("sbatch", "--parsable", "-o", "/dev/null", "--wrap=true").strip()
    args = ["configs/ddp.yaml", *settings(tmp_path / "run"), "train.seed=%a", "--gpus-per-node=0", "--ranks-per-node=1"]
    job, said = cluster.submit(*args, "--array=3-4", f"--dependency=afterok:{first}", "--style=srun")
    for index in (3, 4):
        output = tmp_path / f"run/logs/slurm-{job}_{index}.out"
        assert cluster.wait(f"{job}_{index}", output) == "COMPLETED", read(output)
        assert f"seed: {index}" in (tmp_path / f"run/array_{index}/config.yaml").read_text()
    assert losses(tmp_path / "run/array_3") != losses(tmp_path / "run/array_4")
    assert "%a" not in said and f"slurm-{job}_4.out" in said
    again = cluster.shardkit("submit", *args, "--array=0-3", "--style=srun")
    assert again.returncode == 2 and f"error: {tmp_path}/run/array_3 already holds a run" in again.stderr, again


@pytest.mark.parametrize(
    ("options", "said", "fix"),
    [
        (["--partition=nowhere"], "invalid partition specified: nowhere", "sinfo -s"),
        (["--partition=lab", "--account=chemistry"], "Invalid account or account/partition", "sacctmgr show assoc"),
        (["--partition=lab", "--nodes=2", "--account=physics", "--qos=best"], "Invalid account", "sacctmgr show assoc"),
        (["--nodes=9"], "More processors requested than permitted", "sinfo -o"),
        (["--mem=900G"], "Memory specification can not be satisfied", "sinfo -o"),
        (["--time=soon"], "Invalid --time specification", "correct the option"),
        (["--sbatch=--nosuch=3"], "unrecognized option '--nosuch=3'", "correct the option"),
    ],
)
def test_slurms_refusal_is_passed_on_and_nothing_is_left(
    options: list[str], said: str, fix: str, cluster: Cluster, tmp_path: Path
) -> None:
    args = ["configs/ddp.yaml", *settings(tmp_path / "run"), "--gpus-per-node=0"]
    process = cluster.shardkit("submit", *args, *options)
    assert process.returncode == 2, process
    cause, advice = process.stderr.splitlines()
    assert cause.startswith("error: sbatch refused: ") and said in cause
    assert advice.startswith("  fix: ") and fix in advice
    assert not (tmp_path / "run").exists()


def test_what_slurm_accepts_but_holds_back_is_said(cluster: Cluster, tmp_path: Path) -> None:
    failed = cluster.call("sbatch", "--parsable", "-o", "/dev/null", "--wrap=false").strip()
    assert cluster.wait(failed, tmp_path) == "FAILED"
    args = ["configs/ddp.yaml", *settings(tmp_path / "run"), "--gpus-per-node=0", f"--dependency=afterok:{failed}"]
    process = cluster.shardkit("submit", *args)
    assert process.returncode == 0, process.stderr
    cluster.call("scancel", process.stdout.split()[2])
    assert process.stderr == "warning: Slurm holds it back: DependencyNeverSatisfied\n"
