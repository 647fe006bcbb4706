"""Faults at chosen moments, on a real Slurm cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm import moments
from tests.slurm.cluster import KILL_WAIT_S, Cluster
from tests.slurm.moments import Draw

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """Strategy → the losses of an undisturbed run."""
    return {
        strategy: moments.undisturbed(cluster, tmp_path_factory.mktemp(strategy), strategy)
        for strategy in ("ddp", "fsdp")
    }


SAVED = "cancelled, saved and said so"
DRAWS = [
    # Cancelled after a warning of Slurm, it was queued again 4 of 4 times; and where a look fell into the last save.
    (Draw("torchrun", "ddp", "cancel", "warned", 0.3, 3.0, 30), SAVED),
    (Draw("srun", "fsdp", "cancel", "warned", 0.7, 3.0, 30), SAVED),
    (Draw("torchrun", "ddp", "cancel", "look", 0.5, 3.0, 30), SAVED),
    (Draw("srun", "ddp", "cancel", "publishing", 0.5, 3.0, 30), SAVED),
    (Draw("script", "ddp", "cancel", "warned", 0.5, 3.0, 30), SAVED),
    # torchrun's agent ends at its third SIGTERM; its ranks were ended with it, 0.4 to 1.6 s after the limit.
    (
        Draw("torchrun", "ddp", "limit", "writing", 1.0, 0.0, 10),
        "the time limit, said what it had|saved within KillWait, queued again",
    ),
    # Under torchrun srun waited without end; under srun the job failed although checkpoints were there.
    (Draw("torchrun", "ddp", "processes", "training", 0.5, 1.0, 10), "queued again, each step once"),
    (Draw("srun", "ddp", "processes", "training", 0.5, 1.0, 10), "queued again, each step once"),
    # A signal is dropped before the batch script runs, and blocked in every thread of a rank afterwards.
    (Draw("srun", "ddp", "preempt", "writing", 0.5, 3.0, 30), "queued again, each step once"),
    (Draw("srun", "fsdp", "stop", "writing", 0.8, 1.0, 10), "ended, named the rank, .*"),
]
LATER = [
    (Draw("srun", "fsdp", "cancel", "start-up", 0.6, 1.0, 30), "cancelled.*"),
    (Draw("torchrun", "ddp", "cancel", "published", 0.5, 3.0, 30), SAVED),
    (Draw("torchrun", "fsdp", "preempt", "start-up", 0.4, 1.0, 30), "queued again, each step once"),
]


@pytest.mark.parametrize(
    ("drawn", "outcome"),
    [*DRAWS, *(pytest.param(*later, marks=pytest.mark.release) for later in LATER)],
    ids=[drawn.name for drawn, _ in DRAWS + LATER],
)
def test_a_fault_at_its_moment_ends_as_it_may(
    drawn: Draw, outcome: str, cluster: Cluster, whole: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    cluster.set_kill_wait(drawn.kill_wait_s)
    try:
        played = moments.play(drawn, cluster, tmp_path, whole.__getitem__)
    finally:
        cluster.set_kill_wait(KILL_WAIT_S)
    assert re.fullmatch(outcome, played), played
