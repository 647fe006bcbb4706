"""Faults at drawn moments: a few of the draws that `python -m benchmarks.moments` plays by the hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm import moments
from tests.slurm.cluster import Cluster
from tests.slurm.moments import Draw

pytestmark = [pytest.mark.slurm, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """Strategy → the losses of an undisturbed run."""
    return {
        strategy: moments.undisturbed(cluster, tmp_path_factory.mktemp(strategy), strategy)
        for strategy in moments.STRATEGIES
    }


@pytest.mark.parametrize(
    "drawn",
    [
        Draw(1, 0, "torchrun", "ddp", "cancel", "warned", 0.3, 3.0, 30),
        Draw(1, 1, "srun", "fsdp", "cancel", "warned", 0.7, 3.0, 30),
        Draw(1, 2, "torchrun", "ddp", "cancel", "look", 0.5, 3.0, 30),
        Draw(1, 3, "srun", "ddp", "cancel", "publishing", 0.5, 3.0, 30),
        Draw(1, 4, "script", "ddp", "cancel", "warned", 0.5, 3.0, 30),
    ],
    ids=lambda drawn: drawn.name,
)
def test_a_cancel_ends_the_job_for_good_whatever_came_before(
    drawn: Draw, cluster: Cluster, whole: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    """(1) requeued 4 of 4 when it was cancelled after Slurm's warning; (2) when a look fell into the last save."""
    moments.set_kill_wait(cluster, drawn.kill_wait_s)
    assert moments.play(drawn, cluster, tmp_path, whole.__getitem__) == "cancelled, saved and said so"


def test_a_save_in_which_the_time_limit_comes_has_all_of_kill_wait(
    cluster: Cluster, whole: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    """torchrun's agent ends at its third SIGTERM; its ranks were ended with it, 0.4 to 1.6 s after the limit."""
    drawn = Draw(1, 5, "torchrun", "ddp", "limit", "writing", 1.0, 0.0, 10)
    moments.set_kill_wait(cluster, drawn.kill_wait_s)
    assert moments.play(drawn, cluster, tmp_path, whole.__getitem__) in (
        "the time limit, said what it had",
        "saved within KillWait, queued again",
    )


@pytest.mark.parametrize("template", ["torchrun", "srun"])
def test_a_job_whose_processes_die_on_a_living_node_is_queued_again(
    template: str, cluster: Cluster, whole: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    """Under torchrun srun waited without end; under srun the job failed although checkpoints were there."""
    drawn = Draw(1, 7, template, "ddp", "processes", "training", 0.5, 1.0, 10)
    moments.set_kill_wait(cluster, drawn.kill_wait_s)
    assert moments.play(drawn, cluster, tmp_path, whole.__getitem__) == "queued again, each step once"


def test_a_rank_that_stops_in_a_save_is_named_on_the_cluster(
    cluster: Cluster, whole: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    drawn = Draw(1, 4, "srun", "fsdp", "stop", "writing", 0.8, 1.0, 10)
    moments.set_kill_wait(cluster, drawn.kill_wait_s)
    assert moments.play(drawn, cluster, tmp_path, whole.__getitem__).startswith("ended, named the rank")
