"""Run parity cases, many in one set of processes, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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


def recorded(record: Path) -> dict[Case, dict[str, Any]]:
    lines = record.read_text().splitlines() if record.exists() else []
    found = [json.loads(line) for line in lines]
    return {Case(**result["case"]): result for result in found}


def run(todo: Sequence[Case], root: Path, record: Path, **env: str) -> dict[Case, dict[str, Any]]:
    """Results by case; those that `record` has already are not run again.

    A case that fails is recorded with its `error`, and the ones after it go on in new processes.
    """
    left = [case for case in todo if case not in recorded(record)]
    for (world, backend), batch in _batches(left):
        while batch:
            try:
                gpu_ranks(
                    world, f"{RANKS}:run", timeout=60 + 20 * len(batch), env=env, todo=batch, root=str(root),
                    backend=backend, record=str(record),
                )  # fmt: skip
            except RankError as error:
                _note_failure(next(case for case in batch if case not in recorded(record)), str(error), record)
            done = recorded(record)
            batch = [case for case in batch if case not in done]
    found = recorded(record)
    return {case: found[case] for case in todo}


def _batches(cases: Sequence[Case]) -> Iterator[tuple[tuple[int, str], list[Case]]]:
    for key, group in groupby(sorted(cases, key=pool), pool):
        batch = list(group)
        for first in range(0, len(batch), AT_ONCE):
            yield key, batch[first : first + AT_ONCE]


def _note_failure(case: Case, error: str, record: Path) -> None:
    with record.open("a") as file:
        file.write(json.dumps({"case": asdict(case), "error": error}) + "\n")
