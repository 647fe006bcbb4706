"""`python -m benchmarks.report` makes docs/benchmarks.md of benchmarks/results/*.json: no figure is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .common import REPO, RESULTS

PAGE = REPO / "docs" / "benchmarks.md"
INTRO = """# Benchmarks

Generated from `benchmarks/results/*.json` by `python -m benchmarks.report`; a test compares. Ratios are medians of
pairs measured in one run, in brackets the distribution-free 95 % interval of the median. Absolute times say little
beyond the machine named; ratios below 1 are in shardkit's favour.
"""


def page() -> str:
    """The whole of docs/benchmarks.md."""
    parts = [INTRO]
    for name, section in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(section(json.loads(path.read_text())))
    return "\n".join(parts)


def overhead(result: dict[str, Any]) -> str:
    rows = [
        f"| {engine} | {interval(r['step_time']['ratio'], 3)} | {r['peak_tensor_memory']['ratio']:.4f} "
        f"| {interval(r['first_step']['ratio'], 3)} | {100 * r['ledger_share_of_step_time']:.2f} % "
        f"| {r['loss_difference']:.0e} |"
        for engine, r in result["engines"].items()
    ]
    goals = result["goals"]
    return "\n".join([
        "## Overhead over the shortest hand-written loop",
        "",
        "`python -m benchmarks.overhead`: the same model, weights, data order and settings, 2 CPU ranks over gloo, our",
        f"ledger, metrics and progress on. Goals: step time ≤ {goals['step_time']}, peak tensor memory ≤ "
        f"{goals['peak_tensor_memory']}, command to first step ≤ {goals['first_step']}.",
        "",
        "| engine | step time | peak tensor memory | command to first step | ledger / step time | loss difference |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        machine(result["environment"]),
        "",
    ])  # fmt: skip


def startup(result: dict[str, Any]) -> str:
    named = {
        "help_vs_plain_typer_app": "`shardkit --help` over a bare typer application (goal ≤ 1.5)",
        "help_vs_default_typer_app": "`shardkit --help` over a bare typer application with typer's default (rich) help",
    }
    rows = [f"| {text} | {interval((result[k]['ratio'], *result[k]['interval_95']), 3)} |" for k, text in named.items()]
    imported = result["import_shardkit_ms"]
    rows.append(
        f"| `import shardkit`, ms (goal < 50) | {interval((imported['median'], *imported['interval_95']), 1)} |"
    )
    return "\n".join([
        "## Start of the command line",
        "",
        f"`python -m benchmarks.startup`, {result['pairs']} pairs.",
        "",
        "| measured | median [95 %] |",
        "|---|---|",
        *rows,
        "",
        machine(result["environment"]),
        "",
    ])  # fmt: skip


def interval(values: Any, digits: int) -> str:
    middle, low, high = values
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def machine(env: dict[str, Any]) -> str:
    gpus = ", ".join(env["gpus"]) or "no GPU"
    return (
        f"Measured {env['date'][:10]} at commit {str(env['commit'])[:10]} on {env['cpu']}, {env['cores']} cores, "
        f"{env['memory_gib']} GiB, {gpus}; Python {env['python']}, torch {env['torch']}, deepspeed {env['deepspeed']}."
    )


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {"overhead": overhead, "startup": startup}


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE}")
