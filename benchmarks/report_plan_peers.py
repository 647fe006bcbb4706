"""The section of docs/benchmarks.md on other tools' predictions."""

from __future__ import annotations

from typing import Any

from .markdown import machine, section, table

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
            rows.append([
                name, truth, str(errors["cases"]), f"{100 * errors['median_error']:.2f} %",
                f"{100 * errors['lowest']:+.1f} %", f"{100 * errors['highest']:+.1f} %",
                f"{100 * errors['within_3_percent']:.0f} %",
            ])  # fmt: skip
    failed = sum(len(found["failed"]) for found in result["errors"].values())
    return section(
        "What other tools predict",
        "`python -m benchmarks.plan_peers`: for the cases above, each tool predicts those that it covers by its "
        "own functions, and shardkit predicts the same ones. Model states are parameters, gradients and optimizer "
        "states: the bytes measured between two steps, and the gradients. DeepSpeed's and Accelerate's figures are "
        "for these states and ignore activations and buffers; their rows against the peak only show how far states "
        "are from a job's needs. DeepSpeed: ZeRO-2 and -3 in bf16 without offload (on CPUs device and host share "
        "memory). Accelerate: AdamW on one process; its bf16 figure is the largest stage, as its command prints. "
        "The trackers: one process, or modules wrapped by FSDP2, two steps under a fake process group, where they "
        "do not follow DDP or DeepSpeed's engine. With fake tensors, FSDPMemTracker also counts the global "
        "shapes of DTensor's sharding propagation in the optimizer's step. "
        + (f"{failed} cases failed." if failed else "No tool failed on a case."),
        table(["tool", "compared with", "cases", "median error", "lowest", "highest", "within 3 %"], rows),
        f"{machine(result['environment'])[:-1]}, accelerate {result['accelerate']}.",
    )
