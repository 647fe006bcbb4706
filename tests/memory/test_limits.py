"""How much of the host's memory is in use, by the group of processes that the limit holds for."""

from __future__ import annotations

from pathlib import Path

from shardkit.memory.probe import HostLimit, tightest_limit

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
