"""How much of a host's memory is in use and may be, and a host that is almost full."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shardkit.memory import MemoryLedger
from shardkit.memory.probe import HostLimit, HostRisk, tightest_limit
from shardkit.memory.rows import HostMemory, Identity, RankRow

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
