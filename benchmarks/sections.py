"""What the sections of benchmarks/page.md show beside the keys of their results: figures made of figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from .common import median_ci
from .markdown import change, interval, mib, ratios
from .other_loops import GOALS
from .other_loops_jobs import LOOPS
from .report_compiled import compiled

Values = dict[str, Any]
OURS, NOT_YET = "shardkit", "not yet measured"

WAITS = {
    "synchronisations": ["device_sync", "stream_sync"], "event waits": ["event_sync"],
    "blocking or pageable copies": ["copy_blocking", "copy_pageable"], "launches": ["launch", "gemm"],
}  # fmt: skip
"""Columns → the calls of CUDA's runtime that they sum."""


def peers_on_cards(result: Values) -> Values:
    return {"lines": [line for engine, arms in result["engines"].items() for line in _on_cards(engine, arms)]}


def _on_cards(engine: str, models: Values) -> Iterator[list[str]]:
    small, full = models.get("small", {}), models.get("355m", {})
    first = next(iter(small.values()), {}).get("losses", [])
    for arm in dict.fromkeys([*small, *full]):
        losses, seen = small.get(arm, {}).get("losses"), full.get(arm, {})
        apart = max(map(abs, (a - b for a, b in zip(losses, first, strict=True)))) if losses else None
        cells = [_error(small.get(arm, {})) if apart is None else f"{apart:.0e}"]
        if "peak" not in seen:
            yield [engine, arm, *cells, _error(seen), *[""] * (len(WAITS) + 2)]
            continue
        peak = (f"{seen['peak'][kind] / 2**30:.3f}" for kind in ("allocated", "reserved"))
        yield [engine, arm, *cells, *peak, f"{1e3 * median(seen['cpu_s']):.0f}", *_sums(WAITS, seen["calls"])]


def _error(figures: Values) -> str:
    """An arm's error, or that it has no result yet."""
    return str(figures.get("error", NOT_YET)).replace("|", "\\|")


def _sums(columns: Mapping[str, Sequence[str]], calls: Mapping[str, int]) -> list[str]:
    return [str(sum(calls.get(name, 0) for name in names)) for names in columns.values()]


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


OUTCOMES = {
    "equal": "equal", "refused": "refused by name", "wrong": "wrong", "traceback": "traceback", "hang": "hang",
    "stray": "refused too late, or for another reason",
}  # fmt: skip
CAMPAIGNS = {
    "before": "Before the features were trained on purpose",
    "after_zero": "With ddp and ZeRO mended, fsdp not yet (its rows are graphs that were resumed under it)",
    "before_branches": "Before parts of blocks that only some ranks use, and lists named experts, were trained",
    "after": "Now",
}


def graphs(result: Values) -> Values:
    """Counts by engine and outcome of each recorded campaign."""
    return {"campaigns": result, "titles": CAMPAIGNS, "outcomes": OUTCOMES}


def draws(result: Values) -> Values:
    """Counts by outcome of configs drawn at random."""
    return {"outcomes": {**OUTCOMES, "no reference": "no single process to compare with"}}


def published(result: Values) -> Values:
    """Peaks that others published of real GPUs beside those of the same programs in a rehearsal."""
    return {"within": sum(abs(row["rehearsed"] / row["published"] - 1) <= 0.05 for row in result["rows"])}


MODES = ("fp32", "bf16", "fp16", "pure_bf16", "fp8")
PARITY_SETS = {
    "pairs": "Every engine, precision, policy, offload, accumulation, clipping and averaging with each other",
    "full": "Every strategy in every precision under every activation policy",
    "late": "Offload and prefetch, with late copies and poisoned new memory",
}


def cuda_parity(result: Values) -> Values:
    """By title of the set: how many of its cases ran, those that do not agree, and the table's rows and columns."""
    shown = {}
    for name, of_set in result["sets"].items():
        lines = of_set["rows"]
        shown[PARITY_SETS[name]] = {
            **of_set,
            "run": sum(row["cases"] for row in lines.values()),
            "wrong": [f"{case}: {'; '.join(w)}" for row in lines.values() for case, w in row["wrong"].items()],
            "engines": list(dict.fromkeys(key.split(" ")[0] for key in lines)),
            "modes": [mode for mode in MODES if any(key.endswith(f" {mode}") for key in lines)],
        }
    return {"shown": shown}


CALLS_OF = {
    "device syncs": ["device_sync"], "stream syncs": ["stream_sync"], "event waits": ["event_sync"],
    "blocking copies": ["copy_blocking"], "pageable copies": ["copy_pageable"], "launches": ["launch", "gemm"],
    "allocations": ["malloc", "free", "mem_create", "mem_map", "host_alloc"],
}  # fmt: skip
ADDED = ("added_ms_without_emulation", "added_thread_ms_without_emulation", "added_wall_ms_without_emulation",
         "added_ms")  # fmt: skip


def host_cost(result: Values) -> Values:
    lines = []
    counted = {engine: figures for engine, figures in result["engines"].items() if "arms" in figures}
    for engine, figures in counted.items():
        arms = [figures["arms"][arm] for arm in (OURS, "hand-written")]
        counts = [" / ".join(pair) for pair in zip(*(_sums(CALLS_OF, arm["calls"]) for arm in arms), strict=True)]
        made = [arm.get("python_calls") for arm in arms]
        counts.append("–" if None in made else " / ".join(f"{n:.0f}" for n in made))
        added = [interval(figures[key], 1) if key in figures else "–" for key in ADDED]
        lines.append([f"{engine}@{figures['ranks']}", *counts, *added])
    clocks = {engine: figures["clock"] for engine, figures in result["engines"].items() if "clock" in figures}
    return {
        "lines": lines, "clocks": {engine: {**clock, "empty": empty(clock)} for engine, clock in clocks.items()},
        "durations": next(iter(clocks.values()))["durations_us"] if clocks else {},
    }  # fmt: skip


def empty(clock: Values) -> float:
    """The share of shardkit's step in which the card's queue was empty; on one stream."""
    ours = clock["arms"][OURS]
    return max(0.0, 1 - ours["busy_s"] / ours["step_s"])


def plan_accuracy(result: Values) -> Values:
    errors: dict[str, list[float]] = {}
    for name, row in result["cases"].items():
        strategy = name.split(" ")[1]
        engine = "DeepSpeed ZeRO" if strategy.startswith("zero") else strategy.partition("@")[0]
        errors.setdefault(engine, []).append(row["error"])
    furthest = sorted(result["cases"].items(), key=lambda case: -abs(case[1]["error"]))[:5]
    commits = dict.fromkeys(row.get("measured_at") or result.get("measured_at") for row in result["cases"].values())
    return {"errors_of": errors, "furthest": furthest, "measured_at": ", ".join(str(commit)[:10] for commit in commits)}


TOOLS = {
    "deepspeed": "DeepSpeed `estimate_zero2/3_model_states_mem_needs`",
    "accelerate": "`accelerate estimate-memory`",
    "fsdpmemtracker": "torch `FSDPMemTracker`, fake tensors",
    "memtracker": "torch `MemTracker`, fake tensors",
}


def plan_peers(result: Values) -> Values:
    return {"tools": TOOLS, "failed": sum(len(spreads["failed"]) for spreads in result["errors"].values())}


def other_loops(result: Values, on: str = "cpu") -> Values:
    """One row for each listed case, run or not."""
    goals, loops = GOALS[on], [loop for loop in LOOPS if loop.on == on]
    lines, within, compared = [], 0, 0
    for loop in loops:
        case = result["cases"].get(loop.name, {})
        measured, predicted = (case.get(kind, {"failed": "not run"}) for kind in ("measured", "predicted"))
        start = [loop.name, loop.model, str(loop.ranks)]
        if "allocated" not in measured:
            lines.append([*start, "not measured", *[""] * len(goals)])
        elif "allocated" not in predicted:
            lines.append([*start, mib(measured["allocated"]), "not planned", *[""] * (len(goals) - 1)])
        else:
            errors = {key: predicted[key] / measured[key] - 1 for key in goals}
            compared += 1
            within += all(abs(errors[key]) <= goal for key, goal in goals.items())
            lines.append([*start, mib(measured["allocated"]), *(change(error, 2) for error in errors.values())])
    return {
        "emulated": on == "emulated", "listed": len(loops), "compared": compared, "within": within,
        "limits": " and ".join(f"{100 * goal:.0f} % {key}" for key, goal in goals.items()),
        "keys": list(goals), "lines": lines,
    }  # fmt: skip


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


def activation(result: Values) -> Values:
    backends = result["attention"].values()
    return {"equal": all(r["gradients_equal"] for backend in backends for r in backend["policies"].values())}


def mutants(result: Values) -> Values:
    runs = {name: result[name] for name in ("before", "after") if result.get(name)}
    latest = list(runs.values())[-1]
    lines = [[f"`{module}`", *_killed([run["modules"][module] for run in runs.values()])] for module in result["tests"]]
    lines.append(["**all**", *_killed([_total(run) for run in runs.values()])])
    survived = [
        (name, module, mutant)
        for name, run in runs.items()
        for module, counts in run["modules"].items()
        for mutant in counts["survived"]
    ]
    equivalent = [(module, mutant) for module, counts in latest["modules"].items() for mutant in counts["equivalent"]]
    return {"runs": runs, "lines": lines, "survived": survived, "equivalent": equivalent}


def _total(run: Values) -> Values:
    """One row for all modules."""
    modules = list(run["modules"].values())
    total: Values = {key: sum(module[key] for module in modules) for key in ("asked", "killed", "timeouts")}
    return total | {"equivalent": [mutant for module in modules for mutant in module["equivalent"]]}


def _killed(runs: list[Values]) -> list[str]:
    killed = [f"{run['killed']}" + (f" ({run['timeouts']} by time)" if run["timeouts"] else "") for run in runs]
    shares = [f"{100 * run['killed'] / max(run['asked'] - len(run['equivalent']), 1):.0f} %" for run in runs]
    return [str(runs[-1]["asked"]), str(len(runs[-1]["equivalent"])), *killed, *shares]


FIGURES: dict[str, Callable[[Any], Values]] = {
    **{
        function.__name__: function
        for function in (
            sft, graphs, draws, published, cuda_parity, host_cost, plan_accuracy, plan_peers, other_loops, auto,
            activation, mutants, compiled, peers_on_cards,
        )
    },
    "other_loops_on_cards": partial(other_loops, on="emulated"),
}  # fmt: skip
"""By the section's name; other sections show their results alone."""
