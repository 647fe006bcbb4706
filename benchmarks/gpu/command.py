"""`python -m benchmarks gpu`: run the missing cases of each part, within a time budget."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from shardkit.errors import ConfigError, ShardkitError, report
from shardkit.hardware.cards import GPUS, Gpu, find_gpu, parse_bytes

from ..common import REPO, RESULTS, environment
from . import ALONE, PARTS, part_cases
from . import EMULATED as FOR_EMULATED
from .cases import Case, Figures, Where
from .child import HOST_RESERVE, Worker, run_case
from .store import Store

DRY = REPO / "build" / "gpu_dry_run"
EMULATED = RESULTS / "emulated"
DEFAULT_CARD = "h200"
_LEAST_S = 15.0
"""With less time left, no case starts."""


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        predict: only ask the planner.
        only: run only cases whose names contain this.
        emulated: measure on an emulated card that computes nothing.
        keep_plans: take predictions of other code, too.
    """

    dry: bool
    predict: bool
    card: str
    host_memory: int
    out: Path
    budget_s: float
    only: str = ""
    commit: str | None = None
    emulated: bool = False
    keep_plans: bool = False


class Part:
    """One part within its budget."""

    def __init__(self, name: str, options: Options, say: Callable[[str], None] = print) -> None:
        self.name, self.options, self._say = name, options, say
        card = _described(GPUS[options.card]) if options.emulated else None
        self.store = Store(
            name, options.out, options.dry, options.card, options.host_memory, options.commit, card, options.keep_plans
        )
        self._deadline = time.monotonic() + options.budget_s
        self._worker = Worker() if options.emulated and name not in ALONE else None

    def run(self) -> bool:
        """Run the missing cases; returns whether none is left."""
        try:
            return self._run_all()
        finally:
            if self._worker is not None:
                self._worker.end()

    def _run_all(self) -> bool:
        cases = {
            name: case for name, case in part_cases(self.name, self.options.dry).items() if self.options.only in name
        }
        for name, case in cases.items():
            for what in ("predicted",) if self.options.predict else ("predicted", "measured"):
                if (what == "predicted" and case.predict is None) or self.store.complete(name, what):
                    continue
                if self._left() < _LEAST_S:
                    self._say(f"{self.name}: time is up; run it again to go on with {name!r}")
                    return False
                if not self._run_predicted(case.predicted_as) or not self._run(name, case, what):
                    return False
        self._say(f"{self.name}: complete, {self.store.path}")
        return True

    def _run_predicted(self, name: str | None) -> bool:
        """Predict the case whose prediction another one needs, if it is missing."""
        if name is None or self.store.complete(name, "predicted"):
            return True
        case = part_cases(self.name, self.options.dry)[name]
        return case.predict is None or self._run(name, case, "predicted")

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _run(self, name: str, case: Case, what: str) -> bool:
        limit = self._left()
        predicted = self.store.figures(case.predicted_as or name, "predicted")
        earlier = _without_origin(self.store.figures(name, what))
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
            where = Where(
                self.options.dry, self.options.card, self.options.host_memory, Path(folder), self.options.emulated,
                predicted=predicted or {}, earlier=earlier,
                keep=lambda figures: self.store.put(name, what, figures, complete=False),
            )  # fmt: skip
            figures, ended = run_case(self.name, name, what, where, limit, self._worker)
        went_on = figures != {key: value for key, value in earlier.items() if key != "ended"}
        if ended == "host memory" and went_on:  # while trying something new
            self.store.put(name, what, {**figures, "ended": ended}, complete=False)
            return self._run(name, case, what)
        if ended == "host memory":
            figures, ended = {**figures, "outcome": "out of host memory"}, "done"
        seconds = {"seconds": round(time.monotonic() - began, 1)}
        if ended == "done":
            self.store.put(name, what, {**figures, **seconds}, complete=True)
            self._say(f"{self.name}: {name}: {what}: {figures.get('outcome', 'ok')}, {seconds['seconds']} s")
            return True
        if limit > 0.9 * self.options.budget_s and not went_on:  # a part's whole time was not enough, nor would it be
            late = {"outcome": "failed", "message": f"not finished within {limit:.0f} s"}
            self.store.put(name, what, {**figures, **late, **seconds}, complete=True)
        elif went_on:
            self.store.put(name, what, figures, complete=False)
        self._say(f"{self.name}: {name}: {what}: time is up; run it again to go on")
        return False


def _without_origin(figures: Figures | None) -> Figures:
    """The result that an interrupted case kept, without its origin."""
    stamps = ("complete", "card", "code", "environment", "seconds")
    return {key: value for key, value in (figures or {}).items() if key not in stamps}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    add = parser.add_argument
    parts = tuple(dict.fromkeys((*PARTS, *FOR_EMULATED)))
    places = "; ".join(str(folder.relative_to(REPO)) for folder in (RESULTS, EMULATED, DRY))
    add("--part", choices=parts, action="append", help="may be repeated; default: all")
    add("--budget-s", type=float, default=520.0, metavar="S", help="seconds for each part (%(default)s)")
    add("--only", default="", metavar="TEXT", help="only cases whose names contain this")
    add("--dry-run", action="store_true", help="the same code with tiny sizes, on the CPU without --emulated")
    add(
        "--emulated", action="store_true",
        help="on emulated cards that compute nothing: no speeds (needs the environment of `make test-cuda`)",
    )  # fmt: skip
    add("--predict", action="store_true", help="only plan: needs no GPU")
    add("--keep-plans", action="store_true", help="take predictions that another version of the code has made")
    add("--gpu", metavar="NAME", help=f"the card, if it is not here or not known (default {DEFAULT_CARD})")
    add("--host-memory", metavar="120GiB", help="available to cases; default: the free memory here")
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
    if args.emulated and args.predict:
        parser.error("--emulated measures: it does not go with --predict")
    if args.emulated and importlib.util.find_spec("emucuda") is None:
        parser.error("--emulated: this interpreter has no emulated card: take the one that `make test-cuda` makes")
    allowed = FOR_EMULATED if args.emulated else PARTS
    for part in args.part or ():
        if part not in allowed:
            parser.error(f"--part {part}: it is for emulated cards; without --emulated: {', '.join(allowed)}")
    here = [] if args.emulated else environment()["gpus"]
    if not here and not (args.dry_run or args.predict or args.emulated):
        parser.error("there is no GPU here (nvidia-smi finds none): pass --dry-run, or --predict to plan only")
    dry = DRY / "emulated" if args.emulated else DRY
    out = args.out or (dry if args.dry_run else EMULATED if args.emulated else RESULTS)
    if (args.dry_run or args.emulated) and out.resolve() == RESULTS:
        parser.error(f"--out {out} is for measurements: a dry run and an emulated card write elsewhere")
    free = psutil.virtual_memory().available - 2 * HOST_RESERVE
    host = parse_bytes(args.host_memory, "--host-memory") if args.host_memory else free
    card = find_gpu(args.gpu or _card(here[0] if here else None)).name
    parts = [part for part in allowed if args.part is None or part in args.part]
    return parts, Options(
        args.dry_run, args.predict, card, host, out, args.budget_s, args.only, args.commit, args.emulated,
        args.keep_plans,
    )  # fmt: skip


def _described(card: Gpu) -> str:
    """An emulated card, in the words and order of nvidia-smi."""
    return f"emulated {card.device_name}, {card.memory >> 20} MiB, no driver"


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
        left = [part for part in parts if not Part(part, options, _say).run()]
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
