"""What a warm training step asks of CUDA."""

from __future__ import annotations

import gc
from typing import Any

import torch

from shardkit.parallel.precision import to_device
from shardkit.run.job import Job, start
from shardkit.strategies.base import StepRequest
from shardkit.strategies.step import train_step
from tests.cuda.parity import Case
from tests.emulated_cuda.counters import counting

WARM, MEASURED = 12, 3
"""DDP measures itself, and waits for that, in its first ten steps and each hundredth."""
HELD = (
    "device_sync", "stream_sync", "event_sync", "stream_wait_event", "copy_blocking", "copy_pageable", "copy_h2d",
    "copy_d2h", "malloc", "free", "mem_create", "mem_release", "mem_map", "mem_unmap", "host_alloc", "host_free",
    "host_register", "emulated_operator",
)  # fmt: skip
"""Counters of one thread's doing; NCCL's watchdog asks for events whenever it likes."""


def counted(todo: list[Case], backend: str) -> dict[Case, dict[str, list[Any]]]:
    """By case: each measured step's calls by kind, and the memory after it."""
    from tests.cuda.parity_ranks import join

    join(backend)
    out = {}
    for case in todo:
        with start(None, case.settings()) as job:
            out[case] = measure(job, case)
        gc.collect()
    return out


def measure(job: Job, case: Case) -> dict[str, list[Any]]:
    """Calls and memory of the steps after warm-up."""
    from tests.cuda.parity_ranks import wrap
    from tests.strategies import cases

    wrap(job, case)
    batches = [
        (to_device(batch, job.world.device), False)
        for batch in cases.micro_batches(0, job.world.rank, job.world.size, case.accum)
    ]
    found: dict[str, list[Any]] = {"calls": [], "memory": []}
    gc.disable()  # what it frees, and when, is not the step's doing
    try:
        for step in range(WARM + MEASURED):
            with counting() as calls:
                out = train_step(
                    job.strategy, job.ledger, batches, cases.loss_fn, 500.0, job.world.size, job.world.device,
                    StepRequest(job.config, job.blocks),
                )  # fmt: skip
                del out
            torch.cuda.synchronize()
            if step >= WARM:
                found["calls"].append({name: calls[name] for name in HELD if calls[name]})
                found["memory"].append(memory())
    finally:
        gc.enable()
    return found


def memory() -> dict[str, int]:
    """Bytes on this rank's device and in its page-locked host memory."""
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "pinned": torch.cuda.host_memory_stats()["allocated_bytes.current"],
    }


def elsewhere() -> int:
    """Bytes that this process ever took of a device that is not its own."""
    others = [index for index in range(torch.cuda.device_count()) if index != torch.cuda.current_device()]
    return sum(torch.cuda.memory_stats(index).get("allocated_bytes.all.allocated", 0) for index in others)
