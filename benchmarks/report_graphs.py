"""The section of docs/benchmarks.md on random module graphs."""

from __future__ import annotations

from typing import Any

from .markdown import machine, section, table

OUTCOMES = {
    "equal": "equal", "refused": "refused by name", "wrong": "wrong", "traceback": "traceback", "hang": "hang",
    "stray": "refused too late, or for another reason",
}  # fmt: skip


def graphs(result: dict[str, Any]) -> str:
    """Counts by engine and outcome of each recorded campaign, `before` and `after`."""
    parts: list[str] = []
    for name, campaign in result.items():
        parts += [f"{TITLES.get(name, name)}:", _table(campaign), machine(campaign["environment"])]
    return section(
        "Random module graphs",
        "`python -m tests.strategies.graphs --engines all`: random models that mix two to five features (shared "
        "and tied parts, parts reached from outside, experts, recursion, gradients inside forward, changes in "
        "place, parametrizations, hooks, …) train 6 steps on 2 ranks (hsdp: 4), a quarter of them saved and "
        "resumed under another engine in between. Equal: losses within 1e-5 and gradient norms within 1e-4 of one "
        "process in plain torch. Refused by name: before the first update that would be wrong, for a reason of the "
        "closed list in tests/strategies/graphs/refusals.py.",
        *parts,
    )


TITLES = {
    "before": "Before the features were trained on purpose",
    "after_zero": "With ddp and ZeRO mended, fsdp not yet (its rows are graphs that were resumed under it)",
    "after": "Now",
}


def _table(campaign: dict[str, Any]) -> str:
    rows = [
        [engine, *(str(counts.get(outcome, 0)) for outcome in OUTCOMES)]
        for engine, counts in campaign["counts"].items()
    ]
    return table(["engine", *OUTCOMES.values()], rows)


def draws(result: dict[str, Any]) -> str:
    """Counts by outcome of configs drawn at random."""
    counts = result["counts"]
    names = {**OUTCOMES, "no reference": "no single process to compare with"}
    return section(
        "Random configs",
        "`python -m tests.config.draws`: a task, a strategy and two to five keys of the schema with values drawn "
        f"at random, {sum(counts.values())} times; 3 steps on 2 ranks against one process. Losses agree within "
        "2e-5 and norms within 5e-4 in fp32, within 3e-2 and 0.3 where another type computes or travels.",
        table(list(names.values()), [[str(counts.get(name, 0)) for name in names]]),
        environment=result["environment"],
    )
