"""The GPU section of docs/benchmarks.md: every case has a row, measured or not. Its tables are in page.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Undefined

from ..markdown import UNKNOWN, machine, millions, section
from . import EMULATED, PARTS, part_cases
from .accuracy import TIGHT, named_settings
from .cases import Figures
from .categories import ARMS as CATEGORY_ARMS
from .choices import JOBS
from .ladder import CARDS, rungs
from .largest import ARMS, BYTES_PER_PARAMETER, EMULATED_LIMIT
from .mfu import CEILING, GOALS, MODELS
from .packed import LARGE
from .qlora import START
from .rehearsed import NAMED, SEEDS, drawn_name, trained_name
from .store import first_speed, kind

MISSING = "not yet measured"
PEAKS = ("allocated", "reserved")
UNATTRIBUTED = 0.02
Known = dict[str, dict[str, Figures]]
"""Case → its complete results, under "predicted" and "measured"."""


def on_a_gpu(results: Path) -> str:
    """The section for the files in `results`; missing files leave rows without figures."""
    known = {part: read(results / f"gpu_{part}.json", part) for part in PARTS}
    # Memory alone: nothing that is measured on an emulated card says anything of speed.
    emulated = {
        part: read(results / "emulated" / f"gpu_{part}.json", part, "an emulated card's results") for part in EMULATED
    }
    trained, differences = _trained(known["rehearsed"], known["accuracy"])
    attributed = _attributed(emulated)
    return section("gpu", {
        "known": known, "emulated": emulated, "goals": GOALS, "ceiling": CEILING, "models": MODELS, "cards": CARDS,
        "rungs": rungs(dry=False), "largest_arms": ARMS, "bytes_per_parameter": BYTES_PER_PARAMETER,
        "limit": EMULATED_LIMIT, "limits": TIGHT, "programs": NAMED, "n_drawn": len(SEEDS),
        "drawn": _drawn(known["rehearsed"]), "trained": trained, "trained_errors": differences,
        "starts": START.values(), "bases": LARGE, "category_arms": CATEGORY_ARMS, "choices": JOBS,
        "attributed": attributed, "n_attributed": sum(map(_is_attributed, attributed.values())),
        "predicted": predicted, "measured": measured, "settings": settings, "errors": errors, "error": error,
        "tried": tried, "limited": limited, "size": size, "depths": depths,
        "provenance": provenance, "furthest": furthest, "sums": sums,
    })  # fmt: skip


def read(path: Path, part: str, expected: str = "measurements") -> Known:
    """The complete cases of a file, without those that the part no longer has.

    Raises:
        ValueError: the file holds results of another kind, or a speed of an emulated card.
    """
    if not path.exists():
        return {}
    held = json.loads(path.read_text())
    if kind(held) != expected:
        raise ValueError(f"{path} holds {kind(held)}, not {expected}: delete it")
    if held.get("emulated") and (speed := first_speed(held["cases"])):
        raise ValueError(f"{path}: an emulated card has no speed, but {speed} has one: delete the case")
    names = part_cases(part, dry=False)
    complete = {
        name: {what: figures for what, figures in case.items() if figures["complete"]}
        for name, case in held["cases"].items()
    }
    return {name: complete[name] for name in names if name in complete}


def predicted(known: Known, case: str) -> Figures:
    return known.get(case, {}).get("predicted", {})


def measured(known: Known, case: str) -> Figures | None:
    return known.get(case, {}).get("measured")


def error(planned: Any, real: float | None) -> float | None:
    """How far a planned size is from the real one, where both are known."""
    return planned / real - 1 if real and not isinstance(planned, Undefined) else None


def settings(part: str) -> list[str]:
    """The part's cases without those in a limited memory."""
    return [name for name in part_cases(part, dry=False) if not name.endswith(tuple(f": {limit}" for limit in TIGHT))]


def errors(known: Known, part: str) -> dict[str, list[float]]:
    """The errors of the plans of a part's settings, by kind of peak."""
    both = [(predicted(known, name), measured(known, name)) for name in settings(part)]
    compared = [(plan, figures) for plan, figures in both if figures is not None and figures["outcome"] == "ok"]
    return {
        key: [plan[key] / figures[of] - 1 for plan, figures in compared if key in plan]
        for key, of in zip(PEAKS, ("peak", "reserved"), strict=True)
    }


def tried(known: Known, part: str, limit: str) -> list[str]:
    """The outcomes of a part's cases in a limited memory that could be tried."""
    runs = (measured(known, f"{name}: {limit}") or {} for name in settings(part))
    return [run["outcome"] for run in runs if run.get("outcome") in ("ok", "out of memory")]


def limited(figures: Figures | None) -> str:
    """Whether a setting works in a limited memory, and where it ran out of it."""
    if figures is None:
        return MISSING
    if figures["outcome"] != "out of memory":
        return "yes" if figures["outcome"] == "ok" else str(figures["outcome"])
    message = r"ran out of memory in (.+?): it asked for (.+?) of .+?, (.+?) were free"
    match = re.search(message, figures.get("message", ""))
    return f"no: {match[1]}, {match[2]} with {match[3]} free" if match else "no"


def size(known: Known, case: str, form: str) -> str:
    """`12 → 12 (13)`: the sizes predicted, trained, and out of memory."""
    plan, figures = predicted(known, case), measured(known, case)
    shown = f"{plan['amount']:{form}}" if plan.get("amount") else str(plan.get("outcome", UNKNOWN))
    if plan.get("limited_by") == "host":
        shown += " (host)"
    if figures is None:
        return f"{shown} → {MISSING}"
    if figures.get("amount") is None:
        return f"{shown} → {figures['outcome']}"
    failed_at = figures.get("out_of_memory_at")
    return f"{shown} → {figures['amount']:{form}}" + (f" ({failed_at:{form}})" if failed_at else "")


def depths(known: Known, arm: str) -> str:
    """As `size`, of an arm whose model grows layer by layer, in millions of parameters."""
    plan, figures = predicted(known, arm), measured(known, arm)
    if figures is None or not figures.get("trials"):
        return MISSING if figures is None else str(figures["outcome"])

    def most(outcome: str, choose: Callable[[list[int]], int]) -> str | None:
        sizes = [trial["n_params"] for trial in figures["trials"].values() if trial["outcome"] == outcome]
        return millions(choose(sizes)) if sizes else None

    too_large = most("out of memory", min)
    return f"{millions(plan['n_params'])} → {most('ok', max) or UNKNOWN}" + (f" ({too_large})" if too_large else "")


def furthest(values: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(values, others, strict=True))


def sums(values: list[float], others: list[float]) -> list[float]:
    return [a + b for a, b in zip(values, others, strict=True)]


def _attributed(known: dict[str, Known]) -> Known:
    """The runs whose trace was kept, by setting: the traced step's categories beside the allocator's peak."""
    attributed: Known = {}
    for cases in known.values():
        for name in (name for name in cases if ": " not in name):
            runs = (measured(cases, case) or {} for case in (name, f"{name}: required"))
            run = next((run for run in runs if "traced" in run), None)
            if run is not None:
                attributed[name] = run
    return attributed


def _is_attributed(run: Figures) -> bool:
    """Whether nearly all of the allocator's bytes have a category."""
    unknown: float = run["traced"]["categories"].get("unattributed", 0)
    return unknown / run["traced"]["bytes"] <= UNATTRIBUTED


def _drawn(known: Known) -> dict[str, list[float]]:
    """The errors of the rehearsals of random programs that ran on both sides."""
    both = [(predicted(known, drawn_name(seed)), measured(known, drawn_name(seed)) or {}) for seed in SEEDS]
    return {
        key: [plan[key] / figures[key] - 1 for plan, figures in both if key in plan and key in figures] for key in PEAKS
    }


def _trained(known: Known, accuracy: Known) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """`shardkit.train` rehearsed beside its plan and the GPU: by setting, and all differences by kind."""
    lines: dict[str, Any] = {}
    differences: dict[str, list[float]] = {}
    for setting in named_settings(dry=False):
        rehearsal, run = predicted(known, trained_name(setting)), measured(accuracy, setting) or {}
        if rehearsal.get("outcome") != "ok":
            lines[setting] = {"rehearsed": None, "outcome": rehearsal.get("outcome", MISSING)}
            continue
        on_card = {"allocated": run.get("peak"), "reserved": run.get("reserved")}
        trained = {
            f"{key} beside the {beside}": error(rehearsal[key], figures[key])
            for beside, figures in (("plan", rehearsal["planned"]), ("GPU", on_card))
            for key in PEAKS
        }
        for compared, difference in trained.items():
            if difference is not None:
                differences.setdefault(compared, []).append(difference)
        lines[setting] = {"rehearsed": rehearsal, "differences": list(trained.values())}
    return lines, differences


def provenance(known: dict[str, Known]) -> str:
    """The places and dates of measurements and predictions, each once."""
    origins: dict[str, None] = {}
    for cases in known.values():
        for case in cases.values():
            for what, figures in case.items():
                env = figures["environment"]
                line = machine(env)
                if what == "predicted":
                    line = (
                        f"Predicted for {figures['card']} on {env['date'][:10]} at commit {str(env['commit'])[:10]} "
                        f"with torch {env['torch']}."
                    )
                origins[line] = None
    return "\n\n".join(f"~{line}" for line in origins)
