from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.errors import DataError, LaunchError
from shardkit.launch.failures import failure, job_starts
from shardkit.launch.local.restart import Restarts

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


def test_a_rank_without_a_word_is_named_where_torchrun_saw_its_peer_end_first(logs: Path, tmp_path: Path) -> None:
    (logs / failure.TORCHRUN_LOG).write_text(LOG.splitlines()[1])
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
