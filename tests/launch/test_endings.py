"""How a start of a batch job ends: cancelled, warned, or queued again. Slurm's commands and the rank are small scripts
here; real clusters are in tests/slurm.

The controller's state is a folder: `state`, `reason` and `restarts` of the job, and `calls`, the requests that change
it. Its words and their order are those of Slurm 22.05: a cancel sets the state and the end time, slurmstepd announces
it in the job's output, and the job's processes get SIGTERM. Like slurmctld it answers one request after the other:
each holds a lock on `lock`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardkit.launch.failures import job_starts
from tests.launch.jobs import REPO, environment, settings
from tests.texts import write_files, write_program

STYLES = ("torchrun", "srun", "script")
SCONTROL = r"""#!/bin/bash
cd {folder}
exec 9>lock; flock 9
now=$(date +%Y-%m-%dT%H:%M:%S)
if [ "$2" = hostnames ]; then printf 'n1\nn2\n'; exit; fi
if [ "$2" = config ]; then echo "KillWait = 0 sec"; exit; fi
if [ "$1" = show ]; then
  end=2099-01-01T00:00:00; [ "$(cat state)" = RUNNING ] || end=$now  # as Slurm sets it for a job that ends
  echo "JobId=7 JobState=$(cat state) Reason=$(cat reason) Restarts=$(cat restarts) EndTime=$end PreemptTime=None"
  [ "$4" ] || echo "   StdErr={folder}/out"
elif [ "$1" = requeue ]; then
  echo requeue >>calls
  echo 1 >restarts; echo PENDING >state
  echo "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT $now DUE TO JOB REQUEUE ***" >>out
  ./end
fi
"""
SCANCEL = r"""#!/bin/bash
cd {folder}
case $1 in --signal=*) grep -qs {folder} /proc/$(cat rank)/environ && kill -${{1#--signal=}} $(cat rank); exit;; esac
exec 9>lock; flock 9
echo cancel >>calls
if [ "$(cat state)" = PENDING ]; then echo CANCELLED >state; exit; fi
echo COMPLETING >state
echo "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT $(date +%Y-%m-%dT%H:%M:%S) ***" >>out
./end
exit 0
"""
# Ends the job's processes. Their ids may be another process's by now.
END = r"""#!/bin/bash
cd {folder}
for pid in $(cat batch rank 2>/dev/null); do
  if grep -qs {folder} /proc/$pid/environ; then kill -TERM $pid; fi
done
exit 0
"""
# It trains until it is told to stop, then saves, at least as long as `held` is there. A cancelled step starts no task:
# a cancel sets the state before it reads `rank`.
SRUN = r"""#!/bin/bash
cd {folder}
stop=
trap 'stop=1' USR2 TERM
echo $$ >rank
[ "$(cat state)" = RUNNING ] || {{ echo "srun: error: Job 7 is not running" >&2; exit 1; }}
touch training
until [ "$stop" ]; do sleep 0.05; done
touch saving
sleep 0.3
while [ -e held ]; do sleep 0.05; done
case {style} in
script) mkdir -p run/mine; touch run/mine/last.pt; exit 0;;
srun) error=$SHARDKIT_ERROR_DIR/rank-0.json;;
torchrun) error=$SHARDKIT_LOG_ROOT/node0/id/attempt_0/0/error.json;;
esac
echo '{{"step": 5}}' >>run/metrics.jsonl
mkdir -p run/checkpoints/step_00000005 $(dirname $error)
touch run/checkpoints/step_00000005/manifest.json
echo '{stopped}' >$error
exit 75
"""
# Looks are frequent here, so that many of them meet each phase of a save.
BATCH = """
import sys
from shardkit.launch import batch
from shardkit.launch.slurm import preemption_warning, requeue
preemption_warning._LOOK_S, requeue._LOOK_S, requeue._SLACK_S = 0.1, 0.1, 0.2
sys.exit(batch.main(sys.argv[1:]))
"""
STOPPED = {"rank": 0, "exit_code": 75, "when": 0.0, "message": "saved and stopped for SIGUSR2"}


class Job:
    """A batch script of shardkit under these commands.

    Args:
        style: one of `STYLES`.
    """

    def __init__(self, folder: Path, style: str) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        programs = folder / "bin"
        stopped = json.dumps({"message": {"message": "", "extraInfo": {}}, "shardkit": STOPPED})
        values = {"folder": folder, "style": style, "stopped": stopped}
        for name, text in (("scontrol", SCONTROL), ("scancel", SCANCEL), ("srun", SRUN), ("../end", END)):
            write_program(programs / name, text.format(**values))
        write_files(folder, {"state": "RUNNING\n", "reason": "None\n", "restarts": "0\n", "out": "", "calls": ""})
        (self.run_dir / "logs").mkdir(parents=True)
        saves = [{"step": 1, "total_s": 400.0}]  # so that a look at a job's end time has something to compare
        (self.run_dir / "logs/checkpoints.jsonl").write_text("".join(json.dumps(save) + "\n" for save in saves))
        words = ["srun" if style == "script" else style]
        if style == "script":
            described = self.run_dir / "submit/1/script.json"
            described.parent.mkdir(parents=True)
            described.write_text(json.dumps({"argv": ["train.py"], "checkpoints": str(self.run_dir / "mine")}))
            words += ["--script", str(described)]
        else:
            words += [str(REPO / "configs/ddp.yaml"), *settings(self.run_dir)]
        environ = environment(
            PATH=f"{programs}:{os.environ['PATH']}", SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="1",
            NPROC_PER_NODE="1", SLURM_JOB_NODELIST="n[1-2]",
        )  # fmt: skip
        with (folder / "out").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BATCH, *words], cwd=REPO, env=environ, stdout=out, stderr=out
            )
        (folder / "batch").write_text(f"{self.process.pid}\n")

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().split()

    @property
    def reason(self) -> str | None:
        """The recorded reason of the start's end."""
        return job_starts.starts(self.run_dir)[-1].reason

    def until(self, *names: str) -> None:
        """Wait until one of these files is there, or the batch script has ended."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and not any((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def until_it_saves(self) -> None:
        """Warn it in training, and wait until it saves, which it then does until `release`."""
        self.until("training")
        (self.folder / "held").touch()
        self.warn()
        self.until("saving")

    def release(self) -> None:
        (self.folder / "held").unlink()

    def warn(self) -> None:
        """Send what `--signal=B:USR2@…` sends."""
        self.process.send_signal(signal.SIGUSR2)

    def cancel(self) -> None:
        subprocess.run([self.folder / "bin/scancel", "7"], check=True, stderr=subprocess.DEVNULL)

    def end(self) -> int:
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()

    def said(self) -> str:
        """The batch script's own lines, without their time."""
        return re.sub(r"^\[\d\d:\d\d:\d\d\] ", "", self.output, flags=re.MULTILINE)


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
    with (job.folder / "lock").open("w") as lock:  # between two of the controller's answers
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_files(job.folder, {"restarts": "1\n", "state": "PENDING\n"})
    job.release()
    job.end()
    assert job.calls == ["cancel", "cancel"], job.output
    check_cancelled(job)
