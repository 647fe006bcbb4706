"""What the sections of benchmarks/page.md need beside the keys of their results: rows, and figures made of figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from .common import median_ci
from .host_cost import ENGINES
from .markdown import interval, listed, machine, mib, rows, table
from .other_loops import GOALS, LOOPS

Values = dict[str, Any]
OURS, NOT_YET = "shardkit", "not yet measured"


def versions(result: Values) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["packages"].items())


def scaled(by: float, values: Iterable[float], digits: int) -> str:
    return interval([by * value for value in values], digits)


def overhead(result: Values) -> Values:
    return {"rows": rows(
        [engine, interval(r["step_time"]["ratio"], 3),
         interval(r["processor_time"]["ratio"], 3) if "processor_time" in r else "–",
         f"{r['peak_tensor_memory']['ratio']:.4f}", interval(r["first_step"]["ratio"], 3),
         f"{100 * r['ledger_share_of_step_time']:.2f} %", f"{r['loss_difference']:.0e}"]
        for engine, r in result["engines"].items()
    )}  # fmt: skip


def peers(result: Values) -> Values:
    engines = {name: found for name, found in result["engines"].items() if "beside" in found}
    arms = [(engine, arm, found) for engine, found in engines.items() for arm in found["step_s"]]
    return {
        "ratios": rows(
            [engine, arm, interval(r["step_time"], 3), interval(r["first_step"], 3),
             f"{found['peak_bytes'][OURS] / found['peak_bytes'][arm]:.4f}" if "peak_bytes" in found else NOT_YET,
             str(len(found["step_s"][arm])), str(len(found["first_step_s"][arm]))]
            for engine, found in engines.items()
            for arm, r in found["beside"].items()
        ),
        "medians": rows(
            [engine, arm, f"{1e3 * median(found['step_s'][arm]):.0f}", f"{median(found['first_step_s'][arm]):.2f}",
             mib(found["peak_bytes"][arm]) if "peak_bytes" in found else NOT_YET,
             f"{found['loss_difference'][arm]:.0e}"]
            for engine, arm, found in arms
        ),
        "refused": rows(
            [engine, arm, said.replace("|", "\\|").replace("\n", " ")]
            for engine, found in engines.items()
            for arm, said in found.get("refused", {}).items()
        ),
        "versions": versions(result),
    }  # fmt: skip


WAITS = {
    "synchronisations": ["device_sync", "stream_sync"], "event waits": ["event_sync"],
    "blocking or pageable copies": ["copy_blocking", "copy_pageable"], "launches": ["launch", "gemm"],
}  # fmt: skip
"""Columns → the calls of CUDA's runtime that they sum."""


def peers_on_cards(result: Values) -> Values:
    lines = (line for engine, found in result["engines"].items() for line in _on_cards(engine, found))
    return {"rows": rows(lines), "versions": versions(result)}


def _on_cards(engine: str, found: Values) -> Iterator[list[str]]:
    small, full = found.get("small", {}), found.get("355m", {})
    first = next(iter(small.values()), {}).get("losses", [])
    for arm in dict.fromkeys([*small, *full]):
        losses, seen = small.get(arm, {}).get("losses"), full.get(arm, {})
        apart = max(map(abs, (a - b for a, b in zip(losses, first, strict=True)))) if losses else None
        cells = [_error(small.get(arm, {})) if apart is None else f"{apart:.0e}"]
        if "peak" not in seen:
            yield [engine, arm, *cells, _error(seen), *[""] * (len(WAITS) + 2)]
            continue
        peak = (f"{seen['peak'][kind] / 2**30:.3f}" for kind in ("allocated", "reserved"))
        calls = (str(sum(seen["calls"].get(name, 0) for name in names)) for names in WAITS.values())
        yield [engine, arm, *cells, *peak, f"{1e3 * median(seen['cpu_s']):.0f}", *calls]


def _error(found: Values) -> str:
    """An arm's error, or that it has no result yet."""
    return str(found.get("error", NOT_YET)).replace("|", "\\|")


def sft(result: Values) -> Values:
    settings = result["settings"]
    return {
        "ratios": rows(
            [name, arm, interval(r["tokens_per_s"], 3), interval(r["first_step"], 3), f"{r['peak']:.3f}"]
            for name, found in settings.items()
            for arm, r in found["beside"].items()
        ),
        "medians": rows(
            [name, arm, f"{median(tokens / seconds for seconds, tokens in taken):.0f}",
             f"{median(found['first_step_s'][arm]):.2f}", mib(found["peak_bytes"][arm]),
             f"{found['loss_difference'][arm]:.0e}" if "loss_difference" in found else "other order"]
            for name, found in settings.items()
            for arm, taken in found["steps"].items()
        ),
        "tokenisation": _tokenisation(result) if "tokenise_s" in result else "",
        "versions": versions(result),
    }  # fmt: skip


def _tokenisation(result: Values) -> str:
    theirs, ours, packing = result["tokenise_s"]["datasets.map"], result["tokenise_s"][OURS], result["packing"]
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    times = interval(median_ci(ratios), 2) if len(ratios) >= 6 else f"{median(ratios):.2f}"
    pairs = f"{len(ratios)} pairs in turns" if len(ratios) > 1 else "one pair"
    at = result.get("data_measured")
    when = f" (at commit {at['commit'][:10]}; other processes at the start: {at['load']:.1f} CPUs' worth)" if at else ""
    return (
        f"Tokenisation with two processes, {pairs}: `shardkit tokenize` takes {median(ours):.1f} s, `datasets.map` "
        f"{median(theirs):.1f} s: {times} times the throughput{when}. Best-fit decreasing packs a million lengths of a "
        f"long-tailed mix in {packing['seconds']:.2f} s and fills {packing['fill']:.4f} of the positions."
    )


def data_wait(result: Values) -> Values:
    return {"rows": rows(
        [kind, workers, scaled(100, f["share"], 3), f"{100 * f['share_of_all']:.3f}", interval(f["step_s"], 2),
         f"{f['tokens_per_s'][0]:,.0f}"]
        for kind, by_workers in result["kinds"].items()
        for workers, f in by_workers.items()
    )}  # fmt: skip


def watch_cost(result: Values) -> Values:
    return {"rows": rows(
        [loop, f"{1e3 * f['step_s']:.0f}", interval(f["step_time"], 4), interval(f["processor_time"], 4),
         scaled(1e3, f["added_processor_s"], 2), f"{1e3 * f['inside_s']:.2f}",
         f"{100 * f['inside_s'] / f['step_s']:.2f} %", f"{f['measured']['load']:.1f}"]
        for loop, f in result["loops"].items()
    )}  # fmt: skip


def startup(result: Values) -> Values:
    named = {
        "help_vs_plain_typer_app": "`shardkit --help` over a bare typer application (goal ≤ 1.5)",
        "submit_help_vs_plain_typer_app": "`shardkit submit --help` over a bare command's (goal ≤ 1.5)",
        "help_vs_default_typer_app": "`shardkit --help` over a bare typer application with typer's default (rich) help",
    }
    ratios = [
        [text, interval((result[k]["ratio"], *result[k]["interval_95"]), 3)] for k, text in named.items() if k in result
    ]
    imported = result["import_shardkit_ms"]
    import_ms = interval((imported["median"], *imported["interval_95"]), 1)
    return {"rows": rows([*ratios, ["`import shardkit`, ms (goal < 50)", import_ms]])}


def checkpoint(result: Values) -> Values:
    goals, samples = result["goals"], result["samples"]
    measured = {
        f"save: throughput over that of a raw write (goal ≥ {goals['save_throughput']})": "save_throughput",
        f"load: throughput over that of a raw read (goal ≥ {goals['load_throughput']})": "load_throughput",
        f"background save: blocking time over the time of a save (goal ≤ {goals['async_blocking']})": "async_blocking",
        "training speed during a background save, over the speed without": "training_speed_during_async",
        "training time that a background save costs (blocked and slowed), over the time of a save": "async_cost",
        "save: time over that of `torch.save` of the full state dict (FSDP2, gathered on rank 0)": "over_torch_save",
        "save: time over that of DeepSpeed's `save_checkpoint` (ZeRO-2)": "over_deepspeed",
    }
    lines = rows([text, interval(result[key], 2)] for text, key in measured.items())
    return {"gib": samples["bytes"] / 2**30, "rounds": len(samples["rounds"]), "rows": lines}


def checkpoint_matrix(result: Values) -> Values:
    return {
        "steps": next(iter(result["modes"].values()))["steps_compared"],
        "sizes": ", ".join(f"{case} × {', '.join(map(str, worlds))}" for case, worlds in result["world_sizes"].items()),
        "rows": rows(
            [mode, str(r["pairs"]), str(r["pairs"] - len(r["not_bit_equal"])),
             f"{r['worst_loss_difference']:.1e} ({r['worst_pair']})"]
            for mode, r in result["modes"].items()
        ),
    }  # fmt: skip


def folder(result: Values) -> Values:
    return {"piece": mib(result["goals"]["beyond_bytes"]), "rows": rows(
        [engine, mib(r["folder_bytes"]), mib(r["shard_bytes"]), mib(r["beyond_bytes"]), f"{r['read_ratio']:.3f}",
         mib(sum(r["state_bytes"].values())), mib(r["build_bytes"])]
        for engine, r in result["engines"].items()
    )}  # fmt: skip


def crashes(result: Values) -> Values:
    def cases(kind: str) -> str:
        scenarios = result[kind]["by_scenario"].items()
        lines = [[name, str(row["cases"]), str(row["problems"])] for name, row in scenarios]
        return table(["scenario", "cases", "problems"], lines) if lines else ""

    return {"forked_table": cases("forked"), "real_table": cases("real")}


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
    """Counts by engine and outcome of each recorded campaign, `before` and `after`."""
    parts: list[str] = []
    for name, campaign in result.items():
        counts = [[e, *(str(n.get(kind, 0)) for kind in OUTCOMES)] for e, n in campaign["counts"].items()]
        shown = table(["engine", *OUTCOMES.values()], counts)
        parts += [f"{CAMPAIGNS.get(name, name)}:", shown]
        parts += [*([campaign["note"]] if "note" in campaign else []), machine(campaign["environment"])]
    return {"campaigns": "\n\n".join(parts), "measured": "by campaign"}


def draws(result: Values) -> Values:
    """Counts by outcome of configs drawn at random."""
    counts = result["counts"]
    names = {**OUTCOMES, "no reference": "no single process to compare with"}
    shown = table(list(names.values()), [[str(counts.get(name, 0)) for name in names]])
    return {"drawn": sum(counts.values()), "table": shown}


def published(result: Values) -> Values:
    """Peaks that others published of real GPUs beside those of the same programs in a rehearsal."""
    differences = [row["rehearsed"] / row["published"] - 1 for row in result["rows"]]
    lines = [
        [
            f"[{row['source']}]({row['url']})", row["case"], row["published_on"],
            f"{row['published']:g} {row['unit']} {row['measure']}", row["torch"], f"{row['rehearsed']:.2f}",
            f"{100 * difference:+.1f} %",
        ]
        for row, difference in zip(result["rows"], differences, strict=True)
    ]  # fmt: skip
    return {
        "table": table(["source", "setting", "on", "published", "torch", "rehearsed", "difference"], lines),
        "n_rows": len(lines), "n_sources": len({row["source"] for row in result["rows"]}),
        "within": sum(abs(difference) <= 0.05 for difference in differences),
        "programs": "\n".join(listed(f"{name}: {text}" for name, text in result["programs"].items())),
        "terms": "\n".join(listed(f"{row['case']}: {row['term']}" for row in result["rows"] if "term" in row)),
    }  # fmt: skip


def moments(result: Values) -> Values:
    again = result.get("played_again")
    return {
        "n_problems": len(result["problems"]), "problems_note": result.get("problems_note", ""),
        "again": f"Played a second time: {again['draws']}; {again['why']}." if again else "",
        "rows": rows(
            [fault, moment, outcome, str(count)]
            for fault, by_moment in result["by_fault"].items()
            for moment, outcomes in by_moment.items()
            for outcome, count in outcomes.items()
        ),
    }  # fmt: skip


MODES = ("fp32", "bf16", "fp16", "pure_bf16", "fp8")
PARITY_SETS = {
    "pairs": "Every engine, precision, policy, offload, accumulation, clipping and averaging with each other",
    "full": "Every strategy in every precision under every activation policy",
    "late": "Offload and prefetch, with late copies and poisoned new memory",
}


def cuda_parity(result: Values) -> Values:
    parts: list[str] = []
    for name, found in result["sets"].items():
        lines = found["rows"]
        run = sum(row["cases"] for row in lines.values())
        wrong = [f"{case}: {'; '.join(w)}" for row in lines.values() for case, w in row["wrong"].items()]
        said = f"{run} of {found['asked']} cases run at {found['commit'][:10]}, {len(wrong)} do not agree."
        parts += [f"**{PARITY_SETS[name]}**: {said}", _parity(lines), *listed(text[:300] for text in wrong)]
    times = ", ".join(f"{mode} {n}" for mode, n in result["limits"].items() if mode != "fp32")
    return {"times": times, "tables": "\n\n".join(parts)}


def _parity(lines: Values) -> str:
    def cell(row: Values | None) -> str:
        return "–" if row is None else f"({row['cases']}) {row['loss']:.0e}, {row['weights']:.0e}"

    engines = list(dict.fromkeys(key.split(" ")[0] for key in lines))
    modes = [mode for mode in MODES if any(key.endswith(f" {mode}") for key in lines)]
    return table(["engine@ranks", *modes], [[f"`{e}`", *(cell(lines.get(f"{e} {m}")) for m in modes)] for e in engines])


CALLS_OF = {
    "device syncs": ["device_sync"], "stream syncs": ["stream_sync"], "event waits": ["event_sync"],
    "blocking copies": ["copy_blocking"], "pageable copies": ["copy_pageable"], "launches": ["launch", "gemm"],
    "allocations": ["malloc", "free", "mem_create", "mem_map", "host_alloc"],
}  # fmt: skip
ADDED = ("added_ms_without_emulation", "added_thread_ms_without_emulation", "added_wall_ms_without_emulation",
         "added_ms")  # fmt: skip


def host_cost(result: Values) -> Values:
    lines = []
    for engine, found in result["engines"].items():
        arms = [found["arms"][arm] for arm in (OURS, "hand-written")]
        counts = [
            " / ".join(str(sum(arm["calls"].get(n, 0) for n in names)) for arm in arms) for names in CALLS_OF.values()
        ]
        made = [arm.get("python_calls") for arm in arms]
        counts.append("–" if None in made else " / ".join(f"{n:.0f}" for n in made))
        added = [interval(found[key], 1) if key in found else "–" for key in ADDED]
        lines.append([f"{engine}@{found['ranks']}", *counts, *added])
    return {"note": result.get("note", ""), "rows": rows(lines), "clock": _on_the_clock(result)}


def _on_the_clock(result: Values) -> str:
    clocks = {engine: found["clock"] for engine, found in result["engines"].items() if "clock" in found}
    if not clocks:
        return ""
    said = ", ".join(
        f"{engine} {clock['ratio']:.4f}"
        + (f" (queue empty for {100 * empty(clock):.2f} % of the step)" if ENGINES[engine] == 1 else "")
        for engine, clock in clocks.items()
    )
    durations = next(iter(clocks.values()))["durations_us"]
    return (
        f"With kernels of {durations['EMUCUDA_KERNEL_US']} µs and products of {durations['EMUCUDA_GEMM_US']} µs, time "
        f"of a step over the hand-written loop's by the card's clock (goal ≤ {result['goals']['ratio']}): {said}."
    )


def empty(clock: Values) -> float:
    """The share of shardkit's step in which the card's queue was empty; on one stream."""
    ours = clock["arms"][OURS]
    return max(0.0, 1 - ours["busy_s"] / ours["step_s"])


def launch(result: Values) -> Values:
    shares = result["watching"]
    starts = result["first_step"].items()
    return {
        "rows": rows([f"`{name}`", f"{r['median_s']:.2f}", interval(r["ratio"], 3)] for name, r in starts),
        "recovered": interval(result["recovery"]["interval_s"], 1), "step_ms": 1000 * shares["step_s"],
        "most": 100 * result["goals"]["watching"],
        "watched": rows([k, f"{100 * shares[k]:.3f} %"] for k in ("watchdog", "preemption flag", "reduction")),
    }  # fmt: skip


def plan(result: Values) -> Values:
    goals = result["goals"]
    return {"rows": rows(
        [name, f"{row['seconds']:.1f}", f"{row['gib']:.2f}",
         f"≤ {goals[name]['seconds']} s, ≤ {goals[name]['gib']} GiB" if name in goals else ""]
        for name, row in result["cases"].items()
    )}  # fmt: skip


def plan_accuracy(result: Values) -> Values:
    groups: dict[str, list[float]] = {}
    for name, row in result["cases"].items():
        strategy = name.split(" ")[1]
        kind = "DeepSpeed ZeRO" if strategy.startswith("zero") else strategy.partition("@")[0]
        groups.setdefault(kind, []).append(row["error"])
    worst = sorted(result["cases"].items(), key=lambda item: -abs(item[1]["error"]))[:5]
    return {
        "rows": rows(
            [kind, str(len(errors)), f"{100 * median(map(abs, errors)):.3f} %", f"{100 * min(errors):+.2f} %",
             f"{100 * max(errors):+.2f} %"]
            for kind, errors in groups.items()
        ),
        "worst": rows([name, f"{100 * row['error']:+.2f} %", row["phase"]] for name, row in worst),
    }  # fmt: skip


TOOLS = {
    "deepspeed": "DeepSpeed `estimate_zero2/3_model_states_mem_needs`",
    "accelerate": "`accelerate estimate-memory`",
    "fsdpmemtracker": "torch `FSDPMemTracker`, fake tensors",
    "memtracker": "torch `MemTracker`, fake tensors",
}


def plan_peers(result: Values) -> Values:
    lines = []
    for compared, found in result["errors"].items():
        tool, _, truth = compared.partition(": ")
        for name, errors in ((TOOLS[tool], found["theirs"]), (OURS, found["ours"])):
            lines.append([
                name, truth, str(errors["cases"]), f"{100 * errors['median_error']:.2f} %",
                f"{100 * errors['lowest']:+.1f} %", f"{100 * errors['highest']:+.1f} %",
                f"{100 * errors['within_3_percent']:.0f} %",
            ])  # fmt: skip
    failed = sum(len(found["failed"]) for found in result["errors"].values())
    return {
        "rows": rows(lines), "failures": f"{failed} cases failed." if failed else "No tool failed on a case.",
        "measured": f"{machine(result['environment'])[:-1]}, accelerate {result['accelerate']}.",
    }  # fmt: skip


def other_loops(result: Values, emulated: bool = False) -> Values:
    """One row for each listed case, run or not."""
    on = "emulated" if emulated else "cpu"
    keys, loops = list(GOALS[on]), [loop for loop in LOOPS if loop.on == on]
    lines, within, compared = [], 0, 0
    for loop in loops:
        found = result["cases"].get(loop.name, {})
        measured, predicted = (found.get(kind, {"failed": "not run"}) for kind in ("measured", "predicted"))
        start = [loop.name, loop.model, str(loop.ranks)]
        if "allocated" not in measured:
            lines.append([*start, "not measured", *[""] * len(keys)])
        elif "allocated" not in predicted:
            lines.append([*start, mib(measured["allocated"]), "not planned", *[""] * (len(keys) - 1)])
        else:
            errors = {key: predicted[key] / measured[key] - 1 for key in keys}
            compared += 1
            within += all(abs(errors[key]) <= GOALS[on][key] for key in keys)
            lines.append([*start, mib(measured["allocated"]), *(f"{100 * one:+.2f} %" for one in errors.values())])
    return {
        "listed": len(loops), "compared": compared, "within": within,
        "on_cards": ", on emulated cards" if emulated else "", "option": " --emulated" if emulated else "",
        "hardware": "emulated cards that compute nothing" if emulated else "CPUs",
        "limits": " and ".join(f"{100 * goal:.0f} % {key}" for key, goal in GOALS[on].items()),
        "table": table(["job", "model", "ranks", "measured, MiB", *keys], lines),
    }  # fmt: skip


def auto(result: Values) -> Values:
    def cell(settings: Sequence[Any]) -> str:
        strategy, policy, micro_batch = settings
        return f"{strategy}, {policy}, {micro_batch}"

    def in_margin(row: Values) -> str:
        peak = next(run["peak"] for run in result["grid"] if run["settings"] == row["best"])
        return " *" if peak * (1 + row["uncertainty"]) > row["cap_mib"] * 2**20 else ""

    both = [(run["speed"], run["predicted_tokens_per_s"]) for run in result["grid"] if run["predicted_tokens_per_s"]]
    return {
        "settings_tried": len(result["grid"]), "first": cell(result["reference"]), "compared": len(both),
        "steps": len(result["final"][0]["seconds"]), "correlation": rank_correlation(both),
        "uncertainty": max(row["uncertainty"] for row in result["caps"]),
        "rows": rows(
            [str(row["cap_mib"]), f"{row['feasible']} of {row['of']}", cell(row["chosen"]),
             f"{cell(row['best'])}{in_margin(row)}", interval(row["ratio"], 3), mib(row["chosen_peak"]),
             str(row["under_cap"])]
            for row in result["caps"]
        ),
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
    def policies(backend: str) -> str:
        return rows(
            [name, mib(r["saved"]), mib(r["on_host"]), mib(r["peak"]), f"{100 * r['recompute_share']:.0f} %",
             interval(r["time"]["ratio"], 2)]
            for name, r in result["attention"][backend]["policies"].items()
        )  # fmt: skip

    budgets = zip(result["budget"]["math"].items(), result["budget"]["sdpa"].values(), strict=True)
    equal = all(r["gradients_equal"] for b in result["attention"].values() for r in b["policies"].values())
    return {
        "equal": "yes" if equal else "NO", "math": policies("math"), "fused": policies("sdpa"),
        "budgets": rows(
            [name, mib(math["saved"]), f"{math['time']:.2f}", mib(fused["saved"]), f"{fused['time']:.2f}"]
            for (name, math), fused in budgets
        ),
        "whole_peak": mib(result["loss"]["whole"]["peak"]), "chunked_peak": mib(result["loss"]["chunked"]["peak"]),
    }  # fmt: skip


def gather(result: Values) -> Values:
    return {
        "bytes_sent": next(iter(result["worlds"].values()))["bytes_sent_per_rank"],
        "step_ms": 1e3 * result["step_s"], "most": 100 * result["goal"],
        "rows": rows(
            [world, scaled(1e3, times["rank_0_cpu_s"], 2), f"{100 * times['share_of_time']:.2f} %",
             scaled(1e3, times["rank_0_s"], 1), scaled(1e3, times["together_s"], 1),
             f"{times['jsonl_line_bytes'] / 2**10:.1f}"]
            for world, times in result["worlds"].items()
        ),
    }  # fmt: skip


def mutants(result: Values) -> Values:
    runs = {name: result[name] for name in ("before", "after") if result.get(name)}
    before, latest = result.get("before"), list(runs.values())[-1]
    lines = [[f"`{module}`", *_killed([run["modules"][module] for run in runs.values()])] for module in result["tests"]]
    lines.append(["**all**", *_killed([_total(run) for run in runs.values()])])
    head = ["module", "mutants", "equivalent", *(f"killed {name}" for name in runs), *(f"of {name}" for name in runs)]
    survivors = listed(
        f"{name}, `{module}`: {_change(change)}"
        for name, run in runs.items()
        for module, one in run["modules"].items()
        for change in one["survived"]
    )
    equivalent = listed(
        f"`{module}`: {_change(change)}: {change['reason']}"
        for module, one in latest["modules"].items()
        for change in one["equivalent"]
    )
    differs = "whose modules differ from today's in the text of messages only"
    return {
        "earlier": f" Before: commit {before['tests_commit'][:10]}, {differs}." if before else "",
        "table": table(head, lines),
        "survivors": "\n\n".join(["Mutants that no chosen test kills:", *survivors]) if survivors else "",
        "equivalent": "\n\n".join(["Equivalent mutants:", *equivalent]) if equivalent else "",
    }


def _total(run: Values) -> Values:
    """One row for all modules."""
    modules = list(run["modules"].values())
    total: Values = {key: sum(one[key] for one in modules) for key in ("asked", "killed", "timeouts")}
    return total | {"equivalent": [same for one in modules for same in one["equivalent"]]}


def _killed(runs: list[Values]) -> list[str]:
    killed = [f"{one['killed']}" + (f" ({one['timeouts']} by time)" if one["timeouts"] else "") for one in runs]
    shares = [f"{100 * one['killed'] / max(one['asked'] - len(one['equivalent']), 1):.0f} %" for one in runs]
    return [str(runs[-1]["asked"]), str(len(runs[-1]["equivalent"])), *killed, *shares]


def _change(change: dict[str, str]) -> str:
    return f"`` {change['was']} `` → " + (f"`` {change['becomes']} ``" if change["becomes"] else "nothing")


SECTIONS: dict[str, Callable[[Values], Values]] = {
    function.__name__: function
    for function in (
        overhead, peers, sft, data_wait, watch_cost, startup, checkpoint, checkpoint_matrix, folder, crashes, graphs,
        draws, moments, published, cuda_parity, host_cost, launch, plan, plan_accuracy, plan_peers, other_loops, auto,
        activation, gather, mutants,
    )
}  # fmt: skip
"""By the name of the file of results, in the page's order."""
