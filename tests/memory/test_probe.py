"""Counters follow what the process really does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.files import memory_limits
from shardkit.memory.probe import HostProbe
from tests.texts import write_files

MIB = 2**20


def touch(n_bytes: int) -> bytearray:
    """Memory that is really resident, freed to the system when dropped (large blocks are mapped)."""
    return bytearray(b"\x01") * n_bytes


def test_peak_rss_covers_only_the_time_since_the_reset() -> None:
    probe = HostProbe()
    if not probe.resettable:
        pytest.skip("needs a writable /proc/self/clear_refs")
    before = probe.read().rss
    block = touch(128 * MIB)
    assert probe.read().peak_rss >= before + 120 * MIB
    del block
    assert probe.read().peak_rss >= before + 120 * MIB
    probe.reset_peak()
    assert probe.read().peak_rss < before + 60 * MIB


def test_without_reset_a_growing_peak_is_exact_and_an_old_one_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = HostProbe()
    monkeypatch.setattr(probe, "_clear_refs", None)
    monkeypatch.setattr(probe, "resettable", False)
    probe.reset_peak()
    before = probe.read().rss
    block = touch(512 * MIB)
    del block
    grown = probe.read().peak_rss
    assert grown >= before + 500 * MIB
    probe.reset_peak()
    assert probe.read().peak_rss < grown - 400 * MIB


def test_childrens_memory_belongs_to_the_rank() -> None:
    probe = HostProbe()
    before = probe.children_rss()
    hold = "import sys; block = bytearray(b'x') * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    nest = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"  # a grandchild
    with subprocess.Popen([sys.executable, "-c", nest], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        assert probe.children_rss() - before >= 64 * MIB
        child.stdin.close()


def test_cgroup_v2_limit_is_the_tightest_ancestors(tmp_path: Path) -> None:
    mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
    write_files(tmp_path / "proc/self", {"cgroup": "0::/slurm/job1/step0\n", "mounts": mounts})
    limits = {"job1/step0/memory.max": "max\n", "job1/memory.max": "8589934592\n", "memory.max": "17179869184\n"}
    write_files(tmp_path / "sys/fs/cgroup/slurm", limits)
    assert min(memory_limits(tmp_path)) == (8 * 2**30, tmp_path / "sys/fs/cgroup/slurm/job1")


def test_cgroup_v1_limit_beside_other_controllers(tmp_path: Path) -> None:
    memberships = "9:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/\n"
    mounts = "cgroup /cg/cpu cgroup rw,cpu 0 0\ncgroup /cg/memory cgroup rw,memory 0 0\n"
    write_files(tmp_path / "proc/self", {"cgroup": memberships, "mounts": mounts})
    write_files(tmp_path / "cg/memory", {"memory.limit_in_bytes": "4294967296\n"})  # as in a container: only the root
    assert memory_limits(tmp_path) == [(4 * 2**30, tmp_path / "cg/memory")]


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_no_cgroup_limit(tmp_path: Path, text: str) -> None:
    kind, file = ("cgroup2", "memory.max") if text == "max\n" else ("cgroup", "memory.limit_in_bytes")
    write_files(tmp_path / "proc/self", {"cgroup": "0::/\n4:memory:/\n", "mounts": f"x /cg {kind} rw,memory 0 0\n"})
    write_files(tmp_path / "cg", {file: text})
    assert memory_limits(tmp_path) == memory_limits(tmp_path / "not-linux") == []
