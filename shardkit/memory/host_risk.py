"""Notices that a host is about to run out of memory, while there is still somebody who can say so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from .rows import RankRow
from .units import gib

_LOG = logging.getLogger(__name__)
SHARE = 0.95
"""Of the host's limit: from here on the kernel may kill a rank at any moment."""


class HostRisk:
    """Looks at the rows of each gather; nothing between gathers.

    Attributes:
        share: of the host's limit in use from which it speaks.
        on_risk: called on a rank whose host comes near its limit, with the rank's row; again only after it was below.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self.on_risk: Callable[[RankRow], None] | None = None
        self._near = False
        self._told: set[str] = set()

    def look(self, own: RankRow, rows: Sequence[RankRow]) -> None:
        """Call on every rank; `rows` are all ranks' on rank 0, which warns once per host."""
        near, self._near = self._near, self._is_near(own)
        if self._near and not near and self.on_risk is not None:
            self.on_risk(own)
        for row in rows:
            host = row.identity.host
            if host not in self._told and self._is_near(row):
                self._told.add(host)
                _LOG.warning("%s", describe([other for other in rows if other.identity.host == host]))

    def _is_near(self, row: RankRow) -> bool:
        host = row.host_mem
        return host.in_use is not None and host.in_use >= self.share * host.limit


def held(row: RankRow) -> int:
    """What a rank and its loader processes have in memory; pages that they share count for each."""
    return row.host_mem.rss + (row.host_mem.children_rss or 0)


def describe(rows: Sequence[RankRow]) -> str:
    """One line on the ranks of one host, which rank holds most of its memory, and how much is left."""
    worst = max(rows, key=held)
    memory = worst.host_mem
    workers = f", {gib(memory.children_rss)} of it in loader processes" if memory.children_rss else ""
    share = 100 * (memory.in_use or 0) / memory.limit
    return (
        f"host memory is almost used up on {worst.identity.host}: {gib(memory.in_use or 0)} of {gib(memory.limit)} "
        f"({share:.0f} %); of {len(rows)} rank(s) there rank {worst.identity.rank} holds most: {gib(held(worst))}"
        + workers
    )
