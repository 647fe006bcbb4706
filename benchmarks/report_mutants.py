"""The section of docs/benchmarks.md on mutation testing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .markdown import listed, section, table


def mutants(result: dict[str, Any]) -> str:
    before, after = result.get("before"), result.get("after")
    runs = [run for run in (before, after) if run]
    rows = [[f"`{module}`", *_cells([run["modules"][module] for run in runs])] for module in result["tests"]]
    rows.append(["**all**", *_cells([_total(run) for run in runs])])
    names = [name for name, run in (("before", before), ("after", after)) if run]
    head = ["module", "mutants", "equivalent", *(f"killed {name}" for name in names), *(f"of {name}" for name in names)]
    survivors = listed(_survivors(dict(zip(names, runs, strict=True))))
    equivalent = listed(_equivalent(runs[-1]))
    return section(
        "Mutants that the tests kill",
        _intro(result, before),
        table(head, rows),
        *(["Mutants that no chosen test kills:", *survivors] if survivors else []),
        *(["Equivalent mutants:", *equivalent] if equivalent else []),
        environment=result["environment"],
    )


def _intro(result: dict[str, Any], before: dict[str, Any] | None) -> str:
    earlier = ""
    if before:
        commit = before["tests_commit"][:10]
        earlier = f" Before: commit {commit}, whose modules differ from today's in the text of messages only."
    return (
        f"`python -m benchmarks.mutants`: {result['count']} small errors in each module, drawn with seed "
        f"{result['seed']} from all that the operators of cosmic-ray {result['cosmic_ray']} make there (those on `|` "
        "left out: nearly all stand in annotations). Each error is put into a copy of the checkout, and the default "
        "tests chosen for the module run there, their ranks included. A test that fails kills the mutant, and so do "
        f"tests that take {result['slower']} times as long as without it.{earlier} The shares leave out the equivalent "
        "mutants, which behave as the original does; goal: at least 85 %."
    )


def _total(run: dict[str, Any]) -> dict[str, Any]:
    """One row for all modules."""
    modules = list(run["modules"].values())
    total: dict[str, Any] = {key: sum(one[key] for one in modules) for key in ("asked", "killed", "timeouts")}
    return total | {"equivalent": [same for one in modules for same in one["equivalent"]]}


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    equivalent = len(runs[-1]["equivalent"])
    killed = [f"{one['killed']}" + (f" ({one['timeouts']} by time)" if one["timeouts"] else "") for one in runs]
    shares = [f"{100 * one['killed'] / max(one['asked'] - len(one['equivalent']), 1):.0f} %" for one in runs]
    return [str(runs[-1]["asked"]), str(equivalent), *killed, *shares]


def _survivors(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, run in runs.items():
        for module, one in run["modules"].items():
            for change in one["survived"]:
                yield f"{name}, `{module}`: {_change(change)}"


def _equivalent(run: dict[str, Any]) -> Iterator[str]:
    for module, one in run["modules"].items():
        for change in one["equivalent"]:
            yield f"`{module}`: {_change(change)}: {change['reason']}"


def _change(change: dict[str, str]) -> str:
    return f"`` {change['was']} `` → " + (f"`` {change['becomes']} ``" if change["becomes"] else "nothing")
