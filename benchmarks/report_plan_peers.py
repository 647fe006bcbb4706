"""The section of docs/benchmarks.md on what other tools predict."""

from __future__ import annotations

from typing import Any

from .markdown import machine, paragraph

_NAMES = {
    "deepspeed": "DeepSpeed `estimate_zero2/3_model_states_mem_needs`",
    "accelerate": "`accelerate estimate-memory`",
    "fsdpmemtracker": "torch `FSDPMemTracker`, fake tensors",
    "memtracker": "torch `MemTracker`, fake tensors",
}


def plan_peers(result: dict[str, Any]) -> str:
    rows = []
    for what, found in result["errors"].items():
        tool, _, truth = what.partition(": ")
        for name, errors in ((_NAMES[tool], found["theirs"]), ("shardkit", found["ours"])):
            rows.append(
                f"| {name} | {truth} | {errors['cases']} | {100 * errors['median_error']:.2f} % | "
                f"{100 * errors['lowest']:+.1f} % | {100 * errors['highest']:+.1f} % | "
                f"{100 * errors['within_3_percent']:.0f} % |"
            )
    failed = sum(len(found["failed"]) for found in result["errors"].values())
    env = result["environment"]
    return "\n".join([
        "## What other tools predict",
        "",
        paragraph(
            "`python -m benchmarks.plan_peers`: the cases above, each tool asked by its own functions about those that "
            "it speaks of, and shardkit about the same ones. Model states are parameters, gradients and optimizer "
            "states: what was measured between two steps, and the gradients. That is what DeepSpeed's and Accelerate's "
            "figures are for; neither says anything of activations and buffers, and their rows against the peak only "
            "tell how far states are from what a job needs. DeepSpeed: ZeRO-2 and -3 in bf16 without offload (on CPUs "
            "device and host are one memory). Accelerate: AdamW on one process; its bf16 figure is the largest stage, "
            "as the command prints it. The trackers: one process, or modules wrapped by FSDP2, two steps under a fake "
            "process group; DDP and DeepSpeed's engine they do not follow there. FSDPMemTracker counts the shapes that "
            "DTensor computes with in the optimizer's step, if tensors are fake. "
            + (f"{failed} cases failed." if failed else "No tool failed on a case.")
        ),
        "",
        "| tool | compared with | cases | median error | lowest | highest | within 3 % |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"{machine(env)[:-1]}, accelerate {result['accelerate']}.",
        "",
    ])  # fmt: skip
