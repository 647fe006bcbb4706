"""The report of a proof: its verdict, the weight table as a picture, and each gradient's distance from one process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .figures import bar
from .html import LINES, Cell, Figure, Page, heading, label, paragraph, table, words

VERDICT = "verdict.json"
"""The file of a kept proof that says what came of it."""
MOST_BARS = 150
"""Gradients that the picture shows, the most distant ones; the table has all."""
_BAD = "#b3261e"


def read_verdict(path: Path) -> Mapping[str, Any] | None:
    """The verdict of a folder that `shardkit prove --keep` made; None if it is none."""
    file = path / VERDICT
    verdict: Mapping[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return verdict


def proof_page(verdict: Mapping[str, Any], name: str) -> str:
    page = Page(name)
    title = "Rows" if verdict["word"] == "rows" else "What was found"
    parts = [paragraph(verdict["headline"], "" if verdict["verdict"] == "same" else "bad")]
    parts += [heading(title)] if verdict["lines"] else []
    parts += [paragraph(line) for line in verdict["lines"]]
    parts += [paragraph(f"⇒ {reason}", "bad") for reason in verdict["reasons"]]
    parts += [paragraph(f"Note: {note}", "faint") for note in verdict["notes"]]
    page.section("verdict", "Verdict", *parts)
    if verdict["weights"]:
        remark = "The gradient fitted as a weighted sum of those of each rank's each micro-batch; both are to be equal."
        weights = [
            [words(part), *(Cell(f"{weight:+.4f}", weight) for weight in by_side.values())]
            for part, by_side in verdict["weights"].items()
        ]
        head = ["", ">ranks", ">one process"]
        page.section(
            "weights", "Weights of the micro-batches",
            page.figure("weights", _weights(verdict["weights"])), paragraph(remark, "faint"), table(head, weights),
        )  # fmt: skip
    if verdict["gradients"]:
        page.section("gradients", "Gradients by layer", *_gradients(verdict, page))
    return page.render()


def _weights(weights: Mapping[str, Mapping[str, float]]) -> Figure:
    parts = [re.fullmatch(r"(rank \d+) (micro-batch \d+)", part) for part in weights]
    places = [[part[1] for part in parts if part], [part[2] for part in parts if part]]
    traces = [
        bar(name, places, [by_side[side] for by_side in weights.values()], colour, "")
        for name, side, colour in (("ranks", "parallel", LINES[1]), ("one process", "one process", LINES[0]))
    ]
    return Figure(traces, {"barmode": "group", "yaxis": {"title": {"text": "weight"}}})


def _gradients(verdict: Mapping[str, Any], page: Page) -> list[str]:
    gradients, allowed = verdict["gradients"], verdict["allowed"]
    shown = sorted(gradients, key=lambda name: (not gradients[name]["cause"], -gradients[name]["times"]))[:MOST_BARS]
    names = [name for name in gradients if name in shown]
    # A logarithmic axis has no zero: a gradient that is equal to the bit has the shortest bar.
    lengths = [max(gradients[name]["times"], 0.01) for name in names]
    colours = [_BAD if gradients[name]["cause"] else LINES[0] for name in names]
    drawn = {
        "type": "bar", "orientation": "h", "y": list(map(label, names)), "x": lengths,
        "marker": {"color": colours}, "hovertemplate": "%{x:.3g} × rounding<br>%{y}<extra></extra>",
    }  # fmt: skip
    layout = {
        "height": 110 + 18 * len(names), "bargap": 0.2,
        "xaxis": {"type": "log", "title": {"text": "distance from one process's, in units of measured rounding"}},
        "yaxis": {"autorange": "reversed", "automargin": True, "dtick": 1},
        "shapes": [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": allowed, "x1": allowed,
                    "line": {"color": _BAD, "dash": "dash", "width": 1.5}}],
    }  # fmt: skip
    rows = [
        [
            words(name),
            Cell(f"{gradient['times']:.3g}", gradient["times"]),
            words(gradient["cause"] or "within rounding"),
        ]
        for name, gradient in gradients.items()
    ]
    remark = f"Step {verdict['step']}, in the order of the forward. Allowed is {allowed:g} × rounding, the dashed line."
    return [
        page.figure("gradients", Figure([drawn], layout)), paragraph(remark, "faint"),
        table(["parameter", ">× rounding", ""], rows),
    ]  # fmt: skip
