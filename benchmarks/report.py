"""`python -m benchmarks.report` makes docs/benchmarks.md from benchmarks/results/*.json: no figure is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .common import REPO, RESULTS
from .gpu.tables import on_a_gpu
from .markdown import interval, mib, section, table
from .report_auto import auto
from .report_compiled import compiled
from .report_crashes import crashes, moments
from .report_cuda import cuda_parity, host_cost
from .report_graphs import draws, graphs
from .report_mutants import mutants
from .report_other_loops import other_loops
from .report_peers import peers, peers_on_cards
from .report_plan_peers import plan_peers
from .report_sft import data_wait, sft
from .watch_cost import watch_cost

PAGE = REPO / "docs" / "benchmarks.md"
INTRO = """# Benchmarks

Generated from `benchmarks/results/*.json` by `python -m benchmarks.report`; a test compares. Ratios are medians of
pairs measured in one run; brackets give the distribution-free 95 % interval of the median. Absolute times say little
beyond the machine named; time ratios below 1 favour shardkit.
"""

MEDIANS = ["measured", "median [95 %]"]


def page() -> str:
    """The text of docs/benchmarks.md."""
    parts = [INTRO]
    on_cards = {"compiled": compiled, "peers": peers_on_cards, "other_loops": partial(other_loops, emulated=True)}
    parts += [*_rendered(SECTIONS, RESULTS), on_a_gpu(RESULTS), *_rendered(on_cards, RESULTS / "emulated")]
    return "\n".join(parts)


def _rendered(sections: Mapping[str, Callable[[dict[str, Any]], str]], results: Path) -> Iterator[str]:
    """The sections whose file of results exists."""
    for name, render in sections.items():
        path = results / f"{name}.json"
        if path.exists():
            yield render(json.loads(path.read_text()))


def overhead(result: dict[str, Any]) -> str:
    rows = [
        [
            engine, interval(r["step_time"]["ratio"], 3),
            interval(r["processor_time"]["ratio"], 3) if "processor_time" in r else "–",
            f"{r['peak_tensor_memory']['ratio']:.4f}", interval(r["first_step"]["ratio"], 3),
            f"{100 * r['ledger_share_of_step_time']:.2f} %", f"{r['loss_difference']:.0e}",
        ]
        for engine, r in result["engines"].items()
    ]  # fmt: skip
    goals = result["goals"]
    head = ["engine", "step time", "its processor time, rank 0", "peak tensor memory", "command to first step",
            "ledger / step time", "loss difference"]  # fmt: skip
    return section(
        "Overhead over the shortest hand-written loop",
        "`python -m benchmarks.overhead`: the same model, weights, data order and settings, 2 CPU ranks over gloo, "
        f"shardkit's ledger, metrics and progress on. Goals: step time ≤ {goals['step_time']}, peak tensor memory ≤ "
        f"{goals['peak_tensor_memory']}, command to first step ≤ {goals['first_step']}.",
        table(head, rows),
        environment=result["environment"],
    )


def startup(result: dict[str, Any]) -> str:
    named = {
        "help_vs_plain_typer_app": "`shardkit --help` over a bare typer application (goal ≤ 1.5)",
        "submit_help_vs_plain_typer_app": "`shardkit submit --help` over a bare command's (goal ≤ 1.5)",
        "help_vs_default_typer_app": "`shardkit --help` over a bare typer application with typer's default (rich) help",
    }
    rows = [
        [text, interval((result[k]["ratio"], *result[k]["interval_95"]), 3)] for k, text in named.items() if k in result
    ]
    imported = result["import_shardkit_ms"]
    import_ms = interval((imported["median"], *imported["interval_95"]), 1)
    return section(
        "Start of the command line",
        f"`python -m benchmarks.startup`, {result['pairs']} pairs.",
        table(MEDIANS, [*rows, ["`import shardkit`, ms (goal < 50)", import_ms]]),
        environment=result["environment"],
    )


def checkpoint(result: dict[str, Any]) -> str:
    goals, speed, memory = result["goals"], result["gib_per_s"], result["extra_memory"]
    samples = result["samples"]
    measured = {
        f"save: throughput over that of a raw write (goal ≥ {goals['save_throughput']})": "save_throughput",
        f"load: throughput over that of a raw read (goal ≥ {goals['load_throughput']})": "load_throughput",
        f"background save: blocking time over the time of a save (goal ≤ {goals['async_blocking']})": "async_blocking",
        "training speed during a background save, over the speed without": "training_speed_during_async",
        "training time that a background save costs (blocked and slowed), over the time of a save": "async_cost",
        "save: time over that of `torch.save` of the full state dict (FSDP2, gathered on rank 0)": "over_torch_save",
        "save: time over that of DeepSpeed's `save_checkpoint` (ZeRO-2)": "over_deepspeed",
    }
    peaks = {
        "save": "save", "background save": "background", "load": "load", "`torch.save` of the full state": "torch_save",
        "DeepSpeed's save": "deepspeed_save",
    }  # fmt: skip
    return section(
        "Checkpoints",
        f"`python -m benchmarks.checkpoint`: {samples['bytes'] / 2**30:.2f} GiB of fp32 weights and AdamW moments, "
        f"{result['ranks']} CPU ranks, {len(samples['rounds'])} rounds, in turns on one disk. Raw is one file per "
        "rank, memory to disk and back, without checksums. Every write ends with an fsync, including `torch.save`'s "
        "and DeepSpeed's; reads do not come from the page cache. Training keeps all cores busy and competes with a "
        "background save for them.",
        table(MEDIANS, [[text, interval(result[key], 2)] for text, key in measured.items()]),
        f"Median throughputs in GiB/s: save {speed['save']:.2f} (raw {speed['raw_write']:.2f}), load "
        f"{speed['load']:.2f} (raw {speed['raw_read']:.2f}). The first background save makes its buffers and blocks "
        f"for {result['first_async_blocking']:.2f} of a save's time. Peak host memory, as a multiple of the rank's "
        "share of the checkpoint: " + ", ".join(f"{text} {memory[arm]:.2f}" for text, arm in peaks.items()) + ".",
        environment=result["environment"],
    )


def checkpoint_matrix(result: dict[str, Any]) -> str:
    steps = next(iter(result["modes"].values()))["steps_compared"]
    rows = [
        [mode, str(r["pairs"]), str(r["pairs"] - len(r["not_bit_equal"])),
         f"{r['worst_loss_difference']:.1e} ({r['worst_pair']})"]
        for mode, r in result["modes"].items()
    ]  # fmt: skip
    sizes = ", ".join(f"{case} × {', '.join(map(str, worlds))}" for case, worlds in result["world_sizes"].items())
    head = ["precision", "pairs", "masters and moments bit-equal after the load", "loss difference"]
    return section(
        "Checkpoints between strategies and world sizes",
        f"`python -m benchmarks.checkpoint_matrix`: each of these saves, and each loads every save: {sizes}. The "
        f"difference is the largest over the next {steps} losses, from the single run that was never saved.",
        table(head, rows),
        environment=result["environment"],
    )


def folder(result: dict[str, Any]) -> str:
    rows = [
        [engine, mib(r["folder_bytes"]), mib(r["shard_bytes"]), mib(r["beyond_bytes"]), f"{r['read_ratio']:.3f}",
         mib(sum(r["state_bytes"].values())), mib(r["build_bytes"])]
        for engine, r in result["engines"].items()
    ]  # fmt: skip
    goals = result["goals"]
    head = ["engine", "folder", "read by a rank", "beyond the shard", "requested / folder", "state", "building"]
    return section(
        "Weights from a folder",
        f"`python -m benchmarks.folder`: `model.init_from` fills {result['ranks']} CPU ranks of one node. Beyond the "
        "shard: the largest anonymous memory of a rank while it loads, less what it held before, when its shard "
        f"already existed: at most a piece of {mib(goals['beyond_bytes'])} MiB is the goal. Bytes requested by all "
        f"ranks are counted in the reader: at most {goals['read_ratio']} × the folder's. State is all that the engine "
        "holds of the model with SGD, under ZeRO masters and gradients too. Building is the peak while it is wrapped, "
        "before anything is read (docs/log.md says where memory went). Sizes in MiB.",
        table(head, rows),
        environment=result["environment"],
    )


def launch(result: dict[str, Any]) -> str:
    goals, shares = result["goals"], result["watching"]
    rows = [
        [f"`{name}`", f"{starts['median_s']:.2f}", interval(starts["ratio"], 3)]
        for name, starts in result["first_step"].items()
    ]
    watched = [[name, f"{100 * shares[name]:.3f} %"] for name in ("watchdog", "preemption flag", "reduction")]
    recovery = interval(result["recovery"]["interval_s"], 1)
    return section(
        "Launching and recovering",
        "`python -m benchmarks.launch`: from the command to the end of the first optimizer step, with the same "
        f"training module on 2 CPU ranks (goal for `shardkit launch` ≤ {goals['first_step']:.2f}).",
        table(["launcher", "median s", "over torchrun"], rows),
        f"From a rank's SIGKILL to the end of the first step after it: {recovery} s.",
        f"Time inside the calls over a step of {1000 * shares['step_s']:.0f} ms (goal for watchdog and flag together "
        f"< {100 * goals['watching']:.1f} %). The reduction carries loss, finiteness, token count and the flag; "
        "waiting for the slower rank is excluded.",
        table(["call", "share"], watched),
        environment=result["environment"],
    )


def activation(result: dict[str, Any]) -> str:
    model = result["model"]
    equal = all(r["gradients_equal"] for b in result["attention"].values() for r in b["policies"].values())
    about = (
        "`python -m benchmarks.activation`: forward and backward of the reference transformer, "
        f"B = {result['batch']}, T = {result['seq']}, d_model = {model['d_model']}, {model['n_layers']} layers, "
        f"{model['n_heads']} heads, "
        f"vocab {model['vocab_size']}, {result['dtype']}, loss chunks of {model['loss_chunk_size']} tokens, no "
        "dropout, on the CPU. Saved: bytes alive on the device after forward (storages, counted by the tensor "
        "tracker) besides weights and gradients; peak: the peak of the step; both include the loss's memory. "
        "Again: FLOPs of recomputed products, over the FLOPs of one forward. Time: over the time of keeping "
        f"everything, step by step in one run. The gradients of all rows are bit-equal: {'yes' if equal else 'NO'}."
    )
    policies = [
        part
        for backend, measured in result["attention"].items()
        for part in _policies(backend, measured, result["goals"])
    ]
    return section(
        "Activations", about, *policies,
        "On the CPU the host's copies lie in the same memory: offload does not lower the peaks.",
        *_budgets(result["budget"]), _loss(result), environment=result["environment"],
    )  # fmt: skip


def _policies(backend: str, measured: dict[str, Any], goals: dict[str, float]) -> list[str]:
    goal = f" (goal ≥ {goals['selective_share_of_full_math']:.0%})" if backend == "math" else ""
    title = {"math": "Math attention", "sdpa": "Fused attention (SDPA)"}[backend]
    rows = [
        [name, mib(r["saved"]), mib(r["on_host"]), mib(r["peak"]), f"{100 * r['recompute_share']:.0f} %",
         interval(r["time"]["ratio"], 2)]
        for name, r in measured["policies"].items()
    ]  # fmt: skip
    saves = f"{title}: `selective` saves {measured['selective_share_of_full']:.0%} as much as `full`{goal}."
    return [saves, table(["policy", "saved, MiB", "on the host, MiB", "peak, MiB", "again", "time"], rows)]


def _budgets(budgets: dict[str, Any]) -> list[str]:
    rows = [
        [name, mib(math["saved"]), f"{math['time']:.2f}", mib(fused["saved"]), f"{fused['time']:.2f}"]
        for (name, math), fused in zip(budgets["math"].items(), budgets["sdpa"].values(), strict=True)
    ]
    text = (
        "`budget`, blocks compiled: bytes saved by the whole model, counted by saved-tensor hooks, because the "
        "tracker and the FLOP counter cannot see into compiled code. Times are relative to budget 1."
    )
    return [text, table(["budget", "math: saved, MiB", "time", "fused: saved, MiB", "time"], rows)]


def _loss(result: dict[str, Any]) -> str:
    loss = result["loss"]
    whole, chunked = loss["whole"], loss["chunked"]
    return (
        f"Chunked cross-entropy, {loss['tokens']} tokens, d_model {loss['d_model']}, vocab {loss['vocab_size']}, "
        f"{loss['dtype']}, chunks of {loss['chunk_size']}: the output head's peak in forward and backward, gradients "
        f"included, falls from {mib(whole['peak'])} to {mib(chunked['peak'])} MiB, {loss['peak_reduction']:.1f} times "
        f"(goal ≥ {result['goals']['logits_peak_reduction']}); {chunked['seconds']:.1f} s instead of "
        f"{whole['seconds']:.1f} s."
    )


def gather(result: dict[str, Any]) -> str:
    def ms(seconds: list[float], digits: int) -> str:
        return interval([1e3 * value for value in seconds], digits)

    rows = [
        [world, ms(times["rank_0_cpu_s"], 2), f"{100 * times['share_of_time']:.2f} %", ms(times["rank_0_s"], 1),
         ms(times["together_s"], 1), f"{times['jsonl_line_bytes'] / 2**10:.1f}"]
        for world, times in result["worlds"].items()
    ]  # fmt: skip
    sent = next(iter(result["worlds"].values()))["bytes_sent_per_rank"]
    head = ["ranks", "rank 0's processor time, ms", "of the time", "wall, ms", "wall, begun at once, ms", "line, KiB"]
    return section(
        "Gathering every rank's memory",
        f"`python -m benchmarks.gather`: every rank's row to rank 0 in one gloo gather of {sent} bytes per rank, and "
        f"its line for `memory.jsonl`; {result['rounds']} rounds, all ranks on this one machine. Processor "
        f"time is rank 0's own, with its share of the time between gathers: {result['interval']} steps of "
        f"{1e3 * result['step_s']:.0f} ms (goal < {100 * result['goal']:.0f} %). Wall times include the other "
        f"ranks' use of the {result['environment']['cores']} cores: with all of them already waiting, and with all "
        "beginning at once.",
        table(head, rows),
        environment=result["environment"],
    )


def plan(result: dict[str, Any]) -> str:
    goals = result["goals"]
    rows = [
        [name, f"{row['seconds']:.1f}", f"{row['gib']:.2f}",
         f"≤ {goals[name]['seconds']} s, ≤ {goals[name]['gib']} GiB" if name in goals else ""]
        for name, row in result["cases"].items()
    ]  # fmt: skip
    return section(
        "What planning costs",
        "`python -m benchmarks.plan`: `shardkit plan` for H100s, from the command to its end; median of 3.",
        table(["model, strategy × GPUs", "seconds", "GiB of memory", "goal"], rows),
        environment=result["environment"],
    )


def plan_accuracy(result: dict[str, Any]) -> str:
    groups: dict[str, list[float]] = {}
    for name, row in result["cases"].items():
        strategy = name.split(" ")[1]
        kind = "DeepSpeed ZeRO" if strategy.startswith("zero") else strategy.partition("@")[0]
        groups.setdefault(kind, []).append(row["error"])
    rows = [
        [kind, str(len(errors)), f"{100 * median(map(abs, errors)):.3f} %", f"{100 * min(errors):+.2f} %",
         f"{100 * max(errors):+.2f} %"]
        for kind, errors in groups.items()
    ]  # fmt: skip
    worst = sorted(result["cases"].items(), key=lambda item: -abs(item[1]["error"]))[:5]
    return section(
        "Predicted against measured peaks",
        "`python -m benchmarks.plan_accuracy`: peak bytes of torch's CPU allocator in the wrap and "
        f"{result['steps']} steps of real processes (from the profiler's events), against the planner's "
        "prediction for the same config. Models have some million parameters: the kernels' own memory weighs more "
        "than in large ones. The planner predicts oneDNN's copies of images and weights, but not its scratchpads "
        "for bf16, which explain the errors of the CNN and of ViT. Measured at commit "
        f"{result['measured_at'][:10]}, predicted at the one below.",
        table(["engine", "cases", "median error", "lowest", "highest"], rows),
        table(
            ["furthest off", "error", "peak in"],
            [[name, f"{100 * row['error']:+.2f} %", row["phase"]] for name, row in worst],
        ),
        environment=result["environment"],
    )


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "overhead": overhead,
    "peers": peers,
    "sft": sft,
    "data_wait": data_wait,
    "watch_cost": watch_cost,
    "startup": startup,
    "checkpoint": checkpoint,
    "checkpoint_matrix": checkpoint_matrix,
    "folder": folder,
    "crashes": crashes,
    "graphs": graphs,
    "draws": draws,
    "moments": moments,
    "cuda_parity": cuda_parity,
    "host_cost": host_cost,
    "launch": launch,
    "plan": plan,
    "plan_accuracy": plan_accuracy,
    "plan_peers": plan_peers,
    "other_loops": other_loops,
    "auto": auto,
    "activation": activation,
    "gather": gather,
    "mutants": mutants,
}


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE}")
