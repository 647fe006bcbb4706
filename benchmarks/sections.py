"""What the sections of benchmarks/page.md show beside the keys of their results: figures made of figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from .common import median_ci
from .markdown import interval, ratios

Values = dict[str, Any]
OURS = "shardkit"


def speeds(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Tokens a second of each step."""
    return [tokens / seconds for seconds, tokens in steps]


def sft(result: Values) -> Values:
    settings = {
        name: {**setting, "speeds": {arm: speeds(steps) for arm, steps in setting["steps"].items()}}
        for name, setting in result["settings"].items()
    }
    if "tokenise_s" not in result:
        return {"settings": settings}
    faster = ratios(result["tokenise_s"]["datasets.map"], result["tokenise_s"][OURS])
    pairs = f"{len(faster)} pairs in turns" if len(faster) > 1 else "one pair"
    throughput = interval(median_ci(faster), 2) if len(faster) >= 6 else f"{median(faster):.2f}"
    return {"settings": settings, "pairs": pairs, "throughput": throughput}


def published(result: Values) -> Values:
    """Peaks that others published of real GPUs beside those of the same programs in a rehearsal."""
    return {"within": sum(abs(row["rehearsed"] / row["published"] - 1) <= 0.05 for row in result["rows"])}


def plan_accuracy(result: Values) -> Values:
    errors: dict[str, list[float]] = {}
    for name, row in result["cases"].items():
        strategy = name.split(" ")[1]
        engine = "DeepSpeed ZeRO" if strategy.startswith("zero") else strategy.partition("@")[0]
        errors.setdefault(engine, []).append(row["error"])
    furthest = sorted(result["cases"].items(), key=lambda case: -abs(case[1]["error"]))[:5]
    commits = dict.fromkeys(row.get("measured_at") or result.get("measured_at") for row in result["cases"].values())
    return {"errors_of": errors, "furthest": furthest, "measured_at": ", ".join(str(commit)[:10] for commit in commits)}


def auto(result: Values) -> Values:
    """`in_margin`: the caps whose best setting needs some of the margin that the search leaves free."""
    peaks = {tuple(run["settings"]): run["peak"] for run in result["grid"]}
    both = [(run["speed"], run["predicted_tokens_per_s"]) for run in result["grid"] if run["predicted_tokens_per_s"]]
    return {
        "compared": both, "correlation": rank_correlation(both),
        "in_margin": [
            row["cap_mib"]
            for row in result["caps"]
            if peaks[tuple(row["best"])] * (1 + row["uncertainty"]) > row["cap_mib"] * 2**20
        ],
    }  # fmt: skip


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation."""

    def ranks(values: list[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return sorted(range(len(order)), key=order.__getitem__)

    places = [ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    n = len(pairs)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*places, strict=True)) / (n * (n * n - 1))


def speed(result: Values) -> Values:
    """The range of the predictions' errors."""
    errors = [row["predicted"] / row["measured"] - 1 for row in result["rows"]]
    return {"lowest": min(errors), "highest": max(errors)}


FIGURES: dict[str, Callable[[Any], Values]] = {
    function.__name__: function for function in (sft, published, plan_accuracy, auto, speed)
}
"""By the section's name; other sections show their results alone."""
