"""How much host memory this process may use, by its cgroup's limit or the machine's memory, and how much is in use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import psutil

from ..errors import gib
from ..files.cgroups import memory_limits
from .rows import RankRow


@dataclass(frozen=True)
class HostLimit:
    """A limit on host memory."""

    n_bytes: int  # the limit in bytes
    folder: Path | None = None  # the cgroup that sets it; `None`: the machine

    def in_use(self) -> int:
        """Bytes that all processes under this limit hold and the kernel cannot reclaim; file caches do not count.

        Takes 50 µs, or 70 µs for a cgroup. A cgroup that is gone counts as empty.
        """
        if self.folder is None:
            memory = psutil.virtual_memory()
            return int(memory.total - memory.available)
        usage, caches = _COUNTERS[(self.folder / "memory.current").exists()]
        try:
            used = int((self.folder / usage).read_text())
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        except OSError:
            return 0
        # The two files are read one after the other, so the caches may exceed the usage read before.
        return max(0, used - sum(int(stat.get(name, 0)) for name in caches))


# Is it a cgroup of version 2? → the file with its usage, and the counters of memory that the kernel can reclaim.
_COUNTERS = {
    True: ("memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
    False: ("memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def tightest_limit() -> HostLimit:
    """The tightest cgroup limit above this process, or the machine's memory if that is less."""
    machine = HostLimit(int(psutil.virtual_memory().total))
    return min([*starmap(HostLimit, memory_limits()), machine], key=lambda limit: limit.n_bytes)


_LOG = logging.getLogger(__name__)
SHARE = 0.95
"""Share of the host's limit above which the kernel may kill a rank at any moment."""


class HostRisk:
    """Checks the rows of each gather; it does nothing between gathers."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share  # share of the host's limit in use at which it warns
        # called on a rank whose host gets near its limit, with the rank's row; again only after it was below
        self.on_risk: Callable[[RankRow], None] | None = None
        self._near = False
        self._warned_hosts: set[str] = set()

    def look(self, own_row: RankRow, rows: Sequence[RankRow]) -> None:
        """Call on every rank; `rows` are all ranks' on rank 0, which warns once per host."""
        near, self._near = self._near, self._is_near(own_row)
        if self._near and not near and self.on_risk is not None:
            self.on_risk(own_row)
        for row in rows:
            host = row.identity.host
            if host not in self._warned_hosts and self._is_near(row):
                self._warned_hosts.add(host)
                _LOG.warning("%s", describe([neighbour for neighbour in rows if neighbour.identity.host == host]))

    def _is_near(self, row: RankRow) -> bool:
        host = row.host_mem
        return host.in_use is not None and host.in_use >= self.share * host.limit


def used_by(row: RankRow) -> int:
    """Bytes that a rank and its loader processes have in memory; shared pages count for each process."""
    return row.host_mem.rss + (row.host_mem.children_rss or 0)


def describe(rows: Sequence[RankRow]) -> str:
    """One line on the memory of one host, and on the rank that holds most of it."""
    worst = max(rows, key=used_by)
    memory = worst.host_mem
    workers = f", {gib(memory.children_rss)} of it in loader processes" if memory.children_rss else ""
    share = 100 * (memory.in_use or 0) / memory.limit
    return (
        f"host memory is almost used up on {worst.identity.host}: {gib(memory.in_use or 0)} of {gib(memory.limit)} "
        f"({share:.0f} %); among its {len(rows)} rank(s), rank {worst.identity.rank} holds most: {gib(used_by(worst))}"
        + workers
    )
