"""The shortest hand-written loop for each engine, to compare shardkit with.

`torchrun … -m benchmarks.bare ENGINE TOKENS.bin` takes one step and prints the time when it was done.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

SIZES = {"vocab_size": 256, "max_seq_len": 128, "d_model": 256, "n_layers": 4, "n_heads": 4}
SEQ, MICRO, ACCUM, LR, MAX_NORM, WEIGHT_DECAY = 128, 4, 2, 3e-4, 1.0, 0.1

Step = Callable[[list[Any]], float]


def batches(tokens_file: str, rank: int, world: int) -> Iterator[list[Any]]:
    """Each step's micro-batches of this rank, in file order."""
    import numpy as np
    import torch

    tokens = np.memmap(tokens_file, dtype=np.uint16, mode="r")
    at = 0
    while True:
        step = []
        for micro in range(ACCUM):
            rows = [at + (micro * world + rank) * MICRO + i for i in range(MICRO)]
            window = np.stack([tokens[r * SEQ : r * SEQ + SEQ + 1] for r in rows]).astype(np.int64)
            whole = torch.from_numpy(window)
            step.append((whole[:, :-1], whole[:, 1:]))
        at += ACCUM * MICRO * world
        yield step


def make_model() -> Any:
    import torch

    from shardkit.models.transformer import Transformer, init_parameter
    from shardkit.parallel.weights import Weights

    config: Any = SimpleNamespace(**SIZES, dropout=0.0, tie_weights=False, loss_chunk_size=1024)
    weights = Weights(0, partial(init_parameter, config))
    model = weights.build(lambda: Transformer(config), None)
    weights.materialise(model, torch.device("cpu"))
    return model


def groups(model: Any) -> list[dict[str, Any]]:
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "emb" not in n]
    plain = [p for n, p in model.named_parameters() if p.ndim == 1 or "emb" in n]
    return [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(groups(model), lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)


def ddp() -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = adamw(model)

    def step(micro: list[Any]) -> float:
        total = 0.0
        for i, (x, y) in enumerate(micro):
            model.require_backward_grad_sync = i == len(micro) - 1
            loss = model(x, y) / (y.numel() * len(micro))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def fsdp() -> Step:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = adamw(model)

    def step(micro: list[Any]) -> float:
        total = 0.0
        for x, y in micro:
            loss = model(x, y) / (y.numel() * len(micro))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def ds_config(stage: int, model: Any) -> dict[str, Any]:
    """DeepSpeed's config for this model; each bucket holds all of it, and nothing overlaps on a CPU."""
    numel = sum(p.numel() for p in model.parameters())
    prefetch = {"stage3_prefetch_bucket_size": numel // 10} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUM,
        "gradient_clipping": MAX_NORM,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": numel,
            "allgather_bucket_size": numel,
            "overlap_comm": False,
            **prefetch,
        },
    }


def import_deepspeed() -> Any:
    """deepspeed for CPUs, without its own shared-memory collectives: compiling them takes minutes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as shardkit does
    return deepspeed


def zero(stage: int) -> Step:
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
    model = make_model()
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model), config=ds_config(stage, model))

    def step(micro: list[Any]) -> float:
        total = 0.0
        for x, y in micro:
            loss = engine(x, y) / y.numel()
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(micro)
        return total

    return step


ENGINES: dict[str, Callable[[], Step]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "zero2": partial(zero, 2),
    "zero3": partial(zero, 3),
}


def main() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step = ENGINES[sys.argv[1]]()
    data = batches(sys.argv[2], dist.get_rank(), dist.get_world_size())
    step(next(data))
    if dist.get_rank() == 0:
        print(f"first step done at {time.time():.4f}", flush=True)
    del step
    gc.collect()  # an FSDP2 model that outlives the group can abort the process at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
