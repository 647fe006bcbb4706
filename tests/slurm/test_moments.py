"""Faults at drawn moments: a few draws, and a range of seeds in the release tier."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.slurm import moments
from tests.slurm.cluster import KILL_WAIT_S, Cluster
from tests.slurm.moments import Draw

pytestmark = [pytest.mark.slurm, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """Strategy → the losses of an undisturbed run."""
    return {
        strategy: moments.undisturbed(cluster, tmp_path_factory.mktemp(strategy), strategy)
        for strategy in moments.STRATEGIES
    }


SAVED = "cancelled, saved and said so"
DRAWS = [
    # Cancelled after a warning of Slurm, it was queued again 4 of 4 times; and where a look fell into the last save.
    (Draw(1, 0, "torchrun", "ddp", "cancel", "warned", 0.3, 3.0, 30), SAVED),
    (Draw(1, 1, "srun", "fsdp", "cancel", "warned", 0.7, 3.0, 30), SAVED),
    (Draw(1, 2, "torchrun", "ddp", "cancel", "look", 0.5, 3.0, 30), SAVED),
    (Draw(1, 3, "srun", "ddp", "cancel", "publishing", 0.5, 3.0, 30), SAVED),
    (Draw(1, 4, "script", "ddp", "cancel", "warned", 0.5, 3.0, 30), SAVED),
    # torchrun's agent ends at its third SIGTERM; its ranks were ended with it, 0.4 to 1.6 s after the limit.
    (
        Draw(1, 5, "torchrun", "ddp", "limit", "writing", 1.0, 0.0, 10),
        "the time limit, said what it had|saved within KillWait, queued again",
    ),
    # Under torchrun srun waited without end; under srun the job failed although checkpoints were there.
    (Draw(1, 7, "torchrun", "ddp", "processes", "training", 0.5, 1.0, 10), "queued again, each step once"),
    (Draw(1, 7, "srun", "ddp", "processes", "training", 0.5, 1.0, 10), "queued again, each step once"),
    # A signal is dropped before the batch script runs, and blocked in every thread of a rank afterwards.
    (Draw(1, 8, "srun", "ddp", "preempt", "writing", 0.5, 3.0, 30), "queued again, each step once"),
    (Draw(1, 4, "srun", "fsdp", "stop", "writing", 0.8, 1.0, 10), "ended, named the rank, .*"),
]


@pytest.mark.parametrize(("drawn", "outcome"), DRAWS, ids=[drawn.name for drawn, _ in DRAWS])
def test_a_fault_at_its_moment_ends_as_it_may(
    drawn: Draw, outcome: str, cluster: Cluster, whole: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    cluster.set_kill_wait(drawn.kill_wait_s)
    try:
        played = moments.play(drawn, cluster, tmp_path, whole.__getitem__)
    finally:
        cluster.set_kill_wait(KILL_WAIT_S)
    assert re.fullmatch(outcome, played), played


FIRST, _, LAST = os.environ.get("SHARDKIT_MOMENTS", "0:10").partition(":")
"""Numbers of the draws; ten draws have each fault once."""


@pytest.mark.release
@pytest.mark.parametrize("number", range(int(FIRST), int(LAST)))
def test_a_drawn_fault_ends_as_it_may(
    number: int, cluster: Cluster, whole: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    drawn = moments.draw(1, number)
    cluster.set_kill_wait(drawn.kill_wait_s)
    try:
        moments.play(drawn, cluster, tmp_path, whole.__getitem__)  # an outcome that is not allowed raises
    finally:
        cluster.set_kill_wait(KILL_WAIT_S)
