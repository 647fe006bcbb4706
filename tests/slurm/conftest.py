"""A Slurm cluster for the tests of this folder, started once and stopped at the end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SCRIPT, Cluster, why_not


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("slurm")
    started = subprocess.run(["bash", str(SCRIPT), "start", str(folder), "2"], stdout=subprocess.DEVNULL, stderr=None)
    try:
        assert started.returncode == 0, "the cluster did not come up, see above"
        yield Cluster(folder)
    finally:
        subprocess.run(["bash", str(SCRIPT), "stop", str(folder)], check=False)
