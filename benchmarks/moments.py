"""Jobs on a Slurm cluster that meet a fault at a drawn moment: how each ended, and whether it may end so.

`python -m benchmarks.moments` starts a cluster of emulated nodes (needs root) and plays draws of tests/slurm/moments.py
on it, several jobs side by side: cancels, time limits in the middle of a save, ranks that stop in a save, processes of
a node that die. The losses of every run are compared with those of a run that nothing disturbed.

Draws that are done are kept in build/moments.jsonl: started again with the same seed it goes on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.slurm import moments
from tests.slurm.cluster import Cluster, running, why_not

from .common import REPO, publish, read_lines
from .options import LIMIT, Option, options

PROGRESS = REPO / "build" / "moments.jsonl"


@contextmanager
def a_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster whose nodes have room for several jobs."""
    folder.mkdir()
    with running(folder, SLURM_TEST_CPUS="16") as cluster:
        assert "CPUTot=16" in cluster.call("scontrol", "show", "node", "n1"), "jobs would wait for each other"
        yield cluster


class Campaign:
    """Plays draws on one cluster.

    Args:
        until_s: monotonic time after which no draw begins.
    """

    def __init__(self, cluster: Cluster, work: Path, until_s: float) -> None:
        self.cluster, self.work, self.until_s = cluster, work, until_s
        self._whole: dict[str, dict[int, float]] = {}
        self._lock = threading.Lock()

    def whole(self, strategy: str) -> dict[int, float]:
        return self._whole[strategy]

    def run(self, draws: list[moments.Draw], jobs: int) -> None:
        """Play them, those with the same timers side by side."""
        for strategy in moments.STRATEGIES:
            folder = self.work / f"whole-{strategy}"
            folder.mkdir()
            self._whole[strategy] = moments.undisturbed(self.cluster, folder, strategy)
        for kill_wait_s in sorted({drawn.kill_wait_s for drawn in draws}):
            self.cluster.set_kill_wait(kill_wait_s)
            with ThreadPoolExecutor(jobs) as pool:
                timed = [drawn for drawn in draws if drawn.kill_wait_s == kill_wait_s]
                list(pool.map(self._play, [drawn for drawn in timed if drawn.fault != "nodes"]))
            for drawn in timed:  # alone: a node's daemon starts again
                if drawn.fault == "nodes":
                    self._play(drawn)

    def _play(self, drawn: moments.Draw) -> None:
        began = time.monotonic()
        if began > self.until_s:
            return
        folder = self.work / f"draw{drawn.number}"
        folder.mkdir()
        outcome, problem = None, None
        try:
            outcome = moments.play(drawn, self.cluster, folder, self.whole)
        except (AssertionError, OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as error:
            problem = f"{type(error).__name__}: {error}".replace(str(self.work), "WORK")
        seconds = time.monotonic() - began
        with self._lock, PROGRESS.open("a") as file:
            file.write(moments.record(drawn, outcome, problem, seconds))
        print(f"{drawn.number}: {drawn.name}: {outcome or problem} ({seconds:.0f} s)", flush=True)


def known(seed: int) -> dict[int, dict[str, Any]]:
    """Number → record of the draws of this seed that are done."""
    return {record["number"]: record for record in read_lines(PROGRESS) if record["seed"] == seed}


def counts(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Fault → moment → counts of outcomes."""
    table: dict[str, Any] = {}
    for record in sorted(records, key=lambda record: (record["fault"], record["moment"])):
        outcomes = table.setdefault(record["fault"], {}).setdefault(record["moment"], Counter())
        outcomes[record["outcome"] or "a problem"] += 1
    return table


def main() -> None:
    args = options(
        __doc__,
        draws=200,
        jobs=Option(3, "jobs side by side"),
        seed=1,
        faults=moments.FAULTS,
        number=Option(-1, "play the draw of this number alone, and write nothing"),
        limit=LIMIT,
    )
    until_s = time.monotonic() + args.limit
    missing = why_not()
    if missing is not None:
        sys.exit(f"error: {missing}\n  fix: run it as root on Debian or Ubuntu")
    PROGRESS.parent.mkdir(exist_ok=True)
    alone = args.number >= 0
    done = {} if alone else known(args.seed)
    numbers = [args.number] if alone else [number for number in range(args.draws) if number not in done]
    with tempfile.TemporaryDirectory(prefix="moments-") as folder, a_cluster(Path(folder) / "slurm") as cluster:
        campaign = Campaign(cluster, Path(folder), until_s)
        chosen = [number for number in numbers if moments.CYCLE[number % len(moments.CYCLE)] in args.faults]
        campaign.run([moments.draw(args.seed, number) for number in chosen], args.jobs)
    if alone:
        return
    records = [*known(args.seed).values()]
    problems = [record for record in records if record["problem"] is not None]
    publish("moments", {
        "seed": args.seed, "asked": args.draws, "draws": len(records), "side_by_side": args.jobs,
        "by_fault": counts(records), "problems": problems,
    })  # fmt: skip
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
