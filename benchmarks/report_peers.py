"""The tables of `benchmarks.peers`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from .markdown import interval, mib, section, table

OURS, NOT_YET = "shardkit", "not yet measured"


def peers(result: dict[str, Any]) -> str:
    engines = {name: found for name, found in result["engines"].items() if "beside" in found}
    settings, packages = result["settings"], result["packages"]
    sizes, tokens = settings["SIZES"], f"{settings['MICRO']} × {settings['SEQ']} tokens"
    text = (
        f"`python -m benchmarks.peers`: {result['ranks']} CPU ranks over gloo under torchrun, one thread each; the "
        f"reference transformer, d_model {sizes['d_model']}, {sizes['n_layers']} layers, {settings['ACCUM']} "
        f"micro-batches of {tokens} per rank and step, fp32, AdamW, clipping; every library gets the same model, "
        "weights, data order and settings. PyTorch and DeepSpeed are hand-written loops. Starts are timed in turns, "
        "and so are steps, with all arms alive. Peak: the peak of torch's CPU allocator on a rank, from the profiler's "
        "events, from the model's construction on. No ratio is written unless all losses are within "
        f"{result['tolerance']:g} of the hand-written loop's."
    )
    ratios = ["engine", "library", "step time", "command to first step", "peak tensor memory", "steps", "starts"]
    return section(
        "Beside other libraries",
        text,
        "shardkit over each:",
        table(ratios, _ratios(engines)),
        "Medians:",
        table(["engine", "library", "step, ms", "first step, s", "peak, MiB", "loss difference"], _medians(engines)),
        "Libraries that did not train on a CPU, and their errors:",
        table(["engine", "library", "error"], _refused(engines)),
        ", ".join(f"{name} {version}" for name, version in packages.items()) + ".",
        environment=result["environment"],
    )


WAITS = {
    "synchronisations": ["device_sync", "stream_sync"], "event waits": ["event_sync"],
    "blocking or pageable copies": ["copy_blocking", "copy_pageable"], "launches": ["launch", "gemm"],
}  # fmt: skip
"""Columns → the calls of CUDA's runtime that they sum."""


def peers_on_cards(result: dict[str, Any]) -> str:
    text = (
        f"`python -m benchmarks.peers --cuda`: {result['ranks']} ranks on **emulated** cards. Losses: the model of the "
        "table above, computed on the cards, fp32. The rest: the 355m model on cards that compute nothing, fp32, two "
        "micro-batches of 4 × 1024 tokens, median of the last eight of 76 steps; allocated and reserved are peaks of "
        "torch's own allocator on the larger rank, GiB. Every arm reads its loss once a step; the Trainer checks every "
        "micro-batch's as well, its default. Buckets of DeepSpeed are shardkit's in all arms. Nothing here is a "
        "speed of a card: *host* is processor time of rank 0's threads for one step, milliseconds, the emulation's "
        "own included, rough because other programs ran. Under zero2 a library launches 2,243 to 2,251 kernels in one "
        "run and some 550 more in the next (seen for the Trainer and shardkit); what is not computed may decide it."
    )
    head = ["engine", "library", "loss difference", "allocated", "reserved", "host, ms", *WAITS]
    rows = [row for engine, found in result["engines"].items() for row in _on_cards(engine, found)]
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    title = "Beside other libraries, on emulated cards"
    return section(title, text, table(head, rows), packages + ".", environment=result["environment"])


def _on_cards(engine: str, found: dict[str, Any]) -> Iterator[list[str]]:
    small, full = found.get("small", {}), found.get("355m", {})
    first = next(iter(small.values()), {}).get("losses", [])
    for arm in dict.fromkeys([*small, *full]):
        losses, seen = small.get(arm, {}).get("losses"), full.get(arm, {})
        apart = max(map(abs, (a - b for a, b in zip(losses, first, strict=True)))) if losses else None
        cells = [said(small.get(arm, {})) if apart is None else f"{apart:.0e}"]
        if "peak" not in seen:
            yield [engine, arm, *cells, said(seen), *[""] * (len(WAITS) + 2)]
            continue
        peak = (f"{seen['peak'][kind] / 2**30:.3f}" for kind in ("allocated", "reserved"))
        calls = (str(sum(seen["calls"].get(name, 0) for name in names)) for names in WAITS.values())
        yield [engine, arm, *cells, *peak, f"{1e3 * median(seen['cpu_s']):.0f}", *calls]


def said(found: dict[str, Any]) -> str:
    """An arm's error, or that it has no result yet."""
    return str(found.get("error", NOT_YET)).replace("|", "\\|")


def _ratios(engines: dict[str, Any]) -> list[list[str]]:
    return [
        [
            engine, arm, interval(r["step_time"], 3), interval(r["first_step"], 3),
            _peak_ratio(found, arm),
            str(len(found["step_s"][arm])), str(len(found["first_step_s"][arm])),
        ]
        for engine, found in engines.items()
        for arm, r in found["beside"].items()
    ]  # fmt: skip


def _medians(engines: dict[str, Any]) -> list[list[str]]:
    return [
        [
            engine, arm, f"{1e3 * median(steps):.0f}", f"{median(found['first_step_s'][arm]):.2f}",
            _peak(found, arm), f"{found['loss_difference'][arm]:.0e}",
        ]
        for engine, found in engines.items()
        for arm, steps in found["step_s"].items()
    ]  # fmt: skip


def _peak(found: dict[str, Any], arm: str) -> str:
    return mib(found["peak_bytes"][arm]) if "peak_bytes" in found else NOT_YET


def _peak_ratio(found: dict[str, Any], arm: str) -> str:
    return f"{found['peak_bytes'][OURS] / found['peak_bytes'][arm]:.4f}" if "peak_bytes" in found else NOT_YET


def _refused(engines: dict[str, Any]) -> list[list[str]]:
    return [
        [engine, arm, said.replace("|", "\\|").replace("\n", " ")]
        for engine, found in engines.items()
        for arm, said in found.get("refused", {}).items()
    ]
