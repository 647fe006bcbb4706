"""Plain DeepSpeed with its own defaults and its tutorials' offload; `… benchmarks.gpu.plain JSON` prints JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from .cases import Figures

LR, WARMUP = 3e-4, 2
_OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|DefaultCPUAllocator", re.IGNORECASE)


def offload_config(stage: int, cpu: bool) -> dict[str, Any]:
    """The DeepSpeed config; buckets and the like keep DeepSpeed's defaults."""
    there = {"device": "cpu", "pin_memory": not cpu}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": stage, "offload_optimizer": there, **({"offload_param": there} if stage == 3 else {}),
            "contiguous_gradients": True, "overlap_comm": not cpu,
        },
        "steps_per_print": 2**31,
    }  # fmt: skip


def train(stage: int, sizes: dict[str, int], steps: int, cpu: bool) -> Figures:
    """Train the reference transformer with checkpointed blocks for some steps on the benchmarks' usual text."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    device = torch.device("cpu" if cpu else "cuda:0")
    dist.init_process_group("gloo" if cpu else "nccl", store=HashStore(), rank=0, world_size=1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of compiling for nothing
    deepspeed.init_distributed("gloo" if cpu else "nccl", verbose=False, dist_init_required=False)
    offload = offload_config(stage, cpu)
    model = _build(
        stage, SimpleNamespace(**sizes, dropout=0.0, tie_weights=False, loss_chunk_size=1024), offload, device
    )
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=offload, dist_init_required=False
    )
    losses, times = [], []
    for step, (x, y) in zip(range(steps), _batches(sizes["max_seq_len"], device), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        began = time.perf_counter()
        loss = engine(x, y) / y.numel()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    return {
        "outcome": "ok", "losses": losses, "tokens_per_s": sizes["max_seq_len"] / median(times[1:]),
        "peak_allocated": None if cpu else torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def _build(stage: int, config: Any, offload: dict[str, Any], device: Any) -> Any:
    """Build the model in bf16 in its final place: on the device, or partitioned during construction."""
    import deepspeed
    import torch
    from torch.utils.checkpoint import checkpoint

    from shardkit.models.transformer import Transformer, init_parameter

    generator = torch.Generator(device).manual_seed(0)
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=offload):
            model = Transformer(config)
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                init_parameter(config, name, param.data, generator)
    else:
        torch.set_default_dtype(torch.bfloat16)
        with device:
            model = Transformer(config)
        torch.set_default_dtype(torch.float32)
        for name, param in model.named_parameters():
            init_parameter(config, name, param.data, generator)
    for block in model.blocks:
        forward: Callable[..., Any] = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
    return model.train()


def _batches(seq: int, device: Any) -> Iterator[tuple[Any, Any]]:
    from ..bare import micro_batches
    from ..overhead import write_tokens

    with tempfile.TemporaryDirectory() as folder:
        for x, y in micro_batches(write_tokens(Path(folder)), seq, 1):
            yield x.to(device), y.to(device)


def main() -> None:
    request = json.loads(sys.argv[1])
    try:
        figures = train(**request)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        figures = {"outcome": "out of memory", "losses": [], "message": str(error).splitlines()[0]}
    print(json.dumps(figures), flush=True)
    os._exit(0)  # DeepSpeed's engine outlives its process group and can abort the process at its end


if __name__ == "__main__":
    main()
