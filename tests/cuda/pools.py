"""Run parity cases, many in one set of processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.cuda import gpu_ranks
from tests.cuda.parity import Case, pool
from tests.ranks import RankError, run_ranks

RANKS = "tests.cuda.parity_ranks"
AT_ONCE = 40
"""Cases after which ranks are started afresh, so that what one leaves behind cannot hide for ever."""


def reference(root: Path) -> dict[str, Any]:
    """What the CPU's single process gives; see parity_ranks.reference."""
    found: dict[str, Any] = run_ranks(1, f"{RANKS}:reference", timeout=280, init_group=False, root=str(root))[0]
    return found


def run(todo: Sequence[Case], root: Path, **env: str) -> dict[Case, dict[str, Any]]:
    """Results by case; where ranks fail, each case of their processes has the `error`."""
    found: dict[Case, dict[str, Any]] = {}
    for (world, backend), group in groupby(sorted(todo, key=pool), pool):
        cases = list(group)
        for batch in (cases[first : first + AT_ONCE] for first in range(0, len(cases), AT_ONCE)):
            given = {"todo": batch, "root": str(root), "backend": backend}
            try:
                results = gpu_ranks(world, f"{RANKS}:run", timeout=60 + 20 * len(batch), env=env, **given)[0]
            except RankError as error:
                results = [{"error": str(error)}] * len(batch)
            found |= zip(batch, results, strict=True)
    return found
