"""Tensor and expert parallelism beside transformers' DistributedConfig and Accelerate's ParallelismConfig, on CPUs.

`python -m benchmarks.wide_peers` trains the same small Llama and Qwen 3 MoE on the same rows with SGD under each, and
in one process: losses, the gradient that is furthest from one process's, peak tensor memory and the time of a step.
Each arm is a command of its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from .common import measure_each
from .context_peers import measure
from .options import ONLY, chosen, options
from .wide import VOCAB, write_model

ROWS, SEQ, STEPS, LR = 4, 256, 9, 0.1
Look = Callable[[Iterable[tuple[str, Any]]], None]
"""Sees the gradients by their parameters' names, before the update."""
Step = Callable[[Any, Any, int, Look], float]
"""Trains on a step's tokens, targets and their number; a rank's part of the loss."""
FOLDER = "SHARDKIT_BENCHMARK_MODELS"


def rows(step: int) -> tuple[Any, Any, int]:
    import torch

    tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, SEQ - 40 * row - step :] = -100  # other numbers of targets in each row
    return tokens[:, :-1].contiguous(), targets, int((targets != -100).sum())


def load(axis: str, **more: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(f"{os.environ[FOLDER]}/{axis}", dtype=torch.float32, **more)


def summed(model: Any, tokens: Any, targets: Any, **more: Any) -> Any:
    import torch.nn.functional as F

    logits = model(input_ids=tokens, **more).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def gradients(model: Any) -> Iterable[tuple[str, Any]]:
    return ((name, param.grad) for name, param in model.named_parameters())


def by_torch(model: Any, data_rank: int = 0, data_size: int = 1, copies: int = 1) -> tuple[Any, Step]:
    """Backward of a rank's rows and an update by hand.

    `data_size`: groups with rows of their own, over which FSDP2 averages. `copies`: ranks that have the same rows.
    """
    import torch

    optimizer = torch.optim.SGD(model.parameters(), LR, foreach=False)

    def step(tokens: Any, targets: Any, n: int, look: Look) -> float:
        part = slice(data_rank * ROWS // data_size, (data_rank + 1) * ROWS // data_size)
        loss = summed(model, tokens[part], targets[part]) / n
        (loss * data_size).backward()
        look(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() / copies

    return model, step


def one_process(axis: str) -> tuple[Any, Step]:
    return by_torch(load(axis))


def ours(axis: str, **sizes: int) -> tuple[Any, Step]:
    from shardkit.data.windows import split_rows
    from shardkit.models.packed_attention import BatchDocuments, may_split, register
    from shardkit.run.job import start

    cp = sizes.get("cp", 1)
    settings = {
        "parallel.strategy": "fsdp", **{f"parallel.{key}": size for key, size in sizes.items()}, "run.device": "cpu",
        "optim.name": "sgd", "optim.lr": LR, "optim.weight_decay": 0.0, "optim.schedule": "constant",
        "train.max_norm": None, "train.seq_len": SEQ,
    }  # fmt: skip
    started = start(None, settings)
    job = started.__enter__()
    strategy: Any = job.strategy
    job.wrap(may_split(load(axis, attn_implementation=register())) if cp > 1 else load(axis))
    update, looks = strategy.step, list[Look]()

    def recorded(request: Any) -> Any:
        looks[-1]((name, strategy.gradient(param)) for name, param in strategy.model.named_parameters())
        return update(request)

    strategy.step = recorded

    def loss(model: Any, batch: Any) -> Any:
        if cp == 1:
            return summed(model, batch["tokens"], batch["targets"])
        documents = BatchDocuments(batch["bounds"], batch["lengths"])
        return summed(
            model, batch["tokens"], batch["targets"], position_ids=batch["positions"], documents=documents
        )  # fmt: skip

    def step(tokens: Any, targets: Any, n: int, look: Look) -> float:
        looks.append(look)
        world = job.world
        part = slice(world.data_rank * ROWS // world.data_size, (world.data_rank + 1) * ROWS // world.data_size)
        batch = {"tokens": tokens[part], "targets": targets[part]}
        if cp > 1:
            batch = split_rows(batch, world.loss_rank % cp, cp)
        result = job.step([batch], loss, lambda batch: int((batch["targets"] != -100).sum()))
        return result.loss / world.size  # the loss of all rows, on each rank

    step.job = started  # type: ignore[attr-defined]  # it ends with its last reference
    return strategy.model, step


def transformers_own(axis: str, **sizes: int) -> tuple[Any, Step]:
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    model = load(axis, distributed_config=DistributedConfig(**sizes))
    model.train()
    tp, data_size = sizes.get("tp_size", 1), sizes.get("fsdp_size", 1)
    return by_torch(model, dist.get_rank() // tp, data_size, tp)


def accelerate(axis: str, **sizes: int) -> tuple[Any, Step]:
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from transformers.distributed import DistributedConfig

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**sizes))
    tp, data_size = sizes["tp_size"], sizes["dp_shard_size"]
    model = load(axis, distributed_config=DistributedConfig(tp_size=tp))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), LR))
    return by_torch(model, dist.get_rank() // tp, data_size, tp)


ARMS: dict[str, tuple[str, int, Callable[[str], tuple[Any, Step]]]] = {
    "Llama, one process": ("tp", 1, one_process),
    "Llama, shardkit tp 2": ("tp", 2, partial(ours, tp=2)),
    "Llama, transformers tp 2": ("tp", 2, partial(transformers_own, tp_size=2)),
    "Llama, shardkit tp 2 × fsdp 2": ("tp", 4, partial(ours, tp=2)),
    "Llama, transformers tp 2 × fsdp 2": ("tp", 4, partial(transformers_own, tp_size=2, fsdp_size=2)),
    "Llama, Accelerate tp 2 × dp_shard 2": ("tp", 4, partial(accelerate, tp_size=2, dp_shard_size=2)),
    "Llama, shardkit tp 2 × cp 2": ("tp", 4, partial(ours, tp=2, cp=2)),
    "Qwen 3 MoE, one process": ("ep", 1, one_process),
    "Qwen 3 MoE, shardkit ep 2": ("ep", 2, partial(ours, ep=2)),
    "Qwen 3 MoE, transformers fsdp 2, ep 2": ("ep", 2, partial(transformers_own, fsdp_size=2, ep_size=2)),
    "Qwen 3 MoE, transformers tp 2, ep 2": ("ep", 2, partial(transformers_own, tp_size=2, ep_size=2)),
    "Qwen 3 MoE, transformers enable_expert_parallel": (
        "ep", 2, partial(transformers_own, tp_size=2, enable_expert_parallel=True)
    ),
    "Qwen 3 MoE, shardkit fsdp 4, ep 2": ("ep", 4, partial(ours, ep=2)),
    "Qwen 3 MoE, transformers fsdp 4, ep 2": ("ep", 4, partial(transformers_own, fsdp_size=4, ep_size=2)),
    "Qwen 3 MoE, transformers tp 2 × fsdp 2, ep 2": (
        "ep", 4, partial(transformers_own, tp_size=2, fsdp_size=2, ep_size=2)
    ),
    "Qwen 3 MoE, shardkit ep 2 × cp 2": ("ep", 4, partial(ours, ep=2, cp=2)),
}  # fmt: skip


def furthest(axis: str, named: Iterable[tuple[str, Any]]) -> tuple[float, str]:
    """The largest difference of a gradient from one process's, over that gradient's largest value; collective."""
    import torch
    import torch.distributed as dist

    expected: dict[str, Any] = {}

    def keep(pairs: Iterable[tuple[str, Any]]) -> None:
        expected.update({name: grad.clone() for name, grad in pairs})

    one_process(axis)[1](*rows(0), keep)
    worst = (0.0, "")
    for name, grad in named:
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else torch.zeros(1) if grad is None else grad
        other = expected.pop(name.removeprefix("module."))
        same = whole.shape == other.shape
        error = ((whole - other).abs().max() / other.abs().max()).item() if same else float("inf")
        worst = max(worst, (error if error == error else float("inf"), name))
    if expected:
        worst = float("inf"), f"{next(iter(expected))} is missing"
    every = [worst]
    if dist.is_initialized():
        every = [worst] * dist.get_world_size()
        dist.all_gather_object(every, worst)
    return max(every)


def run(name: str, out: str) -> None:
    """Body of a rank: rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    from shardkit.memory import TensorTracker

    torch.set_num_threads(1)
    axis, ranks, make = ARMS[name]
    if ranks > 1 and "shardkit" not in name:
        dist.init_process_group("gloo")
    losses, seconds, spent, worst = [], [], [], (0.0, "")

    def look(named: Iterable[tuple[str, Any]]) -> None:
        nonlocal worst
        if not losses:
            worst = furthest(axis, named)

    model, step = make(axis)
    for number in range(STEPS):
        began, cpu = time.perf_counter(), time.process_time()
        loss = torch.tensor(step(*rows(number), look))
        seconds.append(time.perf_counter() - began)
        spent.append(time.process_time() - cpu)
        if dist.is_initialized():
            dist.all_reduce(loss)
        losses.append(loss.item())
    with TensorTracker() as tracker:
        tracker.see(model)
        for number in range(2):
            step(*rows(number), look)
    if int(os.environ.get("RANK", "0")) == 0:
        found = {"losses": losses, "gradient": worst, "s": seconds, "cpu_s": spent, "peak": tracker.peak("cpu")}
        Path(out).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # some of these libraries hang or abort when their groups go


def measured(name: str) -> dict[str, Any]:
    return measure(name, "benchmarks.wide_peers", ARMS[name][1], ("time",))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run(*sys.argv[2:])
    args = options(__doc__, only=ONLY)
    with tempfile.TemporaryDirectory() as folder:
        for axis in ("tp", "ep"):
            write_model(axis, folder)
        os.environ[FOLDER] = folder
        settings = {"tokens": SEQ, "rows": ROWS, "steps": STEPS}
        measure_each("wide_peers", "arms", chosen(ARMS, args.only), measured, settings=settings)
