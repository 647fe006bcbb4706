from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardkit.cli.__main__ import main
from shardkit.errors import ConfigError
from shardkit.files import memory_limits
from shardkit.hardware import calibration
from shardkit.launch import doctor
from shardkit.launch.doctor import Check
from shardkit.launch.ranks import affinity
from shardkit.launch.ranks.env import grow_segments, ranks_per_node, visible_gpus
from tests.commands import python_m
from tests.launch.jobs import environment
from tests.launch.test_affinity import fake_machine
from tests.texts import write_files, write_program


def test_it_says_what_is_there_and_contradicting_variables_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**dict.fromkeys(os.environ, ""), **environment(RANK="1")}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "torch_checks", lambda: [Check("torch", "pass", "2.9")])  # the test below asks it
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--run-dir", str(tmp_path / "runs")])
    said = capsys.readouterr().out
    assert ended.value.code == 1, said
    assert "FAIL  rank variables" in said and "RANK='1' is set, but WORLD_SIZE is not" in said
    for name in ("python", "torch", "compiler", "NUMA", "host memory", "/dev/shm", "run directory"):
        assert any(line[6:].startswith(name) for line in said.splitlines()), name
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"


@pytest.mark.slow
def test_two_ranks_measure_together_and_keep_the_constants(tmp_path: Path) -> None:
    args = ["--json", "--calibrate", "--device", "cpu", "--run-dir", tmp_path / "runs"]
    process = python_m("shardkit.cli", "doctor", *args, ranks=2, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    found = json.loads(process.stdout)
    measured = found["measured"]
    assert measured["world_size"] == 2 and len(measured["matmul_flops"]) == 2
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert all(len(measured[kind]) == 5 and all(speed > 0 for _, speed in measured[kind]) for kind in kinds)
    assert measured["all_to_all_ranks"] == 2 and [*measured["axes"]] == ["cp"]
    assert set(measured["matmul_flops_by_dtype"]) == {"fp32", "bf16"}
    names = ("memory_bytes_per_s", "host_bytes_per_s", "new_page_bytes_per_s", "operator_s", "collective_s")
    figures = [measured[key] for key in names]
    assert min(figures + list(measured["matmul_flops_by_dtype"].values())) > 0
    assert measured["operator_s"] < measured["collective_s"] < 1, "a collective is more than an operator"
    assert measured["context_bytes"] is None and measured["communicator_bytes"] is None, "the CPU has none"
    assert 0 <= measured["late_s"] < 1
    assert {"torch", "torch GPUs", "DeepSpeed ops"} <= {check["name"] for check in found["checks"]}
    (kept,) = json.loads((tmp_path / "cache/shardkit/calibration.json").read_text()).values()
    assert kept == measured
    assert {check["status"] for check in found["checks"]} <= {"pass", "warn", "fail"}
    assert all(check["fix"] for check in found["checks"] if check["status"] != "pass")


@pytest.mark.slow
def test_each_axis_is_measured_in_its_groups(tmp_path: Path) -> None:
    axes = ["--tp", "2", "--cp", "2", "--ep", "2"]
    args = ["--json", "--device", "cpu", "--run-dir", tmp_path / "runs", *axes]
    process = python_m("shardkit.cli", "doctor", *args, ranks=4)
    measured = json.loads(process.stdout)["measured"]
    found = {axis: (figures["collective"], figures["ranks"]) for axis, figures in measured["axes"].items()}
    assert found == {"cp": ("all_to_all", 2), "tp": ("all_reduce", 2), "ep": ("all_to_all", 2)}
    assert all(len(f["bus"]) == 5 and min(speed for _, speed in f["bus"]) > 0 for f in measured["axes"].values())
    assert measured["all_to_all"] == measured["axes"]["cp"]["bus"]


@pytest.mark.parametrize("axis", ["--tp", "--cp", "--ep"])
def test_an_axis_that_does_not_divide_the_ranks_is_refused(tmp_path: Path, axis: str) -> None:
    args = ["--device", "cpu", "--run-dir", tmp_path / "runs", axis, "3"]
    process = python_m("shardkit.cli", "doctor", *args, ranks=2, code=2)
    assert f"parallel.{axis[2:]}=3 does not divide" in process.stderr


def test_slow_ranks_and_wrong_clocks_are_named() -> None:
    constants = {
        "matmul_flops": [1e13, 1e13, 0.5e13, 1e13], "copy_bytes_per_s": [1e10] * 4, "all_reduce": [], "all_gather": [],
        "reduce_scatter": [], "clock_skew_s": 7.5,
        "axes": {"tp": {"collective": "all_reduce", "ranks": 2, "bus": [[2**20, 4e10]]}},
        "matmul_flops_by_dtype": {"bf16": 1e13}, "memory_bytes_per_s": 2e12, "host_bytes_per_s": 1e11,
    }  # fmt: skip
    found = {check.name: check for check in doctor.findings(constants, ["a", "a", "b", "b"])}
    assert found["matmul per rank"].status == "warn" and "slow: rank 2@b" in found["matmul per rank"].found
    assert found["copies per rank"].status == "pass"
    assert found["tp all_reduce 1 MiB"].found == "40 GB/s bus bandwidth in groups of 2 ranks"
    assert found["clocks"].status == "warn" and "chrony" in found["clocks"].fix


def test_constants_of_the_nearest_world_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.find("NVIDIA H100", 8) is None
    for device, size in (("NVIDIA H100", 1), ("NVIDIA H100", 8), ("NVIDIA H100", 64), ("NVIDIA A100", 2)):
        calibration.save({"device": device, "world_size": size})
    nearest = {n: (calibration.find("NVIDIA H100", n) or {})["world_size"] for n in (1, 2, 16, 32, 1024)}
    assert nearest == {1: 1, 2: 8, 16: 8, 32: 64, 1024: 64}
    assert calibration.find("NVIDIA H100 PCIe", 8) is None
    calibration.path().write_text("[")
    with pytest.raises(ConfigError, match=r"calibration.json cannot be read.*\n.*--calibrate again"):
        calibration.find("NVIDIA H100", 8)


def test_a_torch_that_does_not_import_is_a_finding(tmp_path: Path) -> None:
    said = "ImportError: libcudart.so.12: cannot open shared object file"
    broken = write_program(tmp_path / "python", f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (check,) = doctor.torch_checks(broken)
    assert check.status == "fail" and "libcudart.so.12" in check.found and check.fix


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OLDEST", {"torch": (999, 0), "no-such-package-at-all": (1, 0), "pydantic": (2, 0)})
    status = {check.name: check.status for check in doctor.packages()}
    assert status == {"torch version": "fail", "no-such-package-at-all": "fail", "pydantic version": "pass"}


def test_a_full_or_read_only_disk(tmp_path: Path) -> None:
    (full,) = doctor.disk("run directory", tmp_path, n_bytes=2**60)
    assert full.status == "fail" and full.fix
    (gone,) = doctor.disk("run directory", Path("/proc/1/nothing"), n_bytes=0)
    assert gone.status == "fail" and "cannot be written" in gone.found


@pytest.mark.parametrize(("limit", "found"), [("1073741824", [2**30]), ("max", [])])
def test_the_cgroups_memory_limit(limit: str, found: list[int], tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": limit + "\n"})
    assert [n_bytes for n_bytes, _ in memory_limits(tmp_path)] == found


def test_gpus_far_from_the_allowed_cpus_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fake_machine(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: [0, 1, 2, 3])
    (near,) = doctor.numa(root)
    assert near.status == "pass" and near.found == "node 0: CPUs 0-1; node 1: CPUs 2-3; GPUs on nodes 1, 0, ?"
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: [0, 1])
    (far,) = doctor.numa(root)
    assert far.status == "warn" and far.found.endswith("none of the CPUs beside GPU 0") and far.fix


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, tmp_path) == 2
    for name in ("SHARDKIT_REHEARSAL", "SHARDKIT_COMPUTED"):
        assert visible_gpus({name: "records", "EMUCUDA_DEVICES": "8"}, tmp_path) == 8
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    counts = {"1,0": 2, "0,-1,1": 1, "7": 0, "7,0": 0, "0,7,1": 1, "GPU-a,1": 2, "0,,1": 1, " 1 ": 1}
    for listed, count in counts.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, tmp_path) == count, "up to the first that is no device"
    for found, kept in (({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native")):
        environ: dict[str, str] = dict(found)
        grow_segments(environ, tmp_path)
        assert environ["PYTORCH_ALLOC_CONF"] == kept
    for untouched in ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, {"CUDA_VISIBLE_DEVICES": ""}):
        environ = dict(untouched)
        grow_segments(environ, tmp_path)
        assert environ == untouched
    assert ranks_per_node("3", "auto") == 3
