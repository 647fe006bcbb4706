"""Runs that are ended anywhere: what is lost, and whether what they said is true.

`python -m benchmarks.crashes` ends small training runs at seeded points, goes on with each, and compares. `--forked`:
processes forked from one that has loaded torch, killed before, in the middle of, or after a change on disk. `--real`:
two ranks under torchrun or on a Slurm cluster of emulated nodes (needs root), with kills, signals, full disks and
second writers. Every word of success ("saved", "queued again", exit code 0) is compared with what is on disk, and the
run that goes on must have each step once, with the losses of a run that nothing disturbed.

Cases that are done are kept in build/crashes.jsonl: started again with the same seed it goes on.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .common import REPO, add_line, publish, read_lines
from .crashes_forked import Scenario, forked_case, scenarios
from .crashes_real import Real, a_cluster, real_case
from .options import LIMIT, Option, options

PROGRESS = REPO / "build" / "crashes.jsonl"


def known(seed: int) -> dict[tuple[bool, int], dict[str, Any]]:
    """Cases of this seed that are done."""
    return {(bool(case.get("real")), case["case"]): case for case in read_lines(PROGRESS) if case["seed"] == seed}


def missing(seed: int, count: int, is_real: bool) -> list[int]:
    done = known(seed)
    return [number for number in range(count) if (is_real, number) not in done]


def keep(case: dict[str, Any], work: Path) -> None:
    if "problem" in case:
        case["problem"] = case["problem"].replace(str(work), "WORK")
        print(f"case {case['case']}, {case['scenario']}: {case['problem']}", flush=True)
    add_line(PROGRESS, case)


def table(cases: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Scenario → its cases, and how many of them are a problem."""
    counts: dict[str, dict[str, int]] = {}
    for case in sorted(cases, key=lambda case: str(case["scenario"])):
        row = counts.setdefault(case["scenario"], {"cases": 0, "problems": 0})
        row["cases"] += 1
        row["problems"] += "problem" in case
    return counts


def fork_worker(todo: list[int], seed: int, all_of: list[Scenario], work: Path, until_s: float) -> int:
    """A process that works through these cases; its id."""
    pid = os.fork()
    if pid:
        return pid
    for number in todo:
        if time.monotonic() > until_s:
            break
        keep(forked_case(number, seed, all_of), work)
    sys.stdout.flush()
    os._exit(0)


def run_forked(todo: list[int], seed: int, jobs: int, work: Path, until_s: float) -> None:
    if not todo:
        return
    drawn_from = scenarios(work)
    for pid in [fork_worker(todo[n::jobs], seed, drawn_from, work, until_s) for n in range(jobs)]:
        os.waitpid(pid, 0)


def run_real(todo: list[int], seed: int, launchers: list[str], work: Path, until_s: float) -> None:
    if not todo or time.monotonic() > until_s:
        return
    local = Real(work, {})
    local.reference()
    with a_cluster(work, local.whole, "slurm" in launchers) as slurm:
        for number in todo:
            if time.monotonic() > until_s:
                break
            case = real_case(number, seed, local if "torchrun" in launchers else None, slurm)
            if case is not None:
                keep(case, work)


def main() -> None:
    args = options(
        __doc__,
        forked=Option(1000, "cases in forked processes"),
        real=Option(100, "cases with real ranks"),
        jobs=Option(2, "forked cases at a time"),
        seed=1,
        launchers=Option(("torchrun", "slurm"), "of the cases with real ranks"),
        limit=LIMIT,
    )
    until_s = time.monotonic() + args.limit
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="crashes-") as folder:
        work = Path(folder)
        run_forked(missing(args.seed, args.forked, is_real=False), args.seed, args.jobs, work, until_s)
        run_real(missing(args.seed, args.real, is_real=True), args.seed, args.launchers, work, until_s)
    done = known(args.seed)
    kinds = {
        kind: [case for (is_real, _), case in done.items() if is_real == (kind == "real")]
        for kind in ("forked", "real")
    }
    problems = [case for case in done.values() if "problem" in case]
    publish("crashes", {
        "seed": args.seed,
        "asked": {"forked": args.forked, "real": args.real},
        **{kind: {"cases": len(cases), "by_scenario": table(cases)} for kind, cases in kinds.items()},
        "problems": problems,
    })  # fmt: skip
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
