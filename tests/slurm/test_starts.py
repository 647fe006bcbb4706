"""Jobs that start where they should not: in a directory that another job uses, or on nodes that differ."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.launch.jobs import losses
from tests.slurm.cluster import SCRIPT, Cluster, read, reasons, record, steady, until, with_task

PURELIB = sysconfig.get_path("purelib")
PACKAGES = Path(PURELIB).relative_to(sys.prefix)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["torchrun", "srun"])
def test_of_two_jobs_that_overwrite_one_directory_the_loser_ends_at_once_and_says_why(
    style: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Both start at the same moment, one node each, so either may be the first."""
    run_dir = tmp_path / "run"
    go_file, steps = tmp_path / "go", 300
    extra = {"train__max_steps": steps, "run__overwrite": "true", "task__args__pace": 0.01, "task__args__save_s": 0}
    args = with_task(run_dir, "SlowSaves", **extra, task__args__go_file=go_file)
    outputs = [tmp_path / "0.out", tmp_path / "1.out"]
    jobs = [cluster.sbatch(style, output, args, nodes=1) for output in outputs]
    until(lambda: "FAILED" in [cluster.field(job, "JobState") for job in jobs], 180, lambda: str([*map(read, outputs)]))
    go_file.touch()
    states = [cluster.wait(job, output) for job, output in zip(jobs, outputs, strict=True)]
    assert sorted(states) == ["COMPLETED", "FAILED"], [read(output) for output in outputs]
    lost = states.index("FAILED")
    loser, said, winner, report = jobs[lost], read(outputs[lost]), jobs[1 - lost], read(outputs[1 - lost])
    assert cluster.field(loser, "ExitCode") == "2:0", said
    assert f"error: run.dir={run_dir} is being written by Slurm job {winner} of test" in said
    began, ended = (datetime.fromisoformat(cluster.field(loser, name)) for name in ("StartTime", "EndTime"))
    assert (ended - began).total_seconds() < 180, said  # run.init_timeout_s is 1800 s
    assert f"refused, as this run was writing to the directory: job {loser}" in report
    assert "started" not in report.partition("files written")[0].splitlines()[-1], report
    assert sorted(losses(run_dir)) == list(range(1, steps + 1))
    assert (run_dir / f"logs/slurm-{loser}.0").is_dir(), "the loser's logs are its own"
    (end,) = [event for event in record(run_dir) if event["event"] == "end" and event["job"] == loser]
    assert end["refused"] is True
    assert not (run_dir / ".rendezvous").exists(), "whoever has met needs no address any more"


@pytest.fixture
def hide(cluster: Cluster) -> Iterator[Callable[[Path], None]]:
    """Lets what runs on n2 find a folder empty."""

    def hide_on_n2(path: Path) -> None:
        cluster.call("bash", str(SCRIPT), "hide", str(cluster.folder), "n2", str(path))

    yield hide_on_n2
    cluster.call("bash", str(SCRIPT), "show", str(cluster.folder), "n2")


@pytest.mark.slow
@pytest.mark.parametrize("style", ["torchrun", "srun"])
@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        (f"venv/{PACKAGES}", "error: node n2: {}/venv/bin/python: no module torch\n  fix: "),
        ("venv", "error: node n2 has no interpreter {}/venv/bin/python\n  fix: install the environment there"),
        ("run", "error: node n2 does not see what n1 wrote to {}/run\n  fix: set run.dir to a directory that all"),
        ("run/checkpoints", "error: node n2 does not see what n1 wrote to {}/run/checkpoints\n  fix: set run.dir to"),
    ],
)
def test_nodes_that_differ_are_refused_before_ranks_start(
    hidden: str, said: str, style: str, cluster: Cluster, hide: Callable[[Path], None], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "venv" / PACKAGES).mkdir(parents=True)  # the same environment under a path of its own
    (tmp_path / "venv" / PACKAGES / "all.pth").write_text(f"import site; site.addsitedir({PURELIB!r})\n")
    for entry in Path(sys.prefix).iterdir():
        if not (tmp_path / "venv" / entry.name).exists():
            (tmp_path / "venv" / entry.name).symlink_to(entry)
    hide(tmp_path / hidden)
    python = f"--export=ALL,NPROC_PER_NODE=1,SHARDKIT_PYTHON={tmp_path}/venv/bin/python"
    job = cluster.sbatch(style, output, steady(tmp_path / "run"), python, ranks=1)
    assert cluster.wait(job, output) == "FAILED", read(output)
    assert cluster.field(job, "ExitCode") == "2:0", read(output)
    assert said.format(tmp_path) in read(output) and "Traceback" not in read(output)
    began, ended = (datetime.fromisoformat(cluster.field(job, name)) for name in ("StartTime", "EndTime"))
    assert (ended - began).total_seconds() < 180, "no rank waited for another"  # run.init_timeout_s is 1800 s
    assert reasons(tmp_path / "run")[-1].startswith("failed: node n2")
    assert not list((tmp_path / "run").rglob(".shardkit-nodes*"))
