"""Runs seeds under engines, judges what came of each, and counts."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .case import SAVED_AT, Curve, in_one_process
from .engines import ENGINES, WORLDS, Arm, Report
from .pool import Pool
from .proof import first_difference, starts_apart
from .refusals import reason

OUTCOMES = ("equal", "refused", "wrong", "traceback", "hang", "stray")
"""`refused`: before the update of the first step that the engine cannot train, which is the first step unless the model
skips something later. `stray`: a refusal after a wrong step, on one rank only, or for a reason not in the list."""
TOLERANCES = (1e-5, 1e-4)
"""Of losses and of norms."""
ROUNDED = (1e-3, 1e-2)
"""Where engines round to 16 bits at other places; gradients and weights are judged by the rounding that is measured."""
RESUMED_SHARE = 0.25


@dataclass(frozen=True)
class Verdict:
    arm: Arm
    outcome: str
    words: str
    seconds: float
    resumed: bool = False
    """It failed after the checkpoint was loaded: under the engine that resumed it."""

    @property
    def engine(self) -> str:
        """The engine that the verdict is about."""
        return self.arm.then if self.resumed and self.arm.then else self.arm.engine

    @property
    def line(self) -> str:
        return f"{self.outcome:9} {self.seconds:5.1f} s  {self.arm}" + (f"\n      {self.words}" if self.words else "")


def distance(curve: Curve, reference: Curve, tolerances: tuple[float, float] = TOLERANCES) -> str:
    """The first step whose loss or norm is not the reference's, in words; empty if none is."""
    if len(curve) != len(reference):
        return f"{len(curve)} steps of {len(reference)}"
    for step, ((loss, norm), (right_loss, right_norm)) in enumerate(zip(curve, reference, strict=True)):
        if not abs(loss - right_loss) <= tolerances[0] * max(1.0, abs(right_loss)):
            return f"step {step}: loss {loss:.7f}, {loss - right_loss:+.1e} off"
        if not abs(norm - right_norm) <= tolerances[1] * abs(right_norm):
            return f"step {step}: norm {norm:.7f}, {norm / right_norm - 1:+.1e} off"
    return ""


def judge(
    reports: Sequence[Report | None], reference: Curve, stacks: str = "", difference: str = "",
    tolerances: tuple[float, float] = TOLERANCES,
) -> tuple[str, str]:  # fmt: skip
    """(outcome, words) of the ranks' reports; `difference`: of gradients or weights in the steps that all took."""
    present = sorted((report for report in reports if report is not None), key=lambda report: report.at)
    crashed = [report for report in present if report.error and not report.refused]
    if crashed and crashed[0] is present[0]:
        return "traceback", _innermost(crashed[0].error)
    if len(present) < len(reports):
        told = "; ".join(report.error.splitlines()[0] for report in present if report.error)
        return "hang", f"{told or 'no rank said why'}\n{stacks}"
    refused = [report for report in present if report.refused]
    if refused:
        words = " ".join(refused[0].error.split())
        if len(refused) < len(present):
            return "stray", f"on one rank only: {words}"
        if late := difference or distance(refused[0].curve, reference[: len(refused[0].curve)]):
            return "stray", f"after a wrong step ({late}): {words}"
        return ("refused" if reason(words) else "stray"), words
    curves = (words for report in present if (words := distance(report.curve, reference, tolerances)))
    different = difference or next(curves, "")
    return ("wrong", different) if different else ("equal", "")


def _innermost(trace: str) -> str:
    """A traceback's error, and the last line of shardkit's or the graph's own code on the way to it."""
    lines = trace.strip().splitlines()
    places = [line.strip() for line in lines if "/shardkit/" in line or "/graphs/" in line]
    error = next((line for line in reversed(lines) if line and not line.startswith(" ")), lines[-1])
    return f"{error[:300]} at {places[-1] if places else lines[0]}"


@dataclass
class Campaign:
    """Pools of ranks, and what was found in them."""

    limit_s: float = 40.0
    world: int = 2
    say: Callable[[str], object] = print
    verdicts: list[Verdict] = field(default_factory=list)

    def run(self, cases: Iterable[Any], engines: Sequence[str], until: float | None = None) -> None:
        """Train every case under every engine; no new case begins after `until` (time.monotonic)."""
        self.run_pairs(((case, engine) for case in cases for engine in engines), until)

    def run_pairs(self, pairs: Iterable[tuple[Any, str]], until: float | None = None) -> None:
        """The same for pairs of a case and an engine; pairs of one case should follow each other."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphs-")))
            pools: dict[int, Pool] = {}
            for number, (case, engine) in enumerate(pairs):
                if until is not None and time.monotonic() > until:
                    break
                world = WORLDS.get(engine, self.world)
                if world not in pools:
                    pools[world] = stack.enter_context(Pool(world, self.limit_s))
                arm = Arm(case, engine, folder / str(number), resumed_under(case, engine))
                self._judge(pools[world], arm)
                shutil.rmtree(arm.folder, ignore_errors=True)

    def _judge(self, pool: Pool, arm: Arm) -> None:
        began = time.monotonic()
        reports, case = pool.run(arm), arm.case
        taken = min(len(report.curve) if report is not None else 0 for report in reports)
        rounds = case.settings.get("precision.mode", "fp32") != "fp32"
        reference, wrong, difference = list[tuple[float, float]](), 0, ""
        if taken:
            reference = in_one_process(case, pool.world, arm.records, taken)
            wrong, difference = first_difference(arm.records, arm.folder / "process", taken, pool.world)
            # The masters of ZeRO are made of weights in bf16.
            if apart := [] if rounds else starts_apart(arm.records, case.build()):
                wrong, difference = 1, f"the ranks start with other values of {apart}"
        outcome, words = judge(reports, reference, pool.stacks, difference, ROUNDED if rounds else TOLERANCES)
        n_right = wrong - 1 if wrong else taken
        verdict = Verdict(arm, outcome, words, time.monotonic() - began, outcome != "equal" and n_right >= SAVED_AT)
        self.verdicts.append(verdict)
        self.say(verdict.line)

    def faults(self, *allowed: str) -> str:
        """The verdicts that are not allowed."""
        return "\n".join(verdict.line for verdict in self.verdicts if verdict.outcome not in allowed)

    def counts(self) -> dict[str, dict[str, int]]:
        """engine → outcome → number of cases."""
        found: dict[str, Counter[str]] = {}
        for verdict in self.verdicts:
            found.setdefault(verdict.engine, Counter())[verdict.outcome] += 1
        return {engine: {name: counter[name] for name in OUTCOMES} for engine, counter in found.items()}


def resumed_under(case: Any, engine: str) -> str | None:
    """The engine under which a case goes on, of cases that are saved and resumed."""
    draws = random.Random(f"{case.seed} {engine} resume")
    if not case.resumes or draws.random() >= RESUMED_SHARE:
        return None
    return draws.choice([name for name in ENGINES if WORLDS.get(name, 2) == WORLDS.get(engine, 2)])
