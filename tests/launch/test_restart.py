from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.errors import DataError, LaunchError
from shardkit.launch.failures import failure, job_starts
from shardkit.launch.local import launcher, restart
from shardkit.launch.local.launcher import Restarts

LOG = (
    "E0213 12:07 871 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: -9) local_rank: 1 (pid: 8)"
    " of binary: python\n"
    "E0213 12:09 871 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0 (pid: 9)"
    " of binary: python\n"
)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / failure.TORCHRUN_LOG).write_text(LOG)
    return tmp_path / "logs"


def attempt(logs: Path, number: int, **failed: Exception) -> None:
    """An attempt whose ranks left these errors: rank_0=…."""
    (logs / f"job_x/attempt_{number}/0").mkdir(parents=True)
    for name, error in failed.items():
        rank = name.removeprefix("rank_")
        path = logs / f"job_x/attempt_{number}/{rank}/error.json"
        failure.record(error, {"TORCHELASTIC_ERROR_FILE": str(path), "RANK": rank})


def test_each_restart_is_noted_once_with_its_first_cause(logs: Path, tmp_path: Path) -> None:
    restarts = Restarts(logs, tmp_path / "run")
    assert not restarts.look(), "nothing has started"
    attempt(logs, 0, rank_0=RuntimeError("Connection closed by peer"))
    assert not restarts.look() and job_starts.restarts(tmp_path / "run") == []
    attempt(logs, 1, rank_0=ValueError("no cat\non the GPU"), rank_1=RuntimeError("Connection reset by peer"))
    assert not restarts.look() and not restarts.look()
    attempt(logs, 2)
    restarts.look()
    assert job_starts.restarts(tmp_path / "run") == [
        (0, "local rank 1: killed by SIGKILL (exit code -9)"),
        (0, "rank 0: ValueError: no cat"),
    ]


@pytest.mark.parametrize("exit_code", [1, -15], ids=["ended by itself", "ended by torchrun"])
def test_a_rank_without_a_word_is_named_where_torchrun_blames_its_peer(
    exit_code: int, logs: Path, tmp_path: Path
) -> None:
    blames_peer = LOG.splitlines()[1].replace("exitcode: 1", f"exitcode: {exit_code}")
    (logs / failure.TORCHRUN_LOG).write_text(blames_peer)
    attempt(logs, 0, rank_0=RuntimeError("[pair.cc:553] Connection reset by peer"))
    for rank in ("0", "1"):
        (logs / f"job_x/attempt_0/{rank}").mkdir(exist_ok=True)
        (logs / f"job_x/attempt_0/{rank}/stderr.log").touch()
    attempt(logs, 1)
    Restarts(logs, tmp_path / "run").look()
    ((_, reason),) = job_starts.restarts(tmp_path / "run")
    assert reason == "local rank 1: ended without a word, most likely killed"


def test_what_only_the_user_can_mend_ends_the_job_and_a_lost_peer_does_not(logs: Path, tmp_path: Path) -> None:
    attempt(logs, 0, rank_0=LaunchError("not all 2 ranks joined within run.init_timeout_s=9 s", "look at their logs"))
    assert not Restarts(logs, tmp_path).look()
    attempt(logs, 1, rank_1=DataError("sample 7 is empty", "remove it"))
    assert Restarts(logs, tmp_path).look()


def test_such_an_error_ends_the_job_though_torchrun_has_restarted_the_ranks(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher looks twice a second; on a busy machine torchrun may be faster."""
    restarts = Restarts(logs, tmp_path)
    attempt(logs, 0)
    assert not restarts.look()
    path = logs / "job_x/attempt_0/1/error.json"
    failure.record(DataError("sample 7 is empty", "remove it"), {"TORCHELASTIC_ERROR_FILE": str(path), "RANK": "1"})
    attempt(logs, 1)
    assert restarts.look() and restarts.final == logs / "job_x/attempt_0"
    assert job_starts.restarts(tmp_path) == [], "the restart came to nothing"
    ended = launcher.Ended(-15, None, user_error=True, attempt=restarts.final)
    assert launcher._verdict(ended, logs, tmp_path, 0) == 2
    assert capsys.readouterr().err == "error: sample 7 is empty\n  fix: remove it\n"


TORCHRUN = {"TORCHELASTIC_RUN_ID": "shardkit", "GROUP_WORLD_SIZE": "1"}
SLURM, NAMED = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, {restart.JOB_ID: "nightly"}


@pytest.mark.parametrize(
    ("wrote", "starts", "expected"),
    [
        (None, NAMED, False),
        (NAMED, NAMED, True),
        (NAMED, {**NAMED, **SLURM}, True),
        (NAMED, {restart.JOB_ID: "weekly"}, False),
        (NAMED, {}, False),
        (SLURM, NAMED, False),
        (SLURM, {**SLURM, "SLURM_STEP_ID": "1"}, None),
        (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "1"}, True),
        (SLURM, {**SLURM, "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        (SLURM, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ({**SLURM, "SLURM_CLUSTER_NAME": "a"}, {**SLURM, "SLURM_CLUSTER_NAME": "b", "SLURM_RESTART_COUNT": "1"}, False),
        (TORCHRUN, TORCHRUN, None),
        (TORCHRUN, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({}, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}, None),
        ({}, {}, None),
        ({}, {**TORCHRUN, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({}, {"SHARDKIT_ELASTIC": "1"}, True),
    ],
)  # fmt: skip
def test_which_starts_are_restarts_of_the_job_that_wrote_a_directory(
    wrote: dict[str, str] | None, starts: dict[str, str], expected: bool | None, tmp_path: Path
) -> None:
    if wrote is not None:
        earlier = restart.this_start(wrote)
        (tmp_path / "env.json").write_text(json.dumps({"job": earlier.job, "torchrun": earlier.agent}))
    assert restart.wrote(tmp_path, starts) is expected
    continues = ["run.overwrite=false", "run.resume=auto"]
    assert restart.overrides(str(tmp_path), False, starts) == (continues if expected else [])


def test_a_grace_that_is_no_number_is_refused() -> None:
    assert restart.grace_s({}) == 25 and restart.grace_s({restart.GRACE: "600"}) == 600
    for text in ("long", "-1", "nan", "inf"):
        with pytest.raises(LaunchError, match=f"SHARDKIT_GRACE_S={text}"):
            restart.grace_s({restart.GRACE: text})
