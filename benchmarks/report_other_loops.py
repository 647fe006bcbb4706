"""The section of docs/benchmarks.md on plans for the loops of other tools."""

from __future__ import annotations

from typing import Any

from .markdown import mib, section, table
from .other_loops import GOALS, LOOPS


def other_loops(result: dict[str, Any], emulated: bool = False) -> str:
    """One row for each listed case, run or not."""
    on = "emulated" if emulated else "cpu"
    keys, listed = list(GOALS[on]), [loop for loop in LOOPS if loop.on == on]
    rows, within, compared = [], 0, 0
    for loop in listed:
        found = result["cases"].get(loop.name, {})
        measured, predicted = (found.get(kind, {"failed": "not run"}) for kind in ("measured", "predicted"))
        start = [loop.name, loop.model, str(loop.ranks)]
        if "allocated" not in measured:
            rows.append([*start, "not measured", *[""] * len(keys)])
        elif "allocated" not in predicted:
            rows.append([*start, mib(measured["allocated"]), "not planned", *[""] * (len(keys) - 1)])
        else:
            errors = {key: predicted[key] / measured[key] - 1 for key in keys}
            compared += 1
            within += all(abs(errors[key]) <= GOALS[on][key] for key in keys)
            rows.append([*start, mib(measured["allocated"]), *(f"{100 * one:+.2f} %" for one in errors.values())])
    goals = " and ".join(f"{100 * goal:.0f} % {key}" for key, goal in GOALS[on].items())
    where = "emulated cards that compute nothing" if emulated else "CPUs"
    option = " --emulated" if emulated else ""
    text = (
        f"`python -m benchmarks.other_loops{option}`: jobs of transformers' Trainer, Accelerate and plain DeepSpeed in "
        f"loops of their own on {where}, and `shardkit plan --from` of their files; peaks of three steps on the rank "
        f"that takes the most. The list was committed before anything was measured. {len(listed)} cases, {compared} "
        f"compared, {within} of them within {goals}."
    )
    title = "Plans for other tools' loops" + (", on emulated cards" if emulated else "")
    head = ["job", "model", "ranks", "measured, MiB", *keys]
    return section(title, text, table(head, rows), environment=result["environment"])
