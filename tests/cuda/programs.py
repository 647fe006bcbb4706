"""Random programs without shardkit for rehearsals: a model, an engine, a precision, a batch and an optimizer."""

from __future__ import annotations

import random
from dataclasses import dataclass

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
