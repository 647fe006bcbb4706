"""torch.compile on emulated cards: errors, graph breaks, recompilations and peaks of every strategy, scope and policy.

`make test-cuda` makes the environment; then `.venv-cuda/bin/python -m benchmarks compiled`. Nothing is computed and
nothing is timed. Finished cases are kept in --folder, one file each, and another call continues.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.cuda import gpu_ranks
from tests.cuda.compiled import Case, cases, pool, refusal, write
from tests.ranks import RankError

from .common import REPO, RESULTS, environment

LIST = REPO / "benchmarks" / "compiled_cases.txt"
WRITTEN = RESULTS / "emulated" / "compiled.json"
PLANNED = Path("plan") / "plan.json"
AT_ONCE = 12
CARD = {
    "EMUCUDA": "1", "EMUCUDA_COMPUTE": "0", "EMUCUDA_DEVICES": "4", "EMUCUDA_MEMORY": "80G", "EMUCUDA_SM": "9.0",
    # Autotuning's choice among products says nothing here, and compiling the candidates takes hours.
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}  # fmt: skip


def recorded(folder: Path) -> dict[str, Any]:
    """Results by case."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {result["case"]: result for result in found}


def run(todo: Sequence[Case], folder: Path, deadline: float) -> None:
    """Run the cases that have no result, until the deadline; a case that fails is recorded with its error."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, group in groupby(todo, pool):
        left = [case for case in group if str(case) not in recorded(folder)]
        for case in left:
            if (why := refusal(case)) is not None:
                write(folder, str(case), {"refused": why})
        left = [case for case in left if refusal(case) is None]
        while left and time.monotonic() < deadline:
            _run_batch(key, [str(case) for case in left[:AT_ONCE]], folder)
            left = [case for case in left if str(case) not in recorded(folder)]


def _run_batch(key: tuple[int, str], names: list[str], folder: Path) -> None:
    world, backend = key
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compiled-") as room:
        try:
            gpu_ranks(
                world, "tests.cuda.compiled:run", timeout=300 + 120 * len(names), env={"TMPDIR": room},
                todo=names, backend=backend, record=str(folder),
            )  # fmt: skip
        except RankError as error:
            failed = next((name for name in names if name not in recorded(folder)), None)
            if failed is None:
                raise
            late = "did not end within" in str(error)
            frames = (" ", "Traceback", "Thread", "The above")  # they hold paths of this machine
            named = [line for line in str(error).splitlines() if line and not line.startswith(frames)]
            write(folder, failed, {"unfinished" if late else "error": "\n".join(named)})
    done = [name for name in names if name in recorded(folder)]
    print(f"{len(done)} of {len(names)} cases in {time.monotonic() - began:.0f} s: {done[-1:]}", flush=True)


def plan_eager(todo: Sequence[Case], folder: Path) -> None:
    """Ask the planner for the peaks of eager cases; the file has each as soon as it is known."""
    from shardkit.config.load import load_config
    from shardkit.hardware.cards import GPUS
    from shardkit.plan.client import plan
    from shardkit.plan.target import Target

    found = planned(folder)
    for case in todo:
        if case.scope == "eager" and str(case) not in found and refusal(case) is None:
            peak = plan(load_config(None, case.settings()), Target(case.world, GPUS["h100"], case.world)).peak
            found[str(case)] = {"allocated": peak.allocated, "reserved": peak.reserved}
            (folder / PLANNED).parent.mkdir(parents=True, exist_ok=True)
            (folder / PLANNED).write_text(json.dumps(found, indent=1))


def planned(folder: Path) -> dict[str, Any]:
    path = folder / PLANNED
    return json.loads(path.read_text()) if path.exists() else {}


def collect(folder: Path) -> dict[str, Any]:
    """One result of all cases; those without a file are listed as not run."""
    found = recorded(folder)
    names = [str(case) for case in cases()]
    return {
        "environment": environment(),
        "emulated": True,
        "card": CARD,
        "not_run": [name for name in names if name not in found],
        "planned": planned(folder),
        "cases": {name: {k: v for k, v in found[name].items() if k != "case"} for name in names if name in found},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPO / "build" / "compiled", help="where cases are recorded")
    parser.add_argument("--only", default=".", help="a pattern that a case's name has to match")
    parser.add_argument("--budget-s", type=float, default=1e6, help="no set of cases starts later")
    parser.add_argument("--again", action="store_true", help="forget the results of the cases that match")
    parser.add_argument("--list", action="store_true", help=f"write the names of all cases to {LIST.name}")
    parser.add_argument("--plan", action="store_true", help="ask the planner for the eager cases")
    parser.add_argument("--collect", action="store_true", help="run nothing; write the result of recorded cases")
    options = parser.parse_args()
    if options.list:
        LIST.write_text("".join(f"{case}\n" for case in cases()))
        return
    todo = [case for case in cases() if re.search(options.only, str(case))]
    if options.again:
        for case in todo:
            (options.folder / f"{case}.json").unlink(missing_ok=True)
    if options.plan:
        plan_eager(todo, options.folder)
    elif not options.collect:
        os.environ.update(CARD)  # ranks read it when Python starts
        run(todo, options.folder, time.monotonic() + options.budget_s)
    WRITTEN.parent.mkdir(parents=True, exist_ok=True)
    WRITTEN.write_text(json.dumps(collect(options.folder), indent=1) + "\n")
    print(f"written: {WRITTEN}")


if __name__ == "__main__":
    main()
