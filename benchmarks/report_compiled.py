"""The section of docs/benchmarks.md on compiled training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from .markdown import UNKNOWN, mib

KINDS = ("first", "step", "ragged", "evaluation", "resumed")


def compiled(result: dict[str, Any]) -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = result["cases"]
    ran = {name: case for name, case in cases.items() if "spans" in case}
    whole = {name: case for name, case in ran.items() if " eager " not in name}
    broken = {name: n for name, case in whole.items() if (n := sum(span["breaks"] for span in case["spans"]))}
    return {
        "run": len(cases), "listed": len(cases) + len(result["not_run"]), "working": len(whole), "broken": len(broken),
        "refused": _number(cases, "refused"), "failed": _number(cases, "error"),
        "unfinished": _number(cases, "unfinished"), "isolation": _isolated(result["isolated"], cases),
        "reasons": list(_reasons(cases)), "breaks": list(_breaks(broken, cases)),
        "lines": list(_lines(whole, cases, result["planned"])),
        "memory": list(_memory(whole, cases, result["planned"])),
    }  # fmt: skip


def _isolated(alone: dict[str, dict[str, Any]], cases: dict[str, dict[str, Any]]) -> str:
    """How cases that had processes and caches of their own differ from those that shared them."""
    both = {name: (case, cases[name]) for name, case in alone.items() if "spans" in case and "spans" in cases[name]}
    counted = ("span", "graphs", "recompiled", "breaks", "graph_launches")
    equal = sum([[s[key] for key in counted] for s in a["spans"]] == [[s[key] for key in counted] for s in b["spans"]]
                for a, b in both.values())  # fmt: skip
    off, off_reserved = (
        max((abs(x / y - 1) for a, b in both.values() if (x := take(a)) and (y := take(b))), default=0.0)
        for take in (peak, reserved)
    )
    return (
        f"{len(both)} of the cases ({sum('@1' not in name for name in both)} of several ranks) ran again in processes "
        f"and caches of their own, all ranks compiling: {equal} have equal counts; peaks of steady steps differ by at "
        f"most {100 * off:.2f} %, reserved memory by {100 * off_reserved:.1f} %."
    )


def _number(cases: dict[str, dict[str, Any]], kind: str) -> int:
    return sum(kind in case for case in cases.values())


def _reasons(cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    refused = Counter(case["refused"].splitlines()[0] for case in cases.values() if "refused" in case)
    for reason, number in refused.most_common():
        yield f"refused ({number}): {reason}"
    for name, case in cases.items():
        if "error" in case:
            yield f"fails: {name}: {last_line(case['error'])}"


def _breaks(broken: dict[str, int], cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, number in broken.items():
        yield f"graph breaks: {name}: {number} ({', '.join(cases[name]['break_reasons'])})"


def last_line(error: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines)[-1][:300].replace("|", "/")


def spans(case: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [span for span in case["spans"] if span["span"].startswith(kind)]


def graphs(case: dict[str, Any], kind: str) -> int:
    """Graphs that were compiled in spans of this kind."""
    return sum(span["graphs"] for span in spans(case, kind))


def peak(case: dict[str, Any], kind: str = "step") -> int | None:
    """The largest peak of steady steps, in bytes; None if it is not known."""
    return max((span["peak"] for span in spans(case, kind) if "peak" in span), default=None)


def reserved(case: dict[str, Any]) -> int | None:
    return max((span["reserved"] for span in spans(case, "step") if "reserved" in span), default=None)


def eager(name: str) -> str:
    """The name of the case that trains the same without compiling; a budget keeps as much as no policy does."""
    engine, _, policy, _, *other = name.split(" ")
    return " ".join([engine, "eager", policy.replace("budget", "none"), "default", *other])


def _lines(whole: dict[str, dict[str, Any]], cases: dict[str, Any], planned: dict[str, Any]) -> Iterator[list[str]]:
    for name, case in whole.items():
        engine, scope, policy, mode, *other = name.split(" ")
        largest, plain = peak(case), cases.get(eager(name), {"spans": []})
        later = [graphs(case, kind) for kind in KINDS[1:]]
        compiling = peak(case, "first")
        yield [
            f"`{engine}` {scope}", policy, mode, *(other or [""]),
            str(graphs(case, "first")), " / ".join(map(str, later)), str(sum(s["breaks"] for s in case["spans"])),
            str(spans(case, "step")[-1]["graph_launches"] or "–"),
            _of(planned.get(eager(name), {}).get("allocated")), _of(peak(plain)),
            _of(largest), mib(compiling) if largest and compiling and compiling > largest else "",
            f"{_of(reserved(plain))} → {_of(reserved(case))}",
        ]  # fmt: skip


def _of(n_bytes: int | None) -> str:
    return UNKNOWN if n_bytes is None else mib(n_bytes)


def _memory(whole: dict[str, dict[str, Any]], cases: dict[str, Any], planned: dict[str, Any]) -> Iterator[list[str]]:
    """Peaks of compiled steps over those of eager steps and over plans, by group: cases, median, range."""
    for group, names in _groups(whole):
        compiled_peaks = {name: n_bytes for name in names if (n_bytes := peak(whole[name]))}
        plain = {name: peak(cases[eager(name)]) for name in compiled_peaks if "spans" in cases.get(eager(name), {})}
        over_eager = [compiled_peaks[name] / n_bytes for name, n_bytes in plain.items() if n_bytes]
        over_plan = [
            n_bytes / planned[eager(name)]["allocated"]
            for name, n_bytes in compiled_peaks.items()
            if eager(name) in planned
        ]
        if over_eager or over_plan:
            above = sum(ratio > 1 for ratio in over_plan)
            yield [group, _range(over_eager), _range(over_plan), f"{above} of {len(over_plan)}"]


def _groups(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Groups of the cases without other settings, by each axis, and those with them by setting."""
    plain = [name for name in names if len(name.split(" ")) == 4]
    for axis, title in enumerate(("", "scope", "policy", "mode")):
        values = dict.fromkeys(name.split(" ")[axis] for name in plain)
        for value in values:
            yield f"{title} `{value}`".strip(), [name for name in plain if name.split(" ")[axis] == value]
    others = dict.fromkeys(name.split(" ")[4] for name in names if len(name.split(" ")) == 5)
    for other in others:
        yield f"`{other}`", [name for name in names if name.endswith(f" {other}")]


def _range(ratios: list[float]) -> str:
    if not ratios:
        return UNKNOWN
    percent = [100 * (ratio - 1) for ratio in ratios]
    return f"{len(percent)}: {median(percent):+.1f} % [{min(percent):+.1f}, {max(percent):+.1f}]"
