"""Context parallelism over the shortest hand-written loop with the same collectives, on 2 CPU ranks.

`python -m benchmarks.context` trains the same model, weights and rows under FSDP2 on both sides, with Ulysses' four
all-to-alls a layer each way: steps in turns in one process group, by wall time and by processor time. Runs that split
nothing are compared with the commit before parallel.cp.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from . import bare
from .common import REPO, earlier, in_turns, publish, stamp
from .options import options, samples
from .overhead import (
    WARMUP,
    Ours,
    on_two_ranks,
    overrides,
    paired_figures,
    paired_steps,
    write_tokens,
)
from .turns import Ranks, mean_loss, timed

GOAL = 1.03
BEFORE = "4f7ef8a6^"
"""The commit before the key."""
SEQ, ROWS = 512, 2


def ulysses(attention: Any, x: Any, documents: Any = None) -> Any:
    """The reference model's attention of every second position, by hand."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    rows, part, width = x.shape
    size, heads = 2, attention.n_heads
    own = width // heads

    def exchanged(parts: Any) -> Any:
        return all_to_all_single_autograd(parts.contiguous(), [1] * size, [1] * size, dist.group.WORLD)

    def to_heads(tensor: Any) -> Any:  # [rows, heads / size, T, width of a head]
        parts = exchanged(tensor.view(rows, part, size, heads // size, own).permute(2, 0, 1, 3, 4))
        return parts.permute(1, 3, 2, 0, 4).reshape(rows, heads // size, part * size, own)

    q, k, v = (to_heads(tensor) for tensor in attention.qkv(x).chunk(3, -1))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    back = exchanged(out.view(rows, heads // size, part, size, own).permute(3, 0, 2, 1, 4))
    return attention.proj(back.permute(1, 2, 0, 3, 4).reshape(rows, part, width))


def by_hand() -> bare.Step:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, rank = bare.make_model(), dist.get_rank()
    for block in model.blocks:
        block.attn.forward = partial(ulysses, block.attn)
    # The reference model takes positions as those of packed documents.
    positions = torch.arange(rank, SEQ, 2).expand(ROWS, -1)
    model.forward = partial(model.forward, ignore_index=-100, documents=(positions, positions, (SEQ,)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return bare.loop(model, bare.adamw(model))


def batches(tokens: str, rank: int) -> Iterator[list[Any]]:
    """Each step's micro-batches of a rank: every second position."""
    micro = bare.micro_batches(tokens, SEQ, ROWS)
    while True:
        yield [
            (x[:, rank::2].contiguous(), y[:, rank::2].contiguous())
            for x, y in (next(micro) for _ in range(bare.ACCUM))
        ]


def measure_pairs(tokens: str, folder: str, pairs: int) -> dict[str, Any]:
    import torch.distributed as dist

    bare.SIZES["max_seq_len"] = SEQ
    settings = [
        *overrides("fsdp", tokens, f"{folder}/run", pairs + WARMUP), "parallel.cp=2", f"train.seq_len={SEQ}",
        f"train.micro_batch_size={ROWS}",
    ]  # fmt: skip
    return paired_steps(settings, by_hand(), batches(tokens, dist.get_rank()), pairs)


def unsplit_steps(stream: TextIO, scratch: str, tokens: str, count: int) -> Iterator[dict[str, Any]]:
    """Body of a rank: steps of a run that splits nothing."""
    ours = Ours(overrides("fsdp", tokens, f"{scratch}/run", count))

    def steps() -> Iterator[dict[str, float]]:
        while True:
            cpu = time.process_time()
            yield {"loss": ours.step(), "spent": time.process_time() - cpu}

    yield from timed(steps(), stream)
    ours.close()


def unsplit(before: str, tokens: str, folder: Path, pairs: int) -> dict[str, Any]:
    """Runs that split nothing, of this checkout and of the commit `before`: both alive, steps in turns."""
    old = folder / "before"
    old.mkdir()
    packages = ["git", "archive", before, "shardkit", "launch"]
    archive = subprocess.run(packages, cwd=REPO, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(old)], input=archive, check=True)
    for name in ("benchmarks", "tests"):
        (old / name).symlink_to(REPO / name)
    count = 1 + WARMUP + pairs
    with ExitStack() as running:
        arms = {
            arm: running.enter_context(
                Ranks(arm, "benchmarks.context:unsplit_steps", folder, checkout=path, tokens=tokens, count=count)
            )
            for arm, path in {"shardkit": REPO, "bare": old}.items()
        }
        first = {arm: ranks.answers() for arm, ranks in arms.items()}
        taken = in_turns({arm: partial(ranks.answers, "step") for arm, ranks in arms.items()}, count - 1)
    figures = {
        key: {arm: [max(answer[key] for answer in step) for step in steps[WARMUP:]] for arm, steps in taken.items()}
        for key in ("seconds", "spent")
    }
    losses = {arm: [mean_loss(step) for step in (first[arm], *steps)] for arm, steps in taken.items()}
    worst = max(abs(a - b) for a, b in zip(losses["shardkit"], losses["bare"], strict=True))
    return paired_figures({"times": figures["seconds"], "spent": figures["spent"], "loss_difference": worst})


def main() -> None:
    args = options(__doc__, pairs=samples(40), parts=("split", "unsplit"))
    result = {**earlier("context"), "goal": GOAL}
    result.pop("environment", None)
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder))
        for part in args.parts:
            if part == "split":
                paired = on_two_ranks(measure_pairs, tokens=tokens, folder=folder, pairs=args.pairs)
                result[part] = {"measured": stamp(), **paired_figures(paired)}
            else:
                result[part] = {"measured": stamp(), **unsplit(BEFORE, tokens, Path(folder), args.pairs)}
            publish("context", result)


if __name__ == "__main__":
    main()
