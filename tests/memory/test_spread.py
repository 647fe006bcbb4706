"""All ranks in a few numbers, overall and per node."""

from __future__ import annotations

from pathlib import Path

import shardkit.memory
from shardkit.memory.rows import Spread, summary
from shardkit.memory.table import render_table
from tests.memory.samples import MIB, cpu_row, gpu_row

GIB = 2**30


def test_each_node_has_its_own_spread_and_worst_rank() -> None:
    rows = [gpu_row(0, 2 * GIB, "a"), gpu_row(1, 4 * GIB, "a"), gpu_row(2, 6 * GIB, "b"), gpu_row(3, 6 * GIB, "b")]
    found = summary(rows)
    assert found.spreads["peak_allocated"] == Spread(6 * GIB, 2 * GIB, 4.5 * GIB, 6 / 4.5, "2@b")
    assert list(found.nodes) == ["a", "b"]
    assert found.nodes["a"]["peak_allocated"] == Spread(4 * GIB, 2 * GIB, 3 * GIB, 4 / 3, "1@a")
    assert found.nodes["b"]["peak_allocated"].skew == 1.0
    assert found.peak == ("peak_allocated", found.spreads["peak_allocated"])


def test_on_the_cpu_ranks_are_compared_by_rss() -> None:
    found = summary([cpu_row(0, 300 * MIB), cpu_row(1, 500 * MIB)])
    assert found.peak is not None
    assert (found.peak[0], found.peak[1].worst) == ("peak_rss", "1@node1")
    assert summary([]).peak is None


def test_the_table_has_a_line_per_node_the_worst_first() -> None:
    rows = [gpu_row(0, 2 * GIB, "a"), gpu_row(1, 4 * GIB, "a"), gpu_row(2, 6 * GIB, "b")]
    nodes = [line for line in render_table(rows).splitlines() if line.startswith("node ")]
    assert [line.split()[1] for line in nodes] == ["b:", "a:"]
    assert "max 4.00 GiB (rank 1@a), min 2.00 GiB, max / mean 1.33" in nodes[1]
    assert not any(line.startswith("node ") for line in render_table(rows[:2]).splitlines())


def test_of_many_nodes_only_the_worst_have_a_line() -> None:
    rows = [gpu_row(rank, (1 + rank) * GIB, f"host{rank}") for rank in range(20)]
    lines = render_table(rows).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("node ")] == [f"host{n}:" for n in range(19, 11, -1)]
    assert "(12 more nodes)" in lines


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """`shardkit.memory.summary(rows)`, as docs/memory.md has it, whatever was imported before."""
    folder = Path(shardkit.memory.__file__).parent
    assert [name for name in shardkit.memory.__all__ if (folder / f"{name}.py").exists()] == []
    assert shardkit.memory.summary is summary
