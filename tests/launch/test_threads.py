from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.errors import LaunchError
from shardkit.launch.ranks import affinity
from shardkit.launch.ranks.affinity import cgroup_cpu_quota, default_omp_threads
from tests.texts import write_files

SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
}  # fmt: skip


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "available_cores", lambda: 16)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("local_world_size", "environ", "expected"),
    [
        (1, {}, 16),
        (4, {}, 4),
        (5, {}, 3),
        (64, {}, 1),
        (4, {"OMP_NUM_THREADS": "7"}, 7),
        (4, {"OMP_NUM_THREADS": "6,2"}, 6),
        (4, {"OMP_NUM_THREADS": ""}, 4),
        (4, {**SRUN, "SLURM_CPUS_PER_TASK": "8"}, 8),
        (4, {**SRUN, "SLURM_CPUS_PER_TASK": "99"}, 16),
        (4, {"SLURM_CPUS_PER_TASK": "8"}, 4),  # in the batch script: shared by the ranks that it starts
    ],
)
def test_default_threads(local_world_size: int, environ: dict[str, str], expected: int) -> None:
    assert default_omp_threads(local_world_size, environ) == expected


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", ",2"])
def test_refuses_what_is_no_number_of_threads(value: str) -> None:
    with pytest.raises(LaunchError, match="OMP_NUM_THREADS"):
        default_omp_threads(2, {"OMP_NUM_THREADS": value})


def cgroup(root: Path, membership: str, limits: dict[str, str]) -> Path:
    write_files(root, {"proc/self/cgroup": membership})
    write_files(root / "sys/fs/cgroup", limits)
    return root


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/job/step\n", {"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "max 100000\n"}, 4.0),
        ("0::/job/step\n", {"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "100000 100000\n"}, 1.0),
        ("0::/job/step\n", {"job/cpu.max": "150000 100000\n", "job/step/cpu.max": "400000 100000\n"}, 1.5),
        ("0::/of/the/host\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/../../other\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("3:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "200000\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, 2.0),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("4:memory:/\n", {"memory/cpu.max": "100000 100000\n"}, None),
        ("", {}, None),
    ],
)
def test_cgroup_quota(tmp_path: Path, membership: str, limits: dict[str, str], expected: float | None) -> None:
    assert cgroup_cpu_quota(cgroup(tmp_path, membership, limits)) == expected


def test_cores_are_those_of_affinity_and_quota_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "n_cpus", lambda: 2)
    for quota, cores in ((None, 2), (1.5, 1), (0.5, 1)):
        monkeypatch.setattr(affinity, "cgroup_cpu_quota", lambda found=quota: found)
        assert affinity.available_cores() == cores
