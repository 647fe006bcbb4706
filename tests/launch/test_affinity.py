from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.errors import LaunchError
from shardkit.launch.local.launcher import added_environment
from shardkit.launch.ranks import affinity
from shardkit.launch.ranks.affinity import cgroup_cpu_quota, default_omp_threads
from shardkit.launch.ranks.env import RankEnv, flight_recorder, pci_addresses
from shardkit.launch.spec import JobSpec
from tests.launch.jobs import REPO, environment
from tests.texts import write_files

TWO_SOCKETS = {cpu: (cpu % 16 // 8, cpu % 16 // 8, cpu % 8) for cpu in range(32)}
"""32 CPUs: two sockets of 8 cores, CPU 16 + n is the other thread of CPU n's core."""


def test_ranks_get_neighbours_and_the_threads_of_a_core_stay_together() -> None:
    cpus_by_rank = affinity.divide(range(32), 4, TWO_SOCKETS)
    assert [affinity.render(cpus) for cpus in cpus_by_rank] == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]


def test_gpu_ranks_get_cpus_beside_their_gpu() -> None:
    cpus_by_rank = affinity.divide(range(32), 4, TWO_SOCKETS, beside=[1, 1, 0, 0])
    assert [affinity.render(cpus) for cpus in cpus_by_rank] == ["8-11,24-27", "12-15,28-31", "0-3,16-19", "4-7,20-23"]
    one_each = affinity.divide(range(32), 2, TWO_SOCKETS, beside=[1, 0])
    assert [affinity.render(cpus) for cpus in one_each] == ["8-15,24-31", "0-7,16-23"]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("allowed", [range(32), range(3, 20), [1, 2, 9, 10, 25, 26, 30, 31]])
def test_shares_are_equal_allowed_and_nobody_elses(n_ranks: int, allowed: list[int]) -> None:
    cpus_by_rank = affinity.divide(allowed, n_ranks, TWO_SOCKETS, beside=[rank % 2 for rank in range(n_ranks)])
    everyone = [cpu for cpus in cpus_by_rank for cpu in cpus]
    assert len(everyone) == len(set(everyone)) and set(everyone) <= set(allowed)
    assert min(map(len, affinity.divide(allowed, n_ranks, TWO_SOCKETS))) == len(allowed) // n_ranks


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: list(range(16)))
    monkeypatch.setattr(affinity, "topology", lambda root: {})


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("n_ranks", "environ", "bound"),
    [
        (2, {}, True),
        (8, {}, True),
        (1, {}, False),  # a single rank may use all
        (9, {}, False),  # less than two CPUs each
        (4, {"OMP_NUM_THREADS": "4"}, True),
        (4, {"OMP_NUM_THREADS": "5"}, False),  # its threads would not fit
        (4, {"OMP_PROC_BIND": "close"}, False),
        (4, {"OMP_PROC_BIND": "false"}, True),
        (4, {"OMP_PLACES": "cores"}, False),
        (4, {"GOMP_CPU_AFFINITY": "0-3"}, False),
        (4, {"KMP_AFFINITY": "granularity=fine"}, False),
    ],
)
def test_ranks_are_left_alone_where_the_user_binds_or_cpus_are_few(
    n_ranks: int, environ: dict[str, str], bound: bool
) -> None:
    assert bool(affinity.shares(n_ranks, False, environ)) is bound


def fake_machine(root: Path) -> Path:
    """Two nodes of two cores; a GPU on each, the first one on node 1, and one whose node the firmware keeps quiet."""
    for node, cpulist in (("node0", "0-1\n"), ("node1", "2-3\n")):
        write_files(root / "sys/devices/system/node" / node, {"cpulist": cpulist})
    for address, node_of in (("0000:07:00.0", "1"), ("0000:8a:00.0", "0"), ("0000:c0:00.0", "-1")):
        write_files(root / "proc/driver/nvidia/gpus" / address, {"information": f"GPU UUID: \t GPU-{address[5:7]}\n"})
        write_files(root / "sys/bus/pci/devices" / address, {"numa_node": node_of + "\n"})
    return root


def test_gpus_and_nodes_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fake_machine(tmp_path)
    first, second, third = pci_addresses({}, root)
    assert pci_addresses({"CUDA_VISIBLE_DEVICES": "1,0"}, root) == [second, first]
    assert pci_addresses({"CUDA_VISIBLE_DEVICES": "GPU-8a"}, root) == [second]
    assert pci_addresses({"CUDA_VISIBLE_DEVICES": ""}, root) == []
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: [0, 1, 2, 3])
    assert affinity.shares(2, True, {}, root) == [[2, 3], [0, 1]]
    assert affinity.shares(2, False, {}, root) == [[0, 1], [2, 3]]
    assert affinity.shares(2, True, {"CUDA_VISIBLE_DEVICES": "2,0"}, root) == [[0, 1], [2, 3]], third


def test_lists_of_cpus() -> None:
    assert affinity.parse("0-2,5") == [0, 1, 2, 5] and affinity.render([5, 0, 1, 2]) == "0-2,5"
    for wrong in ("", "a", "3-1", "1,,2", "-1"):
        with pytest.raises(LaunchError, match="list of CPUs"):
            affinity.parse(wrong)


def test_ranks_get_as_many_threads_as_cpus() -> None:
    spec = JobSpec(config=None, run_dir="r", nproc_per_node=2)
    added = added_environment(spec, {}, [[0, 1], [2, 3]])
    assert added["SHARDKIT_CPUS"] == "0-1:2-3" and int(added["OMP_NUM_THREADS"]) <= 2
    assert "SHARDKIT_CPUS" not in added_environment(spec, {})


def rank(local_rank: int, source: str = "torchelastic") -> RankEnv:
    return RankEnv(local_rank, 2, local_rank, 2, 0, 1, source)


@pytest.mark.usefixtures("cpus")
def test_a_rank_moves_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: moves.append(list(cpus)), raising=False)
    affinity.bind(rank(1), {"SHARDKIT_CPUS": "0-1:2-3"})
    affinity.bind(rank(1), {})  # torchrun by hand
    affinity.bind(rank(1, "slurm"), {"SLURM_CPU_BIND_TYPE": "mask_cpu:"})  # Slurm has done it
    affinity.bind(rank(1, "slurm"), {"SLURM_CPUS_PER_TASK": "16"})  # by cgroup
    affinity.bind(rank(1, "slurm"), {"SHARDKIT_CPUS": "off"})
    assert moves == [[2, 3]]
    message = affinity.bind(rank(1, "slurm"), {"SLURM_CPU_BIND_TYPE": "none"})
    assert moves[1] == list(range(8, 16)) and message is not None and "0-7 8-15" in message
    with pytest.raises(LaunchError, match="no entry for local rank 1"):
        affinity.bind(rank(1), {"SHARDKIT_CPUS": "0-1"})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_threads_inherit_the_share_and_a_cpu_that_is_not_there_is_an_error() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = (
        "import os, sys; from shardkit.launch.ranks import affinity; from shardkit.launch.ranks.env import detect\n"
        "from shardkit.errors import ShardkitError, report\n"
        "try: affinity.bind(detect())\n"
        "except ShardkitError as error: sys.exit(report(error))\n"
        "import torch; torch.ones(512, 512) @ torch.ones(512, 512)\n"
        "print({tuple(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')})"
    )

    def started(cpus: str) -> subprocess.CompletedProcess[str]:
        env = environment(SHARDKIT_CPUS=cpus)
        return subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True)

    assert started(str(cpu)).stdout == f"{{({cpu},)}}\n"
    wrong = started("9999")
    assert wrong.returncode == 2 and "may not run on CPUs 9999, only on" in wrong.stderr


def test_nccls_flight_recorder_is_on_unless_the_user_says_otherwise() -> None:
    variables = flight_recorder("/runs/a", {})
    assert variables == {
        "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/a/logs/nccl_rank_",
    }  # fmt: skip
    users_choice = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    assert flight_recorder("/runs/a", users_choice) == {}, "older names of the same settings count too"


SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
}  # fmt: skip


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
def test_default_threads(
    local_world_size: int, environ: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affinity, "available_cores", lambda: 16)
    assert default_omp_threads(local_world_size, environ) == expected


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", ",2"])
def test_refuses_what_is_no_number_of_threads(value: str) -> None:
    with pytest.raises(LaunchError, match="OMP_NUM_THREADS"):
        default_omp_threads(2, {"OMP_NUM_THREADS": value})


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
    write_files(tmp_path, {"proc/self/cgroup": membership})
    write_files(tmp_path / "sys/fs/cgroup", limits)
    assert cgroup_cpu_quota(tmp_path) == expected


def test_cores_are_those_of_affinity_and_quota_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "n_cpus", lambda: 2)
    for quota, cores in ((None, 2), (1.5, 1), (0.5, 1)):
        monkeypatch.setattr(affinity, "cgroup_cpu_quota", lambda found=quota: found)
        assert affinity.available_cores() == cores
