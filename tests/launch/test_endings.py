"""How a start of a batch job ends: cancelled, warned, or left waiting by Slurm. On real clusters: tests/slurm."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.controller import STYLES, Job
from tests.texts import write_program


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(style: str) -> Job:
        jobs.append(Job(tmp_path / str(len(jobs)), style))
        return jobs[-1]

    yield make
    for job in jobs:
        job.process.kill()
        job.process.wait()


def check_cancelled(job: Job) -> None:
    """Whatever came before the cancel, the job does not come back, and it says so unless Slurm had queued it again."""
    assert (job.folder / "state").read_text().strip() in ("COMPLETING", "CANCELLED"), job.output
    assert job.calls == ["cancel"] or job.calls[-1] == "cancel", (job.calls, job.output)
    assert "the time limit is near" not in job.output
    if job.process.returncode == -signal.SIGTERM:  # Python was starting
        assert job.calls == ["cancel"] and not (job.folder / "training").exists(), job.output
    elif "requeue" not in job.calls:
        assert "cancelled, not queued again" in job.said() and job.reason == "cancelled", job.output


@pytest.mark.parametrize("style", STYLES)
def test_a_cancel_in_the_save_that_a_warning_began_is_a_cancel(style: str, start: Callable[..., Job]) -> None:
    job = start(style)
    job.until_it_saves()
    job.cancel()
    job.release()
    code = job.end()
    check_cancelled(job)
    assert job.calls == ["cancel"], job.output
    if style == "script":
        assert "the script wrote a checkpoint in this start" in job.output
    else:
        assert code == 75 and "saved last: step 5; continue with run.resume=true" in job.output


def test_a_warned_job_is_queued_again(start: Callable[..., Job]) -> None:
    """The other side of a cancel: without it nothing here would show that a warning works."""
    job = start("srun")
    job.until("training")
    job.warn()
    assert job.end() == 75, job.output
    assert job.calls == ["requeue"] and job.reason == "saved after USR2", job.output


@pytest.mark.parametrize("shown", ["{}/out", "{}/o64t"], ids=["", "a garbled path"])
def test_a_cancel_after_the_last_look_takes_the_job_from_the_queue(shown: str, start: Callable[..., Job]) -> None:
    """The user cancels after the ranks have ended, in the moment in which the script queues the job again.

    scontrol does not show an output file as it is called if its path holds a %.
    """
    job = start("srun")
    scontrol = job.folder / "bin/scontrol"
    hurry = f'if [ "$1" = requeue ]; then {job.folder}/bin/scancel 7; fi\n'
    text = scontrol.read_text().replace("exec 9>lock", hurry + "exec 9>lock", 1)
    text = text.replace(f"StdErr={job.folder}/out", f"StdErr={shown.format(job.folder)}")
    Path(write_program(job.folder / "draft", text)).replace(scontrol)  # the job may be running the old one
    job.until("training")
    job.warn()
    job.end()
    assert job.calls == ["cancel", "requeue", "cancel"], job.output
    assert "cancelled, not queued again; saved last: step 5" in job.said() and job.reason == "cancelled"


def test_a_cancelled_job_that_slurm_has_queued_again_is_taken_from_the_queue(start: Callable[..., Job]) -> None:
    """As after a preemption or a lost node in the moment of the cancel."""
    job = start("srun")
    job.until_it_saves()
    job.cancel()
    job.set(restarts="1", state="PENDING")
    job.release()
    job.end()
    assert job.calls == ["cancel", "cancel"], job.output
    check_cancelled(job)
