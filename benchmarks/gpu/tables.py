"""The GPU section of docs/benchmarks.md, whose tables are in page.md: it counts the cases that are not measured yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Undefined

from ..markdown import machine, section
from . import PARTS, part_cases
from .accuracy import TIGHT, named_settings
from .cases import Figures
from .mfu import CEILING, GOALS, MODELS
from .rehearsed import NAMED, SEEDS, drawn_name, trained_name
from .store import kind

MISSING = "not yet measured"
PEAKS = ("allocated", "reserved")
Known = dict[str, dict[str, Figures]]
"""Case → its complete results, under "predicted" and "measured"."""


def on_a_gpu(results: Path) -> str:
    """The section for the files in `results`; missing files leave rows without figures."""
    known = {part: read(results / f"gpu_{part}.json", part) for part in PARTS}
    return section("gpu", {
        "known": known, "goals": GOALS, "ceiling": CEILING, "models": MODELS, "limits": TIGHT, "programs": NAMED,
        "n_drawn": len(SEEDS), "drawn": _drawn(known["rehearsed"]),
        "trained": _trained(known["rehearsed"], known["accuracy"]),
        "predicted": predicted, "measured": measured, "settings": settings, "errors": errors, "error": error,
        "tried": tried, "unmeasured": unmeasured, "provenance": provenance,
    })  # fmt: skip


def read(path: Path, part: str) -> Known:
    """The complete cases of a file, without those that the part no longer has.

    Raises:
        ValueError: the file holds results of a dry run.
    """
    if not path.exists():
        return {}
    held = json.loads(path.read_text())
    if kind(held) != "measurements":
        raise ValueError(f"{path} holds {kind(held)}, not measurements: delete it")
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


def unmeasured(known: Known, part: str) -> int:
    """How many of the part's settings have no measurement yet."""
    return sum(measured(known, name) is None for name in settings(part))


def _drawn(known: Known) -> dict[str, list[float]]:
    """The errors of the rehearsals of random programs that ran on both sides."""
    both = [(predicted(known, drawn_name(seed)), measured(known, drawn_name(seed)) or {}) for seed in SEEDS]
    return {
        key: [plan[key] / figures[key] - 1 for plan, figures in both if key in plan and key in figures] for key in PEAKS
    }


def _trained(known: Known, accuracy: Known) -> dict[str, list[float]]:
    """How far the rehearsals of `shardkit.train` are from its plans and from the GPU, by kind of difference."""
    differences: dict[str, list[float]] = {}
    for setting in named_settings(dry=False):
        rehearsal, run = predicted(known, trained_name(setting)), measured(accuracy, setting) or {}
        if rehearsal.get("outcome") != "ok":
            continue
        on_card = {"allocated": run.get("peak"), "reserved": run.get("reserved")}
        for other, figures in (("plan", rehearsal["planned"]), ("GPU", on_card)):
            for key in PEAKS:
                if figures[key]:
                    differences.setdefault(f"{key} against the {other}", []).append(rehearsal[key] / figures[key] - 1)
    return differences


def provenance(known: dict[str, Known]) -> str:
    """The places and dates of measurements, and the commits of predictions, each once."""
    measured_on: dict[str, None] = {}
    predicted_at: dict[str, None] = {}
    for cases in known.values():
        for case in cases.values():
            for what, figures in case.items():
                env = figures["environment"]
                if what == "predicted":
                    predicted_at[f"{str(env['commit'])[:10]} (torch {env['torch']})"] = None
                else:
                    measured_on[machine(env)] = None
    predicted = [f"Predicted at {', '.join(predicted_at)}."] if predicted_at else []
    return "\n\n".join(f"~{line}" for line in (*measured_on, *predicted))
