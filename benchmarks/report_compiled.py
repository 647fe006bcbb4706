"""The section of docs/benchmarks.md on compiled training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .markdown import machine, mib, paragraph, table

KINDS = ("first", "step", "ragged", "evaluation", "resumed")


def compiled(result: dict[str, Any]) -> str:
    cases: dict[str, dict[str, Any]] = result["cases"]
    ran = {name: found for name, found in cases.items() if "spans" in found}
    whole = {name: found for name, found in ran.items() if " eager " not in name}
    broken = Counter[str]()
    for name, found in whole.items():
        broken[name.partition("@")[0]] += sum(span["breaks"] for span in found["spans"])
    breaks = ", ".join(f"{number} under {engine}" for engine, number in broken.items() if number) or "none"
    parts = [
        "## Compiled training on an emulated card",
        "",
        paragraph(
            "`python -m benchmarks compiled`, on **emulated** cards that compute nothing: torch.compile, Triton and "
            "CUDA graphs are the real ones, and nothing here is a speed. Two blocks, bf16, two micro-batches a step; "
            "the epoch's last batch is smaller, and so are the batches of evaluations; a resumed run compiles anew, as "
            "a new process does. Products are ATen's: autotuning them says nothing here."
        ),
        "",
        paragraph(
            f"{len(cases)} of the {len(cases) + len(result['not_run'])} cases in benchmarks/compiled_cases.txt were "
            f"run: {len(whole)} compiled ones work (graph breaks: {breaks}), "
            f"{_number(cases, 'refused')} are refused, {_number(cases, 'error')} fail, {_number(cases, 'unfinished')} "
            "were not finished in the time given. Nothing is computed, so a number that is saved may not be finite: "
            "such a run cannot be saved, or has no optimizer state to resume from."
        ),
        "",
        *_reasons(cases),
        "Columns: graphs of the first step; graphs that were compiled later, in steps / in the smaller batch / in",
        "evaluations / in the resumed run's steps; graph breaks; CUDA graphs replayed in a step (their own pools count",
        "as reserved, not as allocated); peaks of steady steps, MiB: planned for eager steps, eager, compiled.",
        "",
        _table(whole, cases, result["planned"]),
        "",
        paragraph(_memory(whole, cases, result["planned"])),
        "",
        machine(result["environment"]),
        "",
    ]
    return "\n".join(parts)


def _number(cases: dict[str, dict[str, Any]], kind: str) -> int:
    return sum(kind in found for found in cases.values())


def _reasons(cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    refused = Counter(found["refused"].splitlines()[0] for found in cases.values() if "refused" in found)
    for reason, number in refused.most_common():
        yield f"- refused ({number}): {reason}"
    for name, found in cases.items():
        if "error" in found:
            yield f"- fails: {name}: {last_line(found['error'])}"
    if refused or _number(cases, "error"):
        yield ""


def last_line(error: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines)[-1][:300].replace("|", "/")


def spans(found: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [span for span in found["spans"] if span["span"].startswith(kind)]


def graphs(found: dict[str, Any], kind: str) -> int:
    """Graphs that were compiled in spans of this kind."""
    return sum(span["graphs"] for span in spans(found, kind))


def peak(found: dict[str, Any]) -> int:
    """The largest peak of steady steps, in bytes."""
    return max(span["peak"] for span in spans(found, "step"))


def reserved(found: dict[str, Any]) -> int:
    return max(span["reserved"] for span in spans(found, "step"))


def eager(name: str) -> str:
    """The name of the case that trains the same without compiling; a budget keeps as much as no policy does."""
    engine, _, policy, _, *other = name.split(" ")
    return " ".join([engine, "eager", policy.replace("budget", "none"), "default", *other])


def _table(whole: dict[str, dict[str, Any]], cases: dict[str, Any], planned: dict[str, Any]) -> str:
    rows = []
    for name, found in whole.items():
        engine, scope, policy, mode, *other = name.split(" ")
        own, plain = peak(found), cases.get(eager(name), {})
        later = [graphs(found, kind) for kind in KINDS[1:]]
        compiling = max(span["peak"] for span in spans(found, "first"))
        rows.append([
            f"`{engine}` {scope}", policy, mode, *(other or [""]),
            str(graphs(found, "first")), " / ".join(map(str, later)), str(sum(s["breaks"] for s in found["spans"])),
            str(spans(found, "step")[-1]["graph_launches"] or "–"),
            _of(planned.get(eager(name), {}).get("allocated")), _of(peak(plain) if "spans" in plain else None),
            mib(own), mib(compiling) if compiling > own else "",
            f"{_of(reserved(plain) if 'spans' in plain else None)} → {mib(reserved(found))}",
        ])  # fmt: skip
    head = (
        "", "policy", "mode", "other", "graphs", "later", "breaks", "replayed", "plan", "eager", "compiled",
        "first step, if more", "reserved, eager → compiled",
    )  # fmt: skip
    return table(head, rows)


def _of(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else mib(n_bytes)


def _memory(whole: dict[str, dict[str, Any]], cases: dict[str, Any], planned: dict[str, Any]) -> str:
    pairs = [(peak(f), peak(cases[eager(n)])) for n, f in whole.items() if "spans" in cases.get(eager(n), {})]
    over = [(peak(f), planned[eager(n)]["allocated"]) for n, f in whole.items() if eager(n) in planned]
    said = []
    if pairs:
        ratios = sorted(own / other for own, other in pairs)
        said.append(f"Over eager steps, peaks are {100 * (ratios[0] - 1):+.1f} to {100 * (ratios[-1] - 1):+.1f} %.")
    if over:
        ratios = sorted(own / plan for own, plan in over)
        above = sum(ratio > 1.0 for ratio in ratios)
        said.append(
            f"Over the plan, which plans eager steps, {100 * (ratios[0] - 1):+.1f} to {100 * (ratios[-1] - 1):+.1f} %; "
            f"{above} of {len(ratios)} are above it."
        )
    return " ".join(said)
