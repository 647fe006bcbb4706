"""The tables of `benchmarks.sft`."""

from __future__ import annotations

from statistics import median
from typing import Any

from .common import median_ci
from .markdown import interval, mib, section, table

OURS = "shardkit"


def sft(result: dict[str, Any]) -> str:
    settings = result["settings"]
    text = (
        "`python -m benchmarks.sft`: 2 CPU ranks over gloo under DDP, one thread each, fp32, AdamW, clipping; the same "
        "small Llama, conversations about Python's standard library, order and settings; loss on the assistant's "
        "turns; LoRA on the attention's projections, by peft everywhere. Losses of padded rows agree in every step "
        "before times are taken. Packed rows are best-fit decreasing with each library's own order. Tokens are "
        "targets, the assistant's. Arms take turns, one step each. The first step counts from the "
        "command and includes tokenisation."
    )
    ratios = ["setting", "library", "tokens/s (more is better)", "command to first step", "peak tensor memory"]
    return section(
        "Fine-tuning beside other libraries",
        text,
        "shardkit over each:",
        table(ratios, _ratios(settings)),
        "Medians:",
        table(["setting", "library", "tokens/s", "first step, s", "peak, MiB", "loss difference"], _medians(settings)),
        *_data(result),
        ", ".join(f"{name} {version}" for name, version in result["packages"].items()) + ".",
        environment=result["environment"],
    )


def _data(result: dict[str, Any]) -> list[str]:
    if "tokenise_s" not in result:
        return []
    theirs, ours, packing = result["tokenise_s"]["datasets.map"], result["tokenise_s"][OURS], result["packing"]
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    times = interval(median_ci(ratios), 2) if len(ratios) >= 6 else f"{median(ratios):.2f}"
    pairs = f"{len(ratios)} pairs in turns" if len(ratios) > 1 else "one pair"
    return [
        f"Tokenisation with two processes, {pairs}: `shardkit tokenize` takes {median(ours):.1f} s, `datasets.map` "
        f"{median(theirs):.1f} s: {times} times the throughput{_when(result.get('data_measured'))}. "
        "Best-fit decreasing packs a million lengths of a long-tailed mix "
        f"in {packing['seconds']:.2f} s and fills {packing['fill']:.4f} of the positions."
    ]


def _when(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return ""
    return f" (at commit {measured['commit'][:10]}; other processes at the start: {measured['load']:.1f} CPUs' worth)"


def data_wait(result: dict[str, Any]) -> str:
    rows = [
        [
            kind, workers, *(interval([100 * share for share in f["share"]], 3), f"{100 * f['share_of_all']:.3f}"),
            interval(f["step_s"], 2), f"{f['tokens_per_s'][0]:,.0f}",
        ]
        for kind, by_workers in result["kinds"].items()
        for workers, f in by_workers.items()
    ]  # fmt: skip
    head = ["data", "workers a rank", "waits, % of a step", "of all steps, %", "step, s", "tokens/s a rank"]
    text = (
        f"`python -m benchmarks.data_wait`, {result['steps']} steps on 2 CPU ranks under DDP: the share of rank 0's "
        "time that it waits for its next batch. The model is small, so that a rank takes many tokens a second: compare "
        "the last column with 8,200, an H100's rate through 8 billion parameters at 40 % of 989 TFLOP/s. Workers have "
        "no core of their own. Streamed rows are tokenised while they are read. Other processes at "
        f"the start: {result['load']:.1f} CPUs' worth. Goal with workers: ≤ 1 %."
    )
    return section("Waiting for data", text, table(head, rows), environment=result["environment"])


def _ratios(settings: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            arm,
            interval(r["tokens_per_s"], 3),
            interval(r["first_step"], 3),
            f"{r['peak']:.3f}",
        ]
        for name, found in settings.items()
        for arm, r in found["beside"].items()
    ]


def _medians(settings: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name, arm, f"{median(tokens / seconds for seconds, tokens in taken):.0f}",
            f"{median(found['first_step_s'][arm]):.2f}",
            mib(found["peak_bytes"][arm]),
            f"{found['loss_difference'][arm]:.0e}" if "loss_difference" in found else "other order",
        ]
        for name, found in settings.items()
        for arm, taken in found["steps"].items()
    ]  # fmt: skip
