"""`python -m benchmarks gpu`: run the missing cases of each part, within a time budget."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from shardkit.errors import ConfigError, ShardkitError, report
from shardkit.hardware.cards import GPUS, find_gpu, parse_bytes

from ..common import REPO, RESULTS, environment
from . import PARTS, part_cases
from .cases import Case, Where
from .child import run_case
from .store import Store

DRY = REPO / "build" / "gpu_dry_run"
DEFAULT_CARD = "h200"
HOST_RESERVE = 6 << 30
"""Free host memory that cases do not count on."""
_LEAST_S = 15.0
"""With less time left, no case starts."""


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        predict: only ask the planner.
        only: run only cases whose names contain this.
    """

    dry: bool
    predict: bool
    card: str
    host_memory: int
    out: Path
    budget_s: float
    only: str = ""
    commit: str | None = None


def run_part(part: str, options: Options) -> bool:
    """Run the missing cases of a part within its budget; returns whether none is left."""
    store = Store(part, options.out, options.dry, options.card, options.commit)
    deadline = time.monotonic() + options.budget_s
    cases = part_cases(part, options.dry)

    def run(name: str, case: Case, what: str) -> bool:
        if (what == "predicted" and case.predict is None) or store.figures(name, what):
            return True
        limit = deadline - time.monotonic()
        if limit < _LEAST_S:
            return False
        predicted = store.figures(case.predicted_as or name, "predicted") or {}
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
            where = Where(options.dry, options.card, options.host_memory, Path(folder), predicted)
            figures = run_case(part, name, what, where, limit)
        if figures is None:
            if limit < 0.9 * options.budget_s:
                return False
            # A part's whole time was not enough, and would not be the next time.
            figures = {"outcome": "failed", "message": f"not finished within {limit:.0f} s"}
        seconds = round(time.monotonic() - began, 1)
        store.put(name, what, {**figures, "seconds": seconds})
        _say(f"{part}: {name}: {what}: {figures.get('outcome', 'ok')}, {seconds} s")
        return True

    for name, case in cases.items():
        if options.only not in name:
            continue
        needed = [(case.predicted_as or name, "predicted"), *([] if options.predict else [(name, "measured")])]
        for run_name, what in needed:
            if not run(run_name, cases[run_name], what):
                _say(f"{part}: time is up; run it again to go on with {name!r}")
                return False
    _say(f"{part}: complete, {store.path}")
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    add = parser.add_argument
    add("--part", choices=PARTS, action="append", help="may be repeated; default: all")
    add("--budget-s", type=float, default=520.0, metavar="S", help="seconds for each part (%(default)s)")
    add("--only", default="", metavar="TEXT", help="only cases whose names contain this")
    add("--dry-run", action="store_true", help="the same code with tiny sizes, on the CPU")
    add("--predict", action="store_true", help="only plan: needs no GPU")
    add("--gpu", metavar="NAME", help=f"the card, if it is not here or not known (default {DEFAULT_CARD})")
    add("--host-memory", metavar="120GiB", help="available to cases; default: the free memory here")
    places = "; ".join(str(folder.relative_to(REPO)) for folder in (RESULTS, DRY))
    add("--out", type=Path, metavar="DIR", help=f"default: {places}")
    add("--commit", metavar="HASH", help="of this checkout, if there is no git")
    return parser


def parse(argv: Sequence[str] | None) -> tuple[list[str], Options]:
    """The parts to run and the options.

    Raises:
        SystemExit: options that do not go together; argparse has printed the reason.
        ConfigError: an unknown card, or an invalid amount of memory.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    here = environment()["gpus"]
    if not here and not (args.dry_run or args.predict):
        parser.error("there is no GPU here (nvidia-smi finds none): pass --dry-run, or --predict to plan only")
    out = args.out or (DRY if args.dry_run else RESULTS)
    if args.dry_run and out.resolve() == RESULTS:
        parser.error(f"--out {out} is for measurements: a dry run writes elsewhere")
    free = psutil.virtual_memory().available - HOST_RESERVE
    host = parse_bytes(args.host_memory, "--host-memory") if args.host_memory else free
    card = find_gpu(args.gpu or _card(here[0] if here else None)).name
    return args.part or list(PARTS), Options(
        args.dry_run, args.predict, card, host, out, args.budget_s, args.only, args.commit
    )


def _card(described: str | None) -> str:
    """The short name of a card, from nvidia-smi's description."""
    if described is None:
        return DEFAULT_CARD
    name = described.partition(",")[0].strip()
    known = [gpu.name for gpu in GPUS.values() if gpu.device_name == name]
    if not known:
        raise ConfigError(f"{name} is not in the table of GPUs", f"pass --gpu with the nearest of {', '.join(GPUS)}")
    return known[0]


def main(argv: Sequence[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        parts, options = parse(argv)
        left = [part for part in parts if not run_part(part, options)]
    except KeyboardInterrupt:
        _say("interrupted: measurements so far are kept; run it again to go on")
        sys.exit(130)
    except ShardkitError as error:
        sys.exit(report(error))
    if left:
        _say(f"not complete: {', '.join(left)}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, flush=True)
