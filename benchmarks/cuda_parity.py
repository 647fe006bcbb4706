"""Losses and weights of trainings on CUDA (emulated, two to four ranks) against the CPU's single process.

`make test-cuda` makes the environment; then `EMUCUDA=1 EMUCUDA_DEVICES=4 .venv-cuda/bin/python -m
benchmarks.cuda_parity`. Hours on a small machine: finished cases are kept in --folder, and another call continues.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cuda import parity, pools, verdict
from tests.cuda.parity import Case

from .common import REPO, RESULTS, environment, publish
from .options import COLLECT, ONLY, Option, chosen, options, refuse

WRITTEN = RESULTS / "cuda_parity.json"


def summary(results: Mapping[Case, dict[str, Any]], reference: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`engine mode` → number of cases, the largest differences, and the disagreements."""
    out: dict[str, dict[str, Any]] = {}
    for case, result in results.items():
        row = out.setdefault(f"{case.engine} {case.mode}", {"cases": 0, "loss": 0.0, "weights": 0.0, "wrong": {}})
        row["cases"] += 1
        wrong = list(verdict.problems(case, result, reference))
        if wrong:
            row["wrong"][str(case)] = wrong
        if "error" not in result:
            row["loss"] = max(row["loss"], verdict.loss_difference(case, result, reference))
            row["weights"] = max(row["weights"], result["weights"])
    return out


SETS: dict[str, tuple[Callable[[], list[Case]], dict[str, str]]] = {
    "pairs": (parity.covering, {}),
    "full": (parity.full, {}),
    "late": (lambda: parity.PATHS + parity.HALF, parity.LATE),
}
"""Cases, and the environment that they run in."""


def collected(folder: Path) -> dict[str, Any]:
    """The sets that have cases in the folder; the others as they were last written, with their commit."""
    reference = json.loads((folder / "wanted.json").read_text())
    sets = json.loads(WRITTEN.read_text())["sets"] if WRITTEN.exists() else {}
    for name, (cases, _) in SETS.items():
        listed = cases()
        results = pools.recorded(folder / f"{name}.jsonl")
        if results:
            rows = summary({case: results[case] for case in listed if case in results}, reference)
            sets[name] = {"asked": len(listed), "commit": environment()["commit"], "rows": rows}
    return {
        "device": "emulated",
        "steps": len(next(iter(reference["losses"].values()))),
        "limits": {"fp32": [verdict.EXACT, verdict.EXACT_WEIGHTS], **verdict.TIMES},
        "spread": reference["spread"],
        "late": parity.LATE,
        "sets": {name: sets[name] for name in SETS if name in sets},
    }


def main() -> None:
    args = options(
        __doc__,
        folder=Option(REPO / "build" / "cuda_parity", "where cases are recorded"),
        sets=SETS,
        only=ONLY,
        collect=COLLECT,
    )
    sets = {name: {str(case): case for case in parity.ordered(SETS[name][0]())} for name in args.sets}
    names = set(chosen([case for cases in sets.values() for case in cases], args.only))
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not args.collect:
        if os.environ.get("EMUCUDA", "0") in ("", "0"):
            refuse("set EMUCUDA=1 and EMUCUDA_DEVICES=4")
        if not (folder / "wanted.json").exists():
            (folder / "wanted.json").write_text(json.dumps(pools.reference(folder)))
        for name, cases in sets.items():
            todo = [case for case_name, case in cases.items() if case_name in names]
            pools.run(todo, folder, folder / f"{name}.jsonl", **SETS[name][1])
    publish("cuda_parity", collected(folder))


if __name__ == "__main__":
    main()
