"""torch.compile on emulated cards: errors, graph breaks, recompilations and peaks of every strategy, scope and policy.

`make test-cuda` makes the environment; then `.venv-cuda/bin/python -m benchmarks compiled`. Nothing is computed and
nothing is timed. Finished cases are kept in --folder, one file each, and another call continues.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.cuda import gpu_ranks
from tests.cuda.compiled import Case, cases, pool, refusal, write
from tests.ranks import RankError

from .common import REPO, earlier, publish
from .options import AGAIN, COLLECT, LIMIT, ONLY, Option, chosen, options
from .report_compiled import eager

LIST = REPO / "benchmarks" / "compiled_cases.txt"
NAME = "emulated/compiled"
PLANNED = Path("plan") / "plan.json"
ISOLATED = "isolated"
AT_ONCE = 40
"""Cases that the same processes run one after the other; between two of them dynamo starts anew."""
ROUND = 200
"""Cases that are sorted by the processes they need, so that few have to start; the list's order counts beyond."""
CARD = {
    "EMUCUDA": "1", "EMUCUDA_COMPUTE": "0", "EMUCUDA_DEVICES": "4", "EMUCUDA_MEMORY": "80G", "EMUCUDA_SM": "9.0",
    "EMUCUDA_SKIP_ABOVE": "64K",
    # Autotuning's choice among products says nothing here, and compiling the candidates takes hours.
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}  # fmt: skip


def recorded(folder: Path) -> dict[str, Any]:
    """Results by case."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {record["case"]: record for record in records}


def take_over(folder: Path) -> None:
    """Give the folder the committed results that it lacks, so that a campaign goes on in another checkout."""
    known = {"cases": {}, "isolated": {}, "planned": {}, **earlier(NAME)}
    for place, committed in ((folder, known["cases"]), (folder / ISOLATED, known["isolated"])):
        for name, record in committed.items():
            if not (place / f"{name}.json").exists():
                write(place, name, record)
    plans = known["planned"] | planned(folder)
    (folder / PLANNED).parent.mkdir(parents=True, exist_ok=True)
    (folder / PLANNED).write_text(json.dumps(plans, indent=1))


def run(todo: Sequence[Case], folder: Path, deadline: float, isolated: bool = False) -> None:
    """Run the cases that have no result; a case that fails is recorded with its error.

    Inductor's and Triton's own caches are kept in the folder: dynamo, whose graphs are counted, has none.

    Args:
        deadline: no case starts later (seconds of `time.monotonic`).
        isolated: each case has processes and caches of its own, and every rank compiles, not the first alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for case in todo:
        if str(case) not in recorded(folder) and (why := refusal(case)) is not None:
            write(folder, str(case), {"refused": why})
    left = [case for case in todo if str(case) not in recorded(folder)]
    while left and time.monotonic() < deadline:
        for key, group in groupby(sorted(left[:ROUND], key=pool), pool):
            names = [str(case) for case in group]
            if time.monotonic() < deadline:
                _run_batch(key, names[: 1 if isolated else AT_ONCE], folder, deadline, isolated)
        done = recorded(folder)
        left = [case for case in left if str(case) not in done]


def _run_batch(key: tuple[int, str], names: list[str], folder: Path, deadline: float, isolated: bool) -> None:
    world, backend = key
    began, worked = time.monotonic(), _processor_s()
    with tempfile.TemporaryDirectory(prefix="compiled-") as room:
        cache = Path(room) if isolated else (folder / "cache").resolve()
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        try:
            gpu_ranks(
                world, "tests.cuda.compiled:run", timeout=300 + 120 * len(names), env={"TMPDIR": room, **caches},
                todo=names, backend=backend, record=str(folder), deadline=deadline, every_rank=isolated,
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
    spent = f"{time.monotonic() - began:.0f} s, {_processor_s() - worked:.0f} s of processor time"
    print(f"{len(done)} of {len(names)} cases on {world} ranks in {spent}: {done[-1:]}", flush=True)


def _processor_s() -> float:
    """Seconds of processor time of all ranks that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def plan_each(todo: Sequence[Case], folder: Path, deadline: float, again: bool = False) -> None:
    """Ask the planner for the peaks of the eager cases until the deadline; the file has each as soon as it is known.

    Args:
        again: also for those that the file has.
    """
    from shardkit.config.load import load_config
    from shardkit.hardware.cards import GPUS
    from shardkit.plan.client import Planner
    from shardkit.plan.target import Target

    plans = planned(folder)
    plain = {Case.named(eager(str(case))) for case in todo if refusal(case) is None}
    left = sorted((case for case in plain if again or str(case) not in plans), key=lambda case: (case.world, str(case)))
    for world, group in groupby(left, lambda case: case.world):
        with Planner(Target(world, GPUS["h100"], world)) as planner:
            for case in group:
                if time.monotonic() > deadline:
                    return
                peak = planner.predict(load_config(None, case.settings()).config).peak
                plans[str(case)] = {"allocated": peak.allocated, "reserved": peak.reserved}
                (folder / PLANNED).parent.mkdir(parents=True, exist_ok=True)
                (folder / PLANNED).write_text(json.dumps(plans, indent=1))


def planned(folder: Path) -> dict[str, Any]:
    path = folder / PLANNED
    return json.loads(path.read_text()) if path.exists() else {}


def collect(folder: Path) -> dict[str, Any]:
    """One result of all cases; those without a file are listed as not run."""
    shared, isolated = recorded(folder), recorded(folder / ISOLATED)
    names = [str(case) for case in cases()]
    for record in (*shared.values(), *isolated.values()):
        del record["case"]
    return {
        "emulated": True,
        "card": CARD,
        "not_run": [name for name in names if name not in shared],
        "planned": planned(folder),
        "isolated": {name: isolated[name] for name in names if name in isolated},
        "cases": {name: shared[name] for name in names if name in shared},
    }


def main() -> None:
    args = options(
        __doc__,
        folder=Option(REPO / "build" / "compiled", "where cases are recorded"),
        only=ONLY,
        limit=LIMIT,
        isolated=Option(False, "a case has processes and caches of its own"),
        again=AGAIN,
        list=Option(False, f"write the names of all cases to {LIST.name}"),
        plan=Option(False, "ask the planner for peaks"),
        collect=COLLECT,
    )
    if args.list:
        LIST.write_text("".join(f"{case}\n" for case in cases()))
        return
    deadline = time.monotonic() + args.limit
    by_name = {str(case): case for case in cases()}
    todo = [by_name[name] for name in chosen(by_name, args.only)]
    take_over(args.folder)
    if args.plan:
        plan_each(todo, args.folder, deadline, args.again)
    elif not args.collect:
        os.environ.update(CARD)  # ranks read it when Python starts
        folder = args.folder / ISOLATED if args.isolated else args.folder
        for case in todo if args.again else ():
            (folder / f"{case}.json").unlink(missing_ok=True)
        run(todo, folder, deadline, args.isolated)
    publish(NAME, collect(args.folder), section="compiled")


if __name__ == "__main__":
    main()
