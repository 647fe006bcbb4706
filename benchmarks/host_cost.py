"""The host's cost of a step on CUDA: shardkit beside the shortest hand-written loop, on cards that compute nothing.

`EMUCUDA=1 EMUCUDA_DEVICES=2 .venv-cuda/bin/python -m benchmarks.host_cost` (after `make test-cuda`). Both train the
same 355M model in bf16 in one process, step by step in turns. Counted are the calls of CUDA's runtime; measured is the
process's processor time, and beside it the time by the clock; each as it is, and without what only the emulation takes,
which counts that itself. `--clock` measures steps on kernels of a given duration by the card's clock.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from . import bare
from .common import earlier, in_turns, measure_each, median_ci, stamp, unmeasured
from .options import RESUME, Option, options, refuse, samples
from .overhead import write_tokens

ENGINES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2}
MICRO, SEQ = 4, 1024
WARM, GATHER = 66, 1000
"""shardkit looks at its first 64 losses; DDP measures itself, and waits for that, in ten steps and each hundredth."""
BUCKET = 500 * 2**20 // 2
"""Values of bf16 in DeepSpeed's buckets: shardkit's default of 500 MiB."""
COUNTED = 5
GOALS = {"added_ms": 2.0, "ratio": 1.005}
WAITS = ("device_sync", "stream_sync", "event_sync", "copy_blocking", "copy_pageable")
CALLS = (
    "launch", "gemm", "memset", "copy_d2d", "copy_h2d", "copy_d2h", "event_record", "event_query", "stream_wait_event",
    "malloc", "free", "mem_create", "mem_map", "host_alloc",
)  # fmt: skip
VIRTUAL = {"EMUCUDA_KERNEL_US": "40", "EMUCUDA_GEMM_US": "600"}
"""The step then takes the card longer than the host, as on a GPU."""
SECONDS = {
    "wall_s": ("computing_ns", "bookkeeping_ns"),
    "cpu_s": ("computing_ns", "bookkeeping_ns", "streams_ns"),
    "thread_s": ("emulating_here_ns",),
}
"""By the clock, of the process's processor time, and of the training thread's; and what of each is the emulation's.

The streams' threads run beside the program. Where it runs two threads in a step, one waits for the other."""
Step = Callable[[], None]


def settings(engine: str, tokens: str, folder: str, steps: int) -> dict[str, Any]:
    return {
        "model.preset": "355m", "parallel.strategy": engine, "run.dir": folder, "run.device": "cuda",
        "precision.mode": "bf16", "activation.policy": "none", "train.seq_len": SEQ, "train.micro_batch_size": MICRO,
        "train.grad_accum_steps": 1, "train.max_norm": bare.MAX_NORM, "train.max_steps": steps, "train.eval_samples": 0,
        "checkpoint.at_end": False, "checkpoint.every_steps": None, "memory.interval": GATHER, "memory.plan": False,
        "data.path": tokens, "data.shuffle": False, "optim.lr": bare.LR, "optim.schedule": "constant",
        "optim.weight_decay": bare.WEIGHT_DECAY,
    }  # fmt: skip


def hand_written(engine: str, config: Any, tokens: str) -> Step:
    """The shortest loop for an engine; it never reads a loss."""
    import torch
    import torch.distributed as dist

    from shardkit.tasks.load import load_task

    device = torch.device("cuda", torch.cuda.current_device())
    with torch.device("meta"):
        model = load_task(config).build_model()
    model = model.to_empty(device=device)
    for param in model.parameters():
        param.detach().normal_(std=0.02)
    seq, micro = config.train.seq_len, config.train.micro_batch_size
    read = bare.micro_batches(tokens, seq, micro, dist.get_rank(), dist.get_world_size())
    data = ((x.pin_memory(), y.pin_memory()) for x, y in read)
    if engine == "zero2":
        return _deepspeed(model, data, device)
    autocast: Any = torch.autocast("cuda", dtype=torch.bfloat16)
    if engine == "ddp":
        model = bare.in_ddp(model, device)
    elif engine == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = bare.in_fsdp(model, device, mp_policy=policy)
        autocast = nullcontext()
    optimizer = bare.adamw(model)

    def step() -> None:
        x, y = (part.to(device, non_blocking=True) for part in next(data))
        with autocast:
            loss = model(x, y)
        (loss.float() / y.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), bare.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(model: Any, data: Iterator[Any], device: Any) -> Step:
    import deepspeed

    deepspeed.init_distributed("nccl", verbose=False, dist_init_required=False)
    config = bare.ds_config(2, model) | {
        "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True, "check_grad_overflow": False},
    }  # fmt: skip
    bucket = min(sum(p.numel() for p in model.parameters()), BUCKET)
    config["zero_optimization"] |= {
        "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=bare.adamw(model), config=config)

    def step() -> None:
        x, y = (part.to(device, non_blocking=True) for part in next(data))
        engine.backward(engine(x, y) / y.numel())
        engine.step()

    return step


def measured(
    engine: str, tokens: str, folder: str, turns: int, changes: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """One rank: calls and processor seconds of steps, or seconds by the card's clock; by arm.

    `changes`: other settings than the benchmark's.
    """
    from shardkit.config.load import load_config
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    virtual = "EMUCUDA_KERNEL_US" in os.environ
    loaded = load_config(None, settings(engine, tokens, folder, WARM + turns + COUNTED + 3) | dict(changes or {}))
    with start(loaded) as job:
        trainer = Trainer(job)
        trainer.loop.first_update.is_checked = True  # nothing is computed, so no weight moves
        records = trainer.recorded_steps()
        arms: dict[str, Callable[[], Any]] = {
            "shardkit": lambda: next(records), "hand-written": hand_written(engine, loaded.config, tokens)
        }  # fmt: skip
        gc.collect()
        gc.disable()  # what it frees, and when, is not the step's doing
        figures = {n: _on_the_clock(arm, turns) for n, arm in arms.items()} if virtual else _in_turns(arms, turns)
        if not virtual:
            for name, arm in arms.items():
                figures[name]["python_calls"] = _python_calls(arm)
        gc.enable()
        records.close()  # type: ignore[attr-defined]
        arms.clear()
    gc.collect()
    return figures


def _in_turns(arms: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, dict[str, Any]]:
    """Calls, processor seconds and seconds by the clock of each arm's steps; the first arm alternates."""
    import emucuda
    import torch

    def counted_step(step: Callable[[], Any]) -> dict[str, Any]:
        torch.cuda.synchronize()
        with emucuda.counting() as calls:
            began = time.perf_counter(), time.process_time(), time.thread_time()
            step()
            ended = time.perf_counter(), time.process_time(), time.thread_time()
        seconds = dict(zip(SECONDS, (b - a for a, b in zip(began, ended, strict=True)), strict=True))
        emulating = {f"emulating_{k}": sum(calls[name] for name in of) / 1e9 for k, of in SECONDS.items()}
        return {**seconds, **emulating, "calls": {k: calls[k] for k in (*WAITS, *CALLS)}}

    by_arm = in_turns({name: partial(counted_step, step) for name, step in arms.items()}, turns, WARM)
    return {name: _typical(steps) for name, steps in by_arm.items()}


def _typical(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Each call's median count, and every step's seconds."""
    names = steps[0]["calls"]
    calls = {name: median(step["calls"][name] for step in steps) for name in names}
    seconds = {name: [step[name] for step in steps] for name in steps[0] if name != "calls"}
    return {"calls": {k: int(v) for k, v in calls.items() if v}, **seconds}


def _python_calls(step: Step) -> float:
    """Calls of Python functions in a step on its own thread, which no load of the machine changes."""
    count = 0

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        for _ in range(COUNTED):
            step()
    finally:
        sys.setprofile(None)
    return count / COUNTED


def _on_the_clock(step: Callable[[], Any], turns: int) -> dict[str, Any]:
    """Steps back to back: seconds each by the card's clock, and the part in which its queue was empty."""
    import emucuda
    import torch

    for _ in range(WARM):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with emucuda.counting() as calls:
        begin.record()
        for _ in range(turns):
            step()
        end.record()
        torch.cuda.synchronize()
    kernels = calls["launch"] + calls["memset"] + calls["copy_d2d"]
    busy = (kernels * int(os.environ["EMUCUDA_KERNEL_US"]) + calls["gemm"] * int(os.environ["EMUCUDA_GEMM_US"])) / 1e6
    return {"step_s": begin.elapsed_time(end) / 1e3 / turns, "busy_s": busy / turns}


def ranks(engine: str, turns: int, **env: str) -> dict[str, Any]:
    """Rank 0's `measured`."""
    from tests.ranks import run_ranks

    os.environ.update({"EMUCUDA_COMPUTE": "0", "EMUCUDA_MEMORY": "80G", "DEEPSPEED_LOG_LEVEL": "error", **env})
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"engine": engine, "tokens": write_tokens(Path(folder)), "folder": f"{folder}/run", "turns": turns}
        arms_by_rank = run_ranks(ENGINES[engine], "benchmarks.host_cost:measured", gpu=True, timeout=570, **arguments)
    return dict(arms_by_rank[0])


def counted(engine: str, turns: int) -> dict[str, Any]:
    arms = ranks(engine, turns)

    added = {
        f"added{kind}_ms{'' if whole else '_without_emulation'}": _added(arms, seconds, whole)
        for kind, seconds in (("", "cpu_s"), ("_thread", "thread_s"), ("_wall", "wall_s"))
        for whole in (True, False)
    }
    return {"measured": stamp(), "arms": arms, **added}


def _added(arms: dict[str, Any], seconds: str, whole: bool) -> list[float]:
    """Median milliseconds, with its interval, that a step of shardkit takes longer.

    Args:
        whole: with the emulation's part.
    """

    def of(arm: str) -> list[float]:
        emulating = arms[arm][f"emulating_{seconds}"]
        return [s if whole else s - e for s, e in zip(arms[arm][seconds], emulating, strict=True)]

    pairs = zip(of("shardkit"), of("hand-written"), strict=True)
    return [1e3 * value for value in median_ci([a - b for a, b in pairs])]


def on_the_clock(engine: str, turns: int) -> dict[str, Any]:
    arms = ranks(engine, turns, **VIRTUAL)
    ratio = arms["shardkit"]["step_s"] / arms["hand-written"]["step_s"]
    return {"measured": stamp(), "durations_us": VIRTUAL, "arms": arms, "ratio": ratio}


def main() -> None:
    clock = Option(False, "only the steps on kernels of a given duration")
    args = options(__doc__, pairs=samples(30), engines=ENGINES, resume=RESUME, clock=clock)
    if os.environ.get("EMUCUDA", "0") in ("", "0"):
        refuse("set EMUCUDA=1 and EMUCUDA_DEVICES=2")
    import emucuda

    if "computing_ns" not in emucuda.counts():
        refuse("the emulation is older than its sources: python -m tests.emulated_cuda.build")
    before: dict[str, Any] = earlier("host_cost").get("engines", {})

    def measure(engine: str) -> dict[str, Any]:
        part = {"clock": on_the_clock(engine, args.pairs)} if args.clock else counted(engine, args.pairs)
        return {**before.get(engine, {}), "ranks": ENGINES[engine], **part}

    held = {engine: figures.get("clock", {}) for engine, figures in before.items()} if args.clock else before
    chosen = unmeasured(args.engines, held) if args.resume else args.engines
    measure_each("host_cost", "engines", chosen, measure, goals=GOALS, device="emulated")


if __name__ == "__main__":
    main()
