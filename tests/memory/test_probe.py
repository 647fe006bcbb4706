"""Counters follow what the process really does; how much of a host's memory is in use and may be."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.files import memory_limits
from shardkit.memory import MemoryLedger
from shardkit.memory.probe import HostLimit, HostProbe, HostRisk, tightest_limit
from shardkit.memory.rows import HostMemory, Identity, RankRow
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


GIB = 2**30


def test_file_caches_do_not_count_as_used(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text(f"{6 * GIB}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon {GIB}\nactive_file {GIB}\ninactive_file {GIB}\nslab_reclaimable 4096\n"
    )
    assert HostLimit(8 * GIB, tmp_path).in_use() == 4 * GIB - 4096


def test_cgroup_v1_counts_its_descendants(tmp_path: Path) -> None:
    (tmp_path / "memory.usage_in_bytes").write_text(f"{6 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {2 * GIB}\n")
    assert HostLimit(8 * GIB, tmp_path).in_use() == 3 * GIB


def test_a_cgroup_that_is_gone_is_empty(tmp_path: Path) -> None:
    assert HostLimit(GIB, tmp_path / "gone").in_use() == 0


def test_this_process_is_within_its_limit() -> None:
    limit = tightest_limit()
    assert 0 < limit.in_use() < limit.n_bytes


def row(rank: int, host: str, rss: int, in_use: int | None, workers: int | None = None) -> RankRow:
    memory = HostMemory(rss * GIB, rss * GIB, None, workers and workers * GIB, 64 * GIB, 0, in_use and in_use * GIB)
    return RankRow(Identity(rank, host, rank, "cpu"), None, None, None, memory, None, None, {}, None, None, 0.0)


def test_rank_0_names_the_host_and_its_largest_rank_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(0, "a", 40, 41), row(1, "b", 20, 62), row(2, "b", 10, 62, workers=30)]
    risk = HostRisk()
    with caplog.at_level(logging.WARNING):
        risk.look(rows[0], rows)
        risk.look(rows[0], rows)
    assert caplog.messages == [
        "host memory is almost used up on b: 62.00 GiB of 64.00 GiB (97 %); among its 2 rank(s), rank 2 holds most: "
        "40.00 GiB, 30.00 GiB of it in loader processes"
    ]


def test_each_rank_near_its_limit_leaves_word_once_per_crossing() -> None:
    risk, written = HostRisk(0.9), list[int]()
    risk.on_risk = lambda found: written.append(found.host_mem.in_use or 0)
    for in_use in (50, 58, 60, 50, 61, None):
        risk.look(row(3, "a", 1, in_use), [])
    assert written == [58 * GIB, 61 * GIB]


def test_a_ledger_looks_at_each_gather_and_only_then() -> None:
    ledger, seen = MemoryLedger("cpu", host_warn=1e-6), list[RankRow]()
    ledger.risk.on_risk = seen.append
    with ledger.phase("forward"):
        assert not seen
    ledger.end_step(1, 0.1)
    ledger.gather(1)
    assert len(seen) == 1 and seen[0].host_mem.in_use is not None and seen[0].host_mem.in_use > 0
