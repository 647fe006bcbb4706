"""`shardkit submit -- SCRIPT` on a real Slurm cluster: programs without shardkit, preempted and resumed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import REPO, run
from tests.slurm.cluster import Cluster, read, reasons, record, until

PLAIN = "tests/launch/plain.py"
TWO_NODES = ["--nodes=2", "--gpus-per-node=0", "--ranks-per-node=1", "--cpus-per-task=2"]


def submit(cluster: Cluster, run_dir: Path, *words: str) -> tuple[str, Path]:
    """(the job, its output)."""
    job, _ = cluster.submit(*TWO_NODES, "--run-dir", str(run_dir), *words)
    return job, run_dir / f"logs/slurm-{job}.out"


def losses(path: Path) -> list[tuple[int, float]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(event["step"], event["loss"]) for event in map(json.loads, lines)]


def undisturbed(tmp_path: Path, *words: str) -> None:
    launch = [sys.executable, "-m", "shardkit.cli", "launch", "--nproc-per-node=2", "--run-dir", str(tmp_path / "logs")]
    run([*launch, "--", *words], code=0)


@pytest.mark.parametrize(
    "how", [pytest.param("term", marks=pytest.mark.slow), pytest.param("file", marks=pytest.mark.release)]
)
def test_a_plain_script_is_preempted_and_resumed_with_the_same_losses(
    how: str, cluster: Cluster, tmp_path: Path
) -> None:
    mine, run_dir = tmp_path / "mine", tmp_path / "run"
    words = ["--listen", how, "--hold", "--steps", "60"]
    watch = ["--on-preempt", how, "--checkpoints", str(mine / "checkpoints")]
    job, output = submit(cluster, run_dir, *watch, "--", PLAIN, str(mine), *words)
    until(lambda: len(losses(mine / "losses.jsonl")) > 5, 120, lambda: read(output))
    cluster.preempt()
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert cluster.field(job, "Restarts") == "1", read(output)
    assert [event["event"] for event in record(run_dir)] == ["start", "end", "start", "end"]
    assert reasons(run_dir)[0] in ("preempted", "saved after USR2") and reasons(run_dir)[1] == "done"
    assert "continues after step" in read(output)
    undisturbed(tmp_path, PLAIN, str(tmp_path / "alone"), "--steps", "60")
    assert losses(mine / "losses.jsonl") == losses(tmp_path / "alone/losses.jsonl")
    assert {path.name for path in (run_dir / "submit/1").iterdir()} >= {"script.json", "job.sbatch", "code.json"}


@pytest.mark.release
@pytest.mark.parametrize("style", ["torchrun", "srun"])
def test_a_script_that_fails_ends_the_job_with_its_code_and_traceback(
    style: str, cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ.get('RANK', os.environ['SLURM_PROCID']) == '1':\n    {}['x']\n")
    job, output = submit(cluster, tmp_path / "run", "--style", style, "--", str(script))
    assert cluster.wait(job, output) == "FAILED", read(output)
    assert cluster.field(job, "ExitCode") == "1:0", read(output)
    assert reasons(tmp_path / "run") == ["failed: KeyError: 'x'"]
    assert "error: rank 1 failed: KeyError: 'x'" in read(output)


@pytest.mark.release
@pytest.mark.timeout(400)
def test_a_script_that_saves_nothing_is_not_started_for_ever(cluster: Cluster, tmp_path: Path) -> None:
    """It stops when it is told to, three times, without a checkpoint: a fourth start would get no further."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import pathlib, signal\n"
        f"with pathlib.Path({str(tmp_path / 'starts')!r}).open('a') as file: file.write('x')\n"
        "signal.sigwait([signal.SIGTERM])\n"
    )
    script.write_text("import signal; signal.pthread_sigmask(0, [signal.SIGTERM])\n" + script.read_text())
    watch = ["--checkpoints", str(tmp_path / "none"), "--time=2", "--signal-s=110", "--nodes=1"]
    job, output = submit(cluster, tmp_path / "run", *watch, "--", str(script))
    assert cluster.wait(job, output, 300) == "FAILED", read(output)
    assert reasons(tmp_path / "run") == ["stopped after USR2"] * 3, read(output)
    assert f"error: job {job} wrote no file below {tmp_path}/none in 3 starts" in read(output)
    assert len(read(tmp_path / "starts")) <= 3, "on a slow machine the signal can come before Python runs the script"


@pytest.mark.release
@pytest.mark.timeout(580)
@pytest.mark.parametrize("stage", [[], ["2"], ["3"]], ids=["ddp", "zero2", "zero3"])
def test_transformers_just_in_time_checkpoint_resumes_with_the_same_losses(
    stage: list[str], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    mine, run_dir = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    script = ["--", "-m", "tests.launch.hf_trainer"]
    for environment in (cluster.env, os.environ):
        monkeypatch.setitem(environment, "DS_ACCELERATOR", "cpu")
    job, output = submit(
        cluster, run_dir, "--checkpoints", str(mine / "checkpoints"), *script, str(mine), "20", "1", *stage
    )
    until(lambda: "'loss'" in read(output), 240, lambda: read(output))
    cluster.preempt()
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert cluster.field(job, "Restarts") == "1", read(output)
    (saved,) = (mine / "checkpoints").glob("checkpoint-*")
    number = int(saved.name.partition("-")[2])
    assert 0 < number < 20
    assert [path.name for path in saved.glob("global_step*")] == [f"global_step{number}" for _ in stage]
    (tmp_path / "alone").mkdir()
    undisturbed(tmp_path, *script[1:], str(tmp_path / "alone"), "20", "0", *stage)
    found, expected = (json.loads((folder / "losses.json").read_text()) for folder in (mine, tmp_path / "alone"))
    if stage:  # it saves when the step has ended and before the step is logged
        expected.pop(str(number))
    assert found == expected


@pytest.mark.release
@pytest.mark.timeout(400)
def test_lightnings_own_requeue_works_under_submit(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plug-in saves in the signal's handler and requeues the job itself."""
    pytest.importorskip("lightning")
    monkeypatch.setitem(cluster.env, "MASTER_ADDR", "127.0.0.1")  # the emulated nodes have no names
    found = {}
    for name in ("alone", "mine"):
        mine, run_dir = tmp_path / name, tmp_path / f"run-{name}"
        mine.mkdir()
        words = ["--style=srun", "--on-preempt=usr1", "--checkpoints", str(mine)]
        words += ["--", "-m", "tests.launch.lightning_fit", str(mine), "60", "0.2" if name == "mine" else "0", "2"]
        job, output = submit(cluster, run_dir, *words)
        if name == "mine":
            until(lambda: "step 5\n" in read(output), 120, lambda: read(output))  # noqa: B023
            cluster.preempt()
        assert cluster.wait(job, output) == "COMPLETED", read(output)
        assert cluster.field(job, "Restarts") == str(int(name == "mine")), read(output)
        found[name] = json.loads((mine / "losses.json").read_text())
    assert found["mine"] == found["alone"] and len(found["mine"]) == 60


def test_what_slurm_cannot_do_for_a_script_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    words = ["--run-dir", str(tmp_path / "run"), "--gpus-per-node=0", "--style=srun", "--heartbeat=auto"]
    process = cluster.shardkit("submit", *words, "--", str(REPO / PLAIN))
    assert process.returncode == 2 and process.stderr.startswith("error: --heartbeat with --style srun"), process
    assert len(process.stderr.splitlines()) == 2 and not (tmp_path / "run").exists()
