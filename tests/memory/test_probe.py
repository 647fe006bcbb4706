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


V2 = "cgroup2 /cg cgroup2 rw,nosuid 0 0\n"
V1 = "cgroup /cg/cpu cgroup rw,cpu 0 0\ncgroup /cg/memory cgroup rw,memory 0 0\n"
LIMITS: dict[str, tuple[str, str, dict[str, str], list[tuple[int, str]]]] = {
    "v2, its ancestors'": ("0::/slurm/job/step\n", V2,
                          {"slurm/job/step/memory.max": "max\n", "slurm/job/memory.max": f"{8 << 30}\n",
                           "slurm/memory.max": f"{16 << 30}\n"}, [(8 << 30, "slurm/job"), (16 << 30, "slurm")]),
    "v1, in a container": ("9:cpu:/docker/a\n4:memory:/docker/a\n0::/\n", V1,
                           {"memory/memory.limit_in_bytes": f"{4 << 30}\n"}, [(4 << 30, "memory")]),
    "v2, none": ("0::/\n", V2, {"memory.max": "max\n"}, []),
    "v1, none": ("4:memory:/\n", V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, []),
    "not Linux": ("", "", {}, []),
}  # fmt: skip
"""Case → /proc/self/cgroup, the mounts, the files below /cg, and the limits with their folders."""


@pytest.mark.parametrize("case", LIMITS)
def test_limits_are_those_of_the_cgroup_and_its_ancestors(case: str, tmp_path: Path) -> None:
    memberships, mounts, files, limits = LIMITS[case]
    if mounts:
        write_files(tmp_path / "proc/self", {"cgroup": memberships, "mounts": mounts})
    write_files(tmp_path / "cg", files)
    assert memory_limits(tmp_path) == [(n_bytes, tmp_path / "cg" / folder) for n_bytes, folder in limits]


GIB = 2**30


@pytest.mark.parametrize(
    ("current", "stat", "caches"),
    [
        ("memory.current", f"anon {GIB}\nactive_file {GIB}\ninactive_file 7\nslab_reclaimable 9\n", GIB + 16),
        ("memory.usage_in_bytes", f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file 7\n", GIB + 7),
        ("gone", "", 6 * GIB),
    ],
)
def test_file_caches_do_not_count_as_used(current: str, stat: str, caches: int, tmp_path: Path) -> None:
    """Of cgroup v2; of v1 with its descendants; of a cgroup that is gone."""
    write_files(tmp_path, {current: f"{6 * GIB}\n", "memory.stat": stat})
    assert HostLimit(8 * GIB, tmp_path).in_use() == 6 * GIB - caches


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
