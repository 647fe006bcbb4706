"""The host's cost of a step on CUDA: shardkit beside the shortest hand-written loop, on emulated cards that compute nothing.

`EMUCUDA=1 EMUCUDA_DEVICES=2 .venv-cuda/bin/python -m benchmarks.host_cost` (after `make test-cuda`). Both train the same
355M model in bf16 in one process, step by step in turns. Counted are the calls of CUDA's runtime; measured is the
process's processor time, which other processes of the machine do not enter; and, on kernels of a given duration, the
time of a step by the card's clock.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from . import bare
from .common import RESULTS, environment, median_ci, write_result
from .overhead import write_tokens

ENGINES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2}
MICRO, SEQ = 4, 1024
WARM, GATHER = 66, 1000
"""shardkit looks at its first 64 losses; DDP measures itself, and waits for that, in ten steps and each hundredth."""
GOALS = {"added_ms": 2.0, "ratio": 1.005}
WAITS = ("device_sync", "stream_sync", "event_sync", "copy_blocking", "copy_pageable")
CALLS = (
    "launch", "gemm", "memset", "copy_d2d", "copy_h2d", "copy_d2h", "event_record", "event_query", "stream_wait_event",
    "malloc", "free", "mem_create", "mem_map", "host_alloc",
)  # fmt: skip
VIRTUAL = {"EMUCUDA_KERNEL_US": "40", "EMUCUDA_GEMM_US": "600"}
"""The step then takes the card longer than the host, as on a GPU."""
Step = Callable[[], None]


def settings(engine: str, tokens: str, folder: str, steps: int, preset: str = "355m") -> dict[str, Any]:
    return {
        "model.preset": preset, "parallel.strategy": engine, "run.dir": folder, "run.device": "cuda",
        "precision.mode": "bf16", "activation.policy": "none", "train.seq_len": SEQ, "train.micro_batch_size": MICRO,
        "train.grad_accum_steps": 1, "train.max_norm": bare.MAX_NORM, "train.max_steps": steps, "train.eval_batches": 0,
        "checkpoint.at_end": False, "checkpoint.every_steps": None, "memory.interval": GATHER, "memory.plan": False,
        "data.path": tokens, "data.shuffle": False, "optim.lr": bare.LR, "optim.schedule": "constant", "optim.weight_decay": bare.WEIGHT_DECAY,
    }  # fmt: skip


def batches(tokens: str, rank: int, world: int) -> Iterator[tuple[Any, Any]]:
    """This rank's micro-batches in file order, in pinned memory."""
    import numpy as np
    import torch

    stream = np.memmap(tokens, dtype=np.uint16, mode="r")
    for first in itertools.count(rank * MICRO, world * MICRO):
        rows = [stream[row * SEQ : (row + 1) * SEQ + 1] for row in range(first, first + MICRO)]
        whole = torch.from_numpy(np.stack(rows).astype(np.int64)).pin_memory()
        yield whole[:, :-1], whole[:, 1:]


def hand_written(engine: str, config: Any, tokens: str) -> Step:
    """The shortest loop for an engine; it never reads a loss."""
    import torch
    import torch.distributed as dist

    from shardkit.tasks.load import load_task

    device = torch.device("cuda", torch.cuda.current_device())
    with torch.device("meta"):
        model = load_task(config).build_model()
    model = model.to_empty(device=device)
    data = batches(tokens, dist.get_rank(), dist.get_world_size())
    if engine == "zero2":
        return _deepspeed(model, data, device)
    autocast: Any = torch.autocast("cuda", dtype=torch.bfloat16)
    if engine == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True)
    elif engine == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
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
    given = bare.ds_config(2, model) | {
        "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True, "check_grad_overflow": False},
    }  # fmt: skip
    given["zero_optimization"] |= {"overlap_comm": True, "contiguous_gradients": True}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=bare.adamw(model), config=given)

    def step() -> None:
        x, y = (part.to(device, non_blocking=True) for part in next(data))
        engine.backward(engine(x, y) / y.numel())
        engine.step()

    return step


def measured(engine: str, tokens: str, folder: str, turns: int) -> dict[str, Any]:
    """One rank: calls, processor seconds and seconds by the card's clock of each step, by arm."""
    import emucuda
    import torch

    from shardkit.config.load import load_config
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    loaded = load_config(None, settings(engine, tokens, folder, WARM + turns + 3))
    found: dict[str, Any] = {}
    with start(loaded) as job:
        trainer = Trainer(job)
        trainer._moved = True  # nothing is computed, so no weight moves
        records = trainer.recorded_steps()
        arms: dict[str, Callable[[], Any]] = {
            "shardkit": lambda: next(records), "hand-written": hand_written(engine, loaded.config, tokens)
        }  # fmt: skip
        by_arm: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        gc.collect()
        gc.disable()  # what it frees, and when, is not the step's doing
        virtual = "EMUCUDA_KERNEL_US" in os.environ
        for turn in range(WARM + turns):
            for name in sorted(arms, reverse=turn % 2 == 0):
                if virtual:
                    continue
                torch.cuda.synchronize()
                spent = time.process_time()
                with emucuda.counting() as calls:
                    arms[name]()
                spent = time.process_time() - spent
                if turn >= WARM:
                    by_arm[name].append({"cpu_s": spent, "calls": {k: calls[k] for k in (*WAITS, *CALLS)}})
        found["arms"] = {name: _typical(steps) for name, steps in by_arm.items() if steps}
        if virtual:
            found["arms"] = {name: _on_the_clock(arm, turns) for name, arm in arms.items()}
        gc.enable()
        records.close()  # type: ignore[attr-defined]
        arms.clear()
    gc.collect()
    return found


def _typical(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Each call's median count, and every step's processor seconds."""
    names = steps[0]["calls"]
    calls = {name: median(step["calls"][name] for step in steps) for name in names}
    return {"calls": {k: int(v) for k, v in calls.items() if v}, "cpu_s": [step["cpu_s"] for step in steps]}


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


def measure(engine: str, turns: int) -> dict[str, Any]:
    from tests.ranks import run_ranks

    env = {"EMUCUDA_COMPUTE": "0", "EMUCUDA_MEMORY": "80G", "DEEPSPEED_LOG_LEVEL": "error"}
    os.environ.update(env)  # read when Python starts
    with tempfile.TemporaryDirectory() as folder:
        target, world = "benchmarks.host_cost:measured", ENGINES[engine]
        given: dict[str, Any] = {"gpu": True, "timeout": 570, "engine": engine}
        counted = run_ranks(world, target, tokens=write_tokens(Path(folder)), folder=f"{folder}/run", turns=turns, **given)[0]
        arms = counted["arms"]
        added = [a - b for a, b in zip(arms["shardkit"]["cpu_s"], arms["hand-written"]["cpu_s"], strict=True)]
        found = {"measured": {k: environment()[k] for k in ("commit", "date")}, "ranks": world, "arms": arms,
                 "added_ms": [1e3 * value for value in median_ci(added)]}  # fmt: skip
    return found


def on_the_clock(engine: str, turns: int) -> dict[str, Any]:
    from tests.ranks import run_ranks

    os.environ.update(VIRTUAL)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"gpu": True, "timeout": 570, "engine": engine}
        tokens, target = write_tokens(Path(folder)), "benchmarks.host_cost:measured"
        found = run_ranks(ENGINES[engine], target, tokens=tokens, folder=f"{folder}/run", turns=turns, **given)
    arms = found[0]["arms"]
    return {"durations_us": VIRTUAL, "arms": arms, "ratio": arms["shardkit"]["step_s"] / arms["hand-written"]["step_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--clock", action="store_true", help="only the steps on kernels of a given duration")
    args = parser.parse_args()
    if os.environ.get("EMUCUDA", "0") in ("", "0"):
        parser.error("set EMUCUDA=1 and EMUCUDA_DEVICES=2")
    path = RESULTS / "host_cost.json"
    engines: dict[str, Any] = json.loads(path.read_text())["engines"] if path.exists() else {}
    for engine in args.engines:
        if args.clock:
            engines.setdefault(engine, {})["clock"] = on_the_clock(engine, args.turns)
        else:
            engines[engine] = engines.get(engine, {}) | measure(engine, args.turns)
        print(engine, json.dumps(engines[engine]), flush=True)
        write_result("host_cost", {"goals": GOALS, "device": "emulated", "engines": engines})


if __name__ == "__main__":
    main()
