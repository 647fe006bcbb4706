"""The shortest hand-written loop for each engine, to compare shardkit with.

`torchrun … -m benchmarks.bare ENGINE TOKENS.bin` takes one step and prints the time when it was done.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

SIZES = {"vocab_size": 256, "max_seq_len": 128, "d_model": 256, "n_layers": 4, "n_heads": 4}
SEQ, MICRO, ACCUM, LR, MAX_NORM, WEIGHT_DECAY = 128, 4, 2, 3e-4, 1.0, 0.1

Step = Callable[[list[Any]], float]


def batches(tokens_file: str, rank: int, world: int) -> Iterator[list[Any]]:
    """Each step's micro-batches of this rank."""
    micro = micro_batches(tokens_file, SEQ, MICRO, rank, world)
    while True:
        yield [next(micro) for _ in range(ACCUM)]


def micro_batches(tokens_file: str, seq: int, micro: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of a rank's micro-batches, in the file's order; ranks take turns."""
    import numpy as np
    import torch

    tokens = np.memmap(tokens_file, dtype=np.uint16, mode="r")
    for first in itertools.count(rank * micro, world * micro):
        rows = np.stack([tokens[row * seq : (row + 1) * seq + 1] for row in range(first, first + micro)])
        whole = torch.from_numpy(rows.astype(np.int64))
        yield whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def make_model() -> Any:
    import torch

    from shardkit.models.transformer import Transformer, init_parameter
    from shardkit.parallel.weights import Weights

    config: Any = SimpleNamespace(**SIZES, dropout=0.0, tie_weights=False, loss_chunk_size=1024)
    weights = Weights(0, partial(init_parameter, config))
    model = weights.build(lambda: Transformer(config), None)
    weights.materialise(model, torch.device("cpu"))
    return model


def decays(model: Any) -> set[str]:
    """Names of the parameters that weight decay shrinks."""
    return {name for name, param in model.named_parameters() if param.ndim > 1 and "emb" not in name}


def groups(model: Any, names: set[str] | None = None) -> list[dict[str, Any]]:
    """Parameters with and without weight decay; `names`: those with it, where an engine has flattened them."""
    names = decays(model) if names is None else names
    named = [(name.replace("_fsdp_wrapped_module.", ""), param) for name, param in model.named_parameters()]
    decayed = [param for name, param in named if name in names]
    plain = [param for name, param in named if name not in names]
    return [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]


def adamw(model: Any, names: set[str] | None = None) -> Any:
    return adamw_of(groups(model, names))


def adamw_of(groups: list[dict[str, Any]]) -> Any:
    import torch

    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)


def loop(
    model: Any,
    optimizer: Any,
    backward: Callable[[Any], object] = lambda loss: loss.backward(),
    clip: Callable[[], object] | None = None,
    unreduced: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """A step written by hand.

    Args:
        clip: torch's `clip_grad_norm_` if it is not given.
        unreduced: a context for every micro-batch but the last.
    """
    import torch

    clip = clip or (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))

    def step(micro: list[Any]) -> float:
        losses = []
        for i, (x, y) in enumerate(micro):
            with unreduced() if i < len(micro) - 1 else nullcontext():
                loss = model(x, y) / (y.numel() * len(micro))
                backward(loss)
            losses.append(loss.detach())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return read(losses)

    return step


def engine_loop(model: Any, backward: Callable[[Any], object], update: Callable[[], object]) -> Step:
    """A step with an engine that accumulates, clips, and updates at the last micro-batch."""

    def step(micro: list[Any]) -> float:
        losses = []
        for x, y in micro:
            loss = model(x, y) / y.numel()
            backward(loss)
            update()
            losses.append(loss.detach() / len(micro))
        return read(losses)

    return step


def ddp() -> Step:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    return loop(model, adamw(model), unreduced=model.no_sync)


def fsdp() -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return loop(model, adamw(model))


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
    """deepspeed, on CPUs without its own shared-memory collectives: compiling them takes minutes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as shardkit does
    return deepspeed


def zero(stage: int) -> Step:
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
    model = make_model()
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model), config=ds_config(stage, model))
    return engine_loop(engine, engine.backward, engine.step)


def read(losses: list[Any]) -> float:
    """The sum of a step's losses, read from the device at once."""
    import torch

    return float(torch.stack(losses).sum().item())


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
