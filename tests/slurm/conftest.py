"""A Slurm cluster for the tests of this folder, started once and stopped at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import REPO, environment, losses
from tests.slurm.cluster import Cluster, read, running, steady, tiny, why_not
from tests.texts import write_numbers


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A corpus, and the losses of one process on it."""
    folder = tmp_path_factory.mktemp("alone")
    text = write_numbers(folder / "text", 40)
    args = tiny(folder / "run", text, "single")
    process = subprocess.run(
        [sys.executable, "-m", "shardkit.train", *args], cwd=REPO, env=environment(), capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return text, losses(folder / "run")


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of `steady` on 2 nodes × 1 rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = cluster.sbatch("srun", folder / "out", steady(folder / "run"), ranks=1)
    assert cluster.wait(job, folder / "out") == "COMPLETED", read(folder / "out")
    return losses(folder / "run")
