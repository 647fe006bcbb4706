"""The tables of `benchmarks.peers`."""

from __future__ import annotations

from statistics import median
from typing import Any

from .markdown import interval, machine, mib, paragraph, table

OURS, NOT_YET = "shardkit", "not yet measured"


def peers(result: dict[str, Any]) -> str:
    engines = {name: found for name, found in result["engines"].items() if "beside" in found}
    settings, packages = result["settings"], result["packages"]
    sizes, tokens = settings["SIZES"], f"{settings['MICRO']} × {settings['SEQ']} tokens"
    text = paragraph(
        f"`python -m benchmarks.peers`: {result['ranks']} CPU ranks over gloo under torchrun, one thread each; the "
        f"reference transformer, d_model {sizes['d_model']}, {sizes['n_layers']} layers, {settings['ACCUM']} "
        f"micro-batches of {tokens} per rank and step, fp32, AdamW, clipping; every library gets the same model, "
        "weights, data order and settings. PyTorch and DeepSpeed are hand-written loops. Starts are timed in turns, "
        "and so are steps, with all arms alive. Peak: the peak of torch's CPU allocator on a rank, from the profiler's "
        "events, from the model's construction on. No ratio is written unless all losses are within "
        f"{result['tolerance']:g} of the hand-written loop's."
    )
    ratios = ["engine", "library", "step time", "command to first step", "peak tensor memory", "steps", "starts"]
    return "\n\n".join([
        "## Beside other libraries",
        text,
        "shardkit over each:",
        table(ratios, _ratios(engines)),
        "Medians:",
        table(["engine", "library", "step, ms", "first step, s", "peak, MiB", "loss difference"], _medians(engines)),
        "Libraries that did not train on a CPU, and their errors:",
        table(["engine", "library", "error"], _refused(engines)),
        paragraph(", ".join(f"{name} {version}" for name, version in packages.items()) + "."),
        machine(result["environment"]),
        "",
    ])  # fmt: skip


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
