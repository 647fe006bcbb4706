"""Run the suite N times, each time in another order: python -m tests.repeated 10 [pytest options].

Adds one JSON line for each run to benchmarks/results/suite_runs.jsonl. The exit code is 1 if any run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.ranks import REPO

RECORDED = REPO / "benchmarks" / "results" / "suite_runs.jsonl"
WORKERS = (3, 1, 4, 2)
OUTCOMES = ("passed", "failed", "errors", "skipped")


def run(seed: int, workers: int, arguments: list[str]) -> dict[str, Any]:
    """One run of the default suite, with the load that the machine had when it began."""
    options = ["-q", "-p", "no:cacheprovider", "-n", str(workers), "--order-seed", str(seed), *arguments]
    load, began = os.getloadavg()[0], time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=REPO, capture_output=True, text=True)
    seconds = time.monotonic() - began
    lines = done.stdout.splitlines()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit(), "seed": seed,
        "workers": workers, "load": round(load, 1), "exit_code": done.returncode, **counts(lines[-1] if lines else ""),
        "seconds": round(seconds, 1), "failures": [line for line in lines if line.startswith(("FAILED ", "ERROR "))],
    }  # fmt: skip


def counts(summary: str) -> dict[str, int]:
    """The numbers in pytest's last line: `1 failed, 2 passed in 3.00s`."""
    numbers = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", summary)}
    return {outcome: numbers.get(outcome.rstrip("s"), 0) for outcome in OUTCOMES}


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPO, capture_output=True, text=True)
    return done.stdout.strip()


def main(arguments: list[str], recorded: Path = RECORDED) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=int, help="how often the suite runs")
    options, pytest_arguments = parser.parse_known_args(arguments)
    failed = 0
    for index in range(options.runs):
        record = run(random.SystemRandom().randrange(10**6), WORKERS[index % len(WORKERS)], pytest_arguments)
        with recorded.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
        failed += record["exit_code"] != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
