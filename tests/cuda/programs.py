"""Random programs for rehearsals: `python -m tests.cuda.programs --seeds 0:30` compares verdicts with smaller cards.

A seed draws a model, an engine, a precision, a batch and an optimizer, and writes them as a program without shardkit.
On a card of 1.01 × the rehearsed need it must run, on one of 0.98 × it must not, unless the allocator gives memory back
that it only cached.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = {
    "mlp": "nn.Sequential(*[nn.Sequential(nn.Linear(W, 4 * W), nn.GELU(), nn.Linear(4 * W, W)) for _ in range(D)])",
    "attention": "nn.Sequential(*[nn.TransformerEncoderLayer(W, 8, 4 * W, batch_first=True) for _ in range(D)])",
    "convolutions": "nn.Sequential(nn.Conv2d(3, W // 8, 3, padding=1), *[nn.Sequential(nn.Conv2d(W // 8, W // 8, 3, "
    "padding=1), nn.BatchNorm2d(W // 8), nn.ReLU()) for _ in range(D)])",
    "embedding": "nn.Sequential(nn.Embedding(30 * W, W), *[nn.Linear(W, W) for _ in range(D)], nn.Linear(W, 30 * W))",
}
INPUTS = {
    "mlp": "torch.randn(B, 64, W, device='cuda')", "attention": "torch.randn(B, 64, W, device='cuda')",
    "convolutions": "torch.randn(B, 3, 64, 64, device='cuda')",
    "embedding": "torch.randint(30 * W, (B, 64), device='cuda')",
}  # fmt: skip
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters())", "fused": "torch.optim.AdamW(model.parameters(), fused=True)",
    "loop": "torch.optim.Adam(model.parameters(), foreach=False)", "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "adafactor": "torch.optim.Adafactor(model.parameters())",
}  # fmt: skip
ENGINES = {
    "single": "",
    "ddp": "model = nn.parallel.DistributedDataParallel(model)",
    "fsdp": "from torch.distributed.fsdp import fully_shard\n"
    "for block in model:\n    fully_shard(block)\nfully_shard(model)",
}
PROGRAM = """\
import os, torch, torch.distributed as dist
from torch import nn
W, D, B = {width}, {depth}, {batch}
if "RANK" in os.environ:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = {model}
model = model.to("cuda", {dtype})
{engine}
optimizer = {optimizer}
for _ in range(5):
    for _ in range({accumulate}):
        x = {inputs}
        with torch.autocast("cuda", torch.bfloat16, enabled={autocast}):
            loss = model(x if not x.is_floating_point() else x.to({dtype})).float().pow(2).mean()
        loss.backward()
    {clip}
    optimizer.step()
    optimizer.zero_grad(set_to_none={to_none})
"""


@dataclass(frozen=True)
class Program:
    """A program, the options of its rehearsal, and what was drawn."""

    text: str
    options: tuple[str, ...]
    drawn: str


def draw(seed: int) -> Program:
    """The program of a seed; its need is between some hundred MiB and a few GiB, so that 1 % is more than a page."""
    pick = random.Random(seed)
    model, engine, optimizer = pick.choice(list(MODELS)), pick.choice(list(ENGINES)), pick.choice(list(OPTIMIZERS))
    dtype, autocast = pick.choice([("float32", False), ("float32", True), ("bfloat16", False)])
    batch, accumulate = pick.choice([4, 16, 48]), pick.choice([1, 1, 3])
    text = PROGRAM.format(
        model=MODELS[model], inputs=INPUTS[model], engine=ENGINES[engine], optimizer=OPTIMIZERS[optimizer],
        width=pick.choice([512, 768, 1024]), depth=pick.randint(4, 10), batch=batch, dtype=f"torch.{dtype}",
        autocast=autocast, accumulate=accumulate, to_none=pick.choice([True, True, False]),
        clip=pick.choice(["", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]),
    )  # fmt: skip
    ranks = () if engine == "single" else ("--ranks", str(pick.choice([2, 8])))
    precision = "autocast" if autocast else dtype
    return Program(text, ranks, f"{model}, {engine}, {precision}, {optimizer}, batch {batch} x {accumulate}")


def sharpness(program: Program, cache: Path, folder: Path, python: str = sys.executable) -> str:
    """How the program ends on cards around its rehearsed need.

    Args:
        python: the interpreter, whose torch is rehearsed.

    Returns:
        `sharp`; `sharp without its cache` if a card of 0.98 x the need holds it as the allocator gives cached memory
        back, and one of 0.98 x its tensors does not; else what contradicts the verdict.
    """
    from tests.cuda.rehearsals import rehearsed

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drawn.py").write_text(program.text)

    def on_card(*memory: str) -> tuple[int, dict[str, Any]]:
        options = [*program.options, *(("--gpu-memory", *memory) if memory else ())]
        done, verdict = rehearsed(cache, folder, *options, command=[python, "drawn.py"])
        return done.returncode, verdict

    code, plenty = on_card()
    if code:
        return f"ended with {code}: {plenty.get('reason')}"
    need = plenty["needed"]
    tensors = max(rank["peak_allocated"] + rank["outside_estimate"] for rank in plenty["ranks"])
    outcomes = {}
    for name, n_bytes in (("1.01", 1.01 * need), ("0.98", 0.98 * need), ("tensors", 0.98 * tensors)):
        outcomes[name], verdict = on_card(f"{int(n_bytes / 2**20)}MiB")
        if name == "1.01" and outcomes[name]:
            return f"on 1.01 x {need} bytes ended with {outcomes[name]}: {verdict['reason']}"
        if outcomes[name] == 4:
            return "sharp" if name == "0.98" else "sharp without its cache"
        if outcomes[name] == 7 and "of its cache back" in verdict["reason"]:
            return "sharp without its cache"  # the card does not hold the estimate for NCCL, and the verdict says so
    return f"fits less than its tensors: {outcomes}"


def main() -> None:
    from tests.cuda.rehearsals import linked_cache

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:30", metavar="FIRST:END")
    parser.add_argument("--cache", type=Path, help="A cache that has the emulation.")
    parser.add_argument("--python", default=sys.executable, help="An interpreter with another release of torch.")
    arguments = parser.parse_args()
    first, end = map(int, arguments.seeds.split(":"))
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        cache = arguments.cache or linked_cache(Path(scratch) / "cache")
        for seed in range(first, end):
            program = draw(seed)
            outcome = sharpness(program, cache, Path(scratch) / str(seed), arguments.python)
            outcomes[outcome.partition(":")[0]] += 1
            print(f"{seed}: {program.drawn}: {outcome}", flush=True)
    print(dict(outcomes))


if __name__ == "__main__":
    main()
