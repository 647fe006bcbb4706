"""Jobs on a real Slurm cluster of two emulated nodes: the templates, preemption, cancellation, a lost node."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import REPO, environment, losses, settings
from tests.slurm.cluster import SCRIPT, Cluster, read, until

pytestmark = [pytest.mark.slurm, pytest.mark.dist]
STYLES = ["torchrun", "srun"]


def tiny(run_dir: Path, text: Path, strategy: str) -> list[str]:
    values = {
        "run.dir": run_dir, "run.device": "cpu", "data.path": text, "data.cache_dir": text / ".cache",
        "train.max_steps": 5, "train.seq_len": 32, "train.micro_batch_size": 2, "train.global_batch_size": 8,
        "train.eval_batches": 0, "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "optim.lr": 0.01,
        "parallel.strategy": strategy, "logging.tensorboard": "false",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A corpus, and the losses of one process on it."""
    folder = tmp_path_factory.mktemp("alone")
    text = folder / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"number {i} comes before number {i + 1}\n" * 30)
    args = tiny(folder / "run", text, "single")
    done = subprocess.run(
        [sys.executable, "-m", "shardkit.train", *args], cwd=REPO, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return text, losses(folder / "run")


@pytest.mark.deepspeed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
@pytest.mark.parametrize("style", STYLES)
def test_both_templates_train_as_one_process_does(
    style: str, strategy: str, cluster: Cluster, alone: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    text, expected = alone
    output = tmp_path / "out"
    job = cluster.sbatch(style, output, tiny(tmp_path / "my run", text, strategy))
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    found = losses(tmp_path / "my run")
    assert found == pytest.approx(expected, abs=1e-5)
    assert "step 5/5" in read(output)


def steady(run_dir: Path, steps: int = 60) -> list[str]:
    return settings(run_dir, "wait", train__max_steps=steps, train__deterministic="true")


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = cluster.sbatch("srun", folder / "out", steady(folder / "run"))
    assert cluster.wait(job, folder / "out") == "COMPLETED", read(folder / "out")
    return losses(folder / "run")


def test_preempted_at_a_random_step_it_loses_nothing(
    cluster: Cluster, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    job = cluster.sbatch("torchrun", output, steady(tmp_path / "run"))
    cluster.wait_for_step(tmp_path / "run", random.randint(1, 30), output)
    other = cluster.call(
        "sbatch", "--parsable", "-p", "high", "--nodes=2", "--exclusive", "-o", "/dev/null", "--wrap=true"
    )
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert cluster.field(job, "Restarts") == "1", read(output)
    assert cluster.field(other.strip(), "JobState") == "COMPLETED"
    assert losses(tmp_path / "run") == undisturbed
    record = [json.loads(line) for line in (tmp_path / "run/logs/restarts.jsonl").read_text().splitlines()]
    assert [(e["event"], e["restart"]) for e in record] == [("start", 0), ("end", 0), ("start", 1), ("end", 1)]
    assert record[1]["reason"] in ("saved after USR2", "preempted")


def test_told_before_the_time_limit_it_saves_and_goes_on(
    cluster: Cluster, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    job = cluster.sbatch("srun", output, steady(tmp_path / "run"))
    cluster.wait_for_step(tmp_path / "run", random.randint(1, 30), output)
    cluster.call("scancel", "--batch", "--signal=USR2", job)  # what --signal sends
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert cluster.field(job, "Restarts") == "1", read(output)
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("style", ["torchrun", pytest.param("srun", marks=pytest.mark.slow)])
def test_a_cancelled_job_keeps_its_checkpoint_and_stays_cancelled(style: str, cluster: Cluster, tmp_path: Path) -> None:
    output, run_dir = tmp_path / "out", tmp_path / "run"
    job = cluster.sbatch(style, output, steady(run_dir, steps=100_000))
    cluster.wait_for_step(run_dir, 3, output)
    told = cluster.shardkit("cancel", job)
    assert told.returncode == 0, told.stderr
    assert cluster.wait(job, output) == "CANCELLED", read(output)
    until(lambda: (run_dir / "checkpoints/latest").exists(), 20, lambda: read(output))
    assert cluster.field(job, "Restarts") == "0"
    assert max(losses(run_dir)) == int((run_dir / "checkpoints/latest").read_text().strip().rpartition("_")[2])


@pytest.mark.slow
def test_a_job_whose_node_dies_is_queued_again_and_finishes(
    cluster: Cluster, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    job = cluster.sbatch("torchrun", output, [*steady(tmp_path / "run"), "checkpoint.every_steps=5"])
    cluster.wait_for_step(tmp_path / "run", 12, output)
    cluster.call("bash", str(SCRIPT), "kill-node", str(cluster.folder), "n2")
    until(lambda: "PENDING" in cluster.field(job, "JobState"), 60, lambda: read(output))
    cluster.call("bash", str(SCRIPT), "start-node", str(cluster.folder), "n2")
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("style", [pytest.param("torchrun", marks=pytest.mark.slow), "srun"])
def test_a_user_error_ends_the_job_with_its_two_lines(style: str, cluster: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = cluster.sbatch(style, output, [*settings(tmp_path / "run", "refuse"), "train.micro_batch_size=2"])
    assert cluster.wait(job, output) == "FAILED"
    assert cluster.field(job, "ExitCode") == "2:0", read(output)
    assert "error: sample 7 is empty\n  fix: remove it\n" in read(output)
    assert "Traceback" not in read(output)


def test_submit_queues_shows_follows(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / 'my "run" $(touch hacked) it\'s %j 100%'
    args = ["configs/ddp.yaml", *settings(folder, model__n_heads=4), "--nodes=2", "--gpus-per-node=0"]
    args += ["--ranks-per-node=2", "--cpus-per-task=2", "--name", 'a "name" $(id)']
    done = cluster.shardkit("submit", *args)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[2]
    assert f"{folder}/logs/slurm-{job}.out" in done.stdout
    listed = cluster.shardkit("jobs").stdout
    assert str(folder) in listed and job in listed
    followed = cluster.shardkit("logs", "-f", job)
    assert "files written:" in followed.stdout and "step 6/6" in followed.stdout, followed
    assert cluster.field(job, "JobState") == "COMPLETED"
    assert {p.name for p in (folder / "submit").iterdir()} >= {"config.yaml", "job.sbatch", "code.json", "job_id"}
    assert not list(REPO.glob("hacked")) and not list(tmp_path.glob("hacked"))
    assert cluster.shardkit("logs", str(folder)).stdout == (folder / f"logs/slurm-{job}.out").read_text()


def test_slurms_refusal_is_passed_on_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    args = ["configs/ddp.yaml", *settings(tmp_path / "run"), "--gpus-per-node=0"]
    done = cluster.shardkit("submit", *args, "--partition=nowhere")
    assert done.returncode == 2
    assert "invalid partition specified: nowhere" in done.stderr and "sinfo -s" in done.stderr
    assert not (tmp_path / "run").exists()
    gone = cluster.shardkit("logs", "99999")
    assert gone.returncode == 2 and "does not know job 99999" in gone.stderr
    assert cluster.shardkit("cancel", "99999").returncode == 2
