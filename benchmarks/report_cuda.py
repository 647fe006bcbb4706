"""The section of docs/benchmarks.md on CUDA parity."""

from __future__ import annotations

from typing import Any

from .host_cost import ENGINES
from .markdown import interval, listed, section, table

MODES = ("fp32", "bf16", "fp16", "pure_bf16", "fp8")
ADDED = {
    "added_ms_without_emulation": "added, ms", "added_thread_ms_without_emulation": "its training thread, ms",
    "added_wall_ms_without_emulation": "by the clock, ms", "added_ms": "with the emulation's, ms",
}  # fmt: skip
TITLES = {
    "pairs": "Every engine, precision, policy, offload, accumulation, clipping and averaging with each other",
    "full": "Every strategy in every precision under every activation policy",
    "late": "Offload and prefetch, with late copies and poisoned new memory",
}


def cuda_parity(result: dict[str, Any]) -> str:
    exact, exact_weights = result["limits"]["fp32"]
    times = ", ".join(f"{mode} {n}" for mode, n in result["limits"].items() if mode != "fp32")
    about = (
        "`python -m benchmarks.cuda_parity`, on **emulated** cards: the CUDA build of torch with its allocator, "
        "streams and ProcessGroupNCCL, over the CPU's arithmetic (tests/emulated_cuda/README.md explains what that "
        "shows and what needs a GPU). Cells give the number of cases in brackets, the largest difference of a loss "
        f"in {result['steps']} steps, and the largest ‖weights − wanted‖ / ‖wanted‖ after them. The limits in fp32 "
        f"are {exact:.0e} and {exact_weights:.0e}; below fp32, this many times the distance of the CPU's bf16 "
        f"from its fp32: {times}. pure_bf16 is compared with the CPU's pure_bf16, the others with its fp32. In "
        "fp16, one rank's gradient overflows once in every case of the full product."
    )
    parts = []
    for name, found in result["sets"].items():
        rows = found["rows"]
        run = sum(row["cases"] for row in rows.values())
        wrong = [f"{case}: {'; '.join(w)}" for row in rows.values() for case, w in row["wrong"].items()]
        said = f"{run} of {found['asked']} cases run at {found['commit'][:10]}, {len(wrong)} do not agree."
        parts += [f"**{TITLES[name]}**: {said}", _table(rows), *listed(text[:300] for text in wrong)]
    title = "Trainings on CUDA against the CPU's single process"
    return section(title, about, *parts, environment=result["environment"])


def host_cost(result: dict[str, Any]) -> str:
    goals = result["goals"]
    text = (
        "`python -m benchmarks.host_cost`, on an **emulated** card that computes nothing: the same 355M model in bf16, "
        "shardkit's whole trainer and the shortest hand-written loop in turns in one process. Cells give the calls of "
        "CUDA's runtime in one step, shardkit / hand-written, without steps that gather memory. The hand-written "
        "loop reads no loss. shardkit waits for one event a step, the loss, which every line of `metrics.jsonl` "
        "has; backward and update are still queued then. Its further launches are the check that the norm is "
        "finite, and what torch's fused optimizers do in order to leave out an update where it is not. Under ZeRO-2 "
        "shardkit leaves out what DeepSpeed does to ask whether its norm is valid: launches, and a wait for the device "
        "for each group to write the answer and for each to read it "
        "(tests/cuda/test_host_cost.py). Added: median processor time of all of the process's threads, shardkit's "
        f"step less the hand-written one (goal ≤ {goals['added_ms']:g} ms), without what the emulation computes and "
        "keeps account of by itself, which it counts; beside it the training thread's alone, and the same by the "
        "clock; last the processor time as it is, with the emulation's. Python calls: functions called in a step on "
        "that thread, which no load of the machine changes; older measurements lack some of these."
        + result.get("note", "")
    )
    named = {
        "device syncs": ["device_sync"], "stream syncs": ["stream_sync"], "event waits": ["event_sync"],
        "blocking copies": ["copy_blocking"], "pageable copies": ["copy_pageable"], "launches": ["launch", "gemm"],
        "allocations": ["malloc", "free", "mem_create", "mem_map", "host_alloc"],
    }  # fmt: skip
    rows = []
    for engine, found in result["engines"].items():
        ours, theirs = (found["arms"][arm]["calls"] for arm in ("shardkit", "hand-written"))
        counts = [
            " / ".join(str(sum(arm.get(n, 0) for n in names)) for arm in (ours, theirs)) for names in named.values()
        ]
        added = [interval(found[key], 1) if key in found else "–" for key in ADDED]
        made = [found["arms"][arm].get("python_calls") for arm in ("shardkit", "hand-written")]
        counts.append("–" if None in made else " / ".join(f"{n:.0f}" for n in made))
        rows.append([f"{engine}@{found['ranks']}", *counts, *added])
    parts = [text, table(["engine@ranks", *named, "Python calls", *ADDED.values()], rows)]
    clocks = {engine: found["clock"] for engine, found in result["engines"].items() if "clock" in found}
    if clocks:
        said = ", ".join(
            f"{engine} {clock['ratio']:.4f}"
            + (f" (queue empty for {100 * empty(clock):.2f} % of the step)" if ENGINES[engine] == 1 else "")
            for engine, clock in clocks.items()
        )
        durations = next(iter(clocks.values()))["durations_us"]
        kernel, product = durations["EMUCUDA_KERNEL_US"], durations["EMUCUDA_GEMM_US"]
        parts.append(
            f"With kernels of {kernel} µs and products of {product} µs, time of a step over the hand-written loop's by "
            f"the card's clock (goal ≤ {goals['ratio']}): {said}."
        )
    return section("The host's cost of a step on CUDA", *parts, environment=result["environment"])


def empty(clock: dict[str, Any]) -> float:
    """The share of shardkit's step in which the card's queue was empty; on one stream."""
    ours = clock["arms"]["shardkit"]
    return max(0.0, 1 - ours["busy_s"] / ours["step_s"])


def _table(rows: dict[str, Any]) -> str:
    engines = list(dict.fromkeys(key.split(" ")[0] for key in rows))
    modes = [mode for mode in MODES if any(key.endswith(f" {mode}") for key in rows)]
    return table(["engine@ranks", *modes], [[f"`{e}`", *(_cell(rows.get(f"{e} {m}")) for m in modes)] for e in engines])


def _cell(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"({row['cases']}) {row['loss']:.0e}, {row['weights']:.0e}"
