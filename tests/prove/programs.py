"""Training programs, drawn at random: what a user writes, with or without one defect that leaves the loss right.

A draw is a model, a layout and a defect. `Draw.program()` is a script for torchrun, `Draw.plain()` the script of one
process that it is judged against.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from textwrap import indent

VOCABULARY, WIDTH = 61, 16

IMPORTS = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler
"""

TEXTS = f"""
class Rows(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        size = (4, 7, 21)[int(torch.randint(3, (1,), generator=generator))] if RAGGED else 12
        return torch.randint(3, {VOCABULARY}, (size,), generator=generator)


def collate(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {{"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}}


def count(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


def loss_of(net, batch, reduction):
    logits = net(batch["input_ids"], batch["attention_mask"]).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction)
"""

NUMBERS = """
class Rows(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randn(8, generator=generator), torch.randn(4, generator=generator)


collate = None


def count(batch):
    return batch[1].numel()


def loss_of(net, batch, reduction):
    inputs, targets = batch
    return F.mse_loss(net(inputs.to(DTYPE)).float(), targets, reduction=reduction)
"""

TRANSFORMER = f"""
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.LayerNorm(8)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        hidden = self.inner(self.up(self.norm2(x)).unflatten(-1, (-1, 8))).flatten(-2)
        return x + self.down(F.gelu(hidden))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding({VOCABULARY}, {WIDTH})
        self.blocks = nn.ModuleList(Block({WIDTH}) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm({WIDTH}), nn.Linear({WIDTH}, {VOCABULARY}, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        if TIED:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
"""

PERCEPTRON = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm2, self.up, self.inner = nn.LayerNorm(16), nn.Linear(16, 32), nn.LayerNorm(8)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.inner(self.up(self.norm2(x)).unflatten(-1, (-1, 8))).flatten(-2)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
"""

LORA = """
class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) / 4)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank, dtype=base.weight.dtype) / 4)

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T


def add_lora(model):
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)
    return model
"""


@dataclass(frozen=True)
class Defect:
    """One way to train wrongly, and the answers that name it."""

    name: str
    words: tuple[str, ...]
    """Words of the diagnosis that are right."""
    layouts: tuple[str, ...]
    reference: str = "either"
    """plain: a script of one process has to be named, since one process of the same program has the defect too."""
    code: str = "not the same"
    accumulates: bool | None = None
    """Whether it needs several micro-batches, or none."""
    models: tuple[str, ...] = ("perceptron", "transformer", "lora")
    ragged: bool | None = None
    fp32: bool = False
    """Only there: in bf16 a share of the targets that is off by a few per cent is no more than rounding."""


ALL = ("ddp", "manual", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
LAYOUTS = (*ALL, "tp")
TORCH = ("ddp", "manual", "fsdp1", "fsdp2")
DEFECTS = [
    Defect("times ranks", ("factor",), ALL, ragged=False),
    Defect("not times ranks", ("factor",), ALL, "plain", ragged=True),
    Defect("sum, not mean", ("factor",), ("manual",), ragged=False),
    Defect("not divided by accumulation", ("factor",), TORCH, "plain", accumulates=True, ragged=False),
    Defect("divided by accumulation twice", ("factor",), ("zero1", "zero2", "zero3"), "plain", accumulates=True),
    Defect("sign", ("sign",), (*ALL, "tp"), "plain"),
    Defect("no reduce", ("not summed",), ("manual",)),
    Defect("no reduce of the norm", ("not summed",), ("manual", "tp")),
    Defect("past the wrapper", ("not summed",), ("ddp",)),
    Defect("mean of means", ("micro-batches",), TORCH, "plain", models=("transformer", "lora"), ragged=True, fp32=True),
    Defect("last micro-batch", ("micro-batches",), TORCH, accumulates=True),
    Defect("several backwards", ("micro-batches",), ("zero2",), "plain", accumulates=True),
    Defect("clipped before the reduce", ("clip norm", "not summed"), ("manual",)),
    Defect("local norm", ("clip norm",), ("fsdp1", "fsdp2", "tp")),
    Defect("untied seeds", ("copies differ",), ("manual",)),
    Defect("adapter after the shard", ("copies differ", "not summed"), ("fsdp2",), models=("lora",)),
    Defect("sampler seeded by rank", ("rows",), ALL, code="rows"),
    Defect("no sampler", ("rows",), ALL, code="rows"),
    Defect("optimizer before the wrap", ("other tensors",), ("fsdp2",)),
    Defect(
        "optimizer before the head",
        ("other tensors", "missing gradient"),
        ("ddp", "fsdp1", "fsdp2"),
        models=("perceptron",),
    ),
]
BY_NAME = {defect.name: defect for defect in DEFECTS}
CLIPS = {"clipped before the reduce", "local norm"}


@dataclass(frozen=True)
class Draw:
    """One program: which model on which layout, and what is wrong with it."""

    seed: int
    model: str
    layout: str
    defect: str
    world: int
    accumulation: int
    batch: int
    ragged: bool
    clip: bool
    optimizer: str
    dtype: str
    tied: bool
    layers: int
    no_sync: bool
    plain_reference: bool

    @property
    def wanted(self) -> str:
        """The verdict that is right."""
        return "same" if self.defect == "none" else BY_NAME[self.defect].code

    def without_defect(self) -> Draw:
        return replace(self, defect="none")

    def is_named(self, word: str | None) -> bool:
        """Whether a word of the diagnosis is right."""
        return self.defect == "none" or word in BY_NAME[self.defect].words

    def line(self) -> str:
        traits = [self.model, self.layout, f"{self.world} ranks", f"accumulation {self.accumulation}", self.dtype]
        marks = {"ragged": self.ragged, "clip": self.clip, "tied": self.tied, "no_sync": self.no_sync}
        marks |= {"against": self.plain_reference}
        return ", ".join([*traits, self.optimizer, *(name for name, present in marks.items() if present)])

    def program(self) -> str:
        return script(self, self.layout, self.defect)

    def plain(self) -> str:
        return script(self, "one", "none")


def draw(seed: int, *, right: bool, layouts: tuple[str, ...] = LAYOUTS) -> Draw:
    """The program of this seed, with a planted defect or without; every defect comes as often."""
    rng = random.Random(f"{seed} {right}")
    defects = [defect for defect in DEFECTS if set(defect.layouts) & set(layouts)]
    defect = None if right else defects[seed % len(defects)]
    names = [name for name in (defect.layouts if defect else layouts) if name in layouts]
    layout = rng.choices(names, [1 if name.startswith("zero") else 3 for name in names])[0]  # DeepSpeed starts slowly
    models = ("perceptron", "transformer", "lora")
    model = rng.choice([name for name in models if not defect or name in defect.models])
    if layout.startswith("zero") or layout == "tp":
        model = "transformer" if model == "lora" else model
    accumulates = defect.accumulates if defect and defect.accumulates is not None else rng.random() < 0.5
    accumulation = rng.choice([2, 3]) if accumulates and layout != "tp" else 1
    ragged = model != "perceptron" and layout != "tp" and rng.random() < 0.5
    if defect and defect.ragged is not None:
        ragged = defect.ragged if model != "perceptron" else False
    if defect and defect.name == "not times ranks":
        model = "transformer" if model == "perceptron" else model
        ragged = True
    plain_reference = layout == "tp" or (defect is not None and defect.reference == "plain") or rng.random() < 0.4
    dtype = "bf16" if rng.random() < 0.25 and layout != "tp" and not (defect and defect.fp32) else "fp32"
    if layout.startswith("zero") and dtype == "bf16" and (defect is None or defect.reference != "plain"):
        plain_reference = False  # DeepSpeed keeps weights in fp32 for its updates, which a plain loop in bf16 does not
    return Draw(
        seed=seed,
        model=model,
        layout=layout,
        defect=defect.name if defect else "none",
        world=2 if layout == "tp" or accumulation > 2 else rng.choice([2, 2, 3]),
        accumulation=accumulation,
        batch=rng.choice([2, 3, 4]) if layout != "tp" else 6,
        ragged=ragged,
        clip=bool(defect and defect.name in CLIPS) or rng.random() < 0.5,
        optimizer=rng.choice(["adamw", "adamw", "sgd"]),
        dtype=dtype,
        tied=model == "transformer" and rng.random() < 0.4 and not (defect and "wrap" in defect.name),
        layers=rng.choice([1, 2]),
        no_sync=layout == "ddp" and accumulation > 1 and rng.random() < 0.5,
        plain_reference=plain_reference,
    )


def script(d: Draw, layout: str, defect: str) -> str:
    """The text of the program, as one would write it for this layout alone."""
    one, zero = layout == "one", layout.startswith("zero")
    text = IMPORTS
    constants = {
        "RAGGED": d.ragged, "TIED": d.tied, "LAYERS": d.layers, "CLIP": 0.05 if d.clip else None,
        "BATCH": d.batch * d.world * d.accumulation if one and d.layout != "tp" else d.batch,
        "ACCUMULATION": 1 if one else d.accumulation,
    }  # fmt: skip
    text += "\n" + "".join(f"{name} = {value}\n" for name, value in constants.items())
    text += f"DTYPE = torch.{'bfloat16' if d.dtype == 'bf16' else 'float32'}\n"
    perceptron = d.model == "perceptron"
    model = PERCEPTRON if perceptron else TRANSFORMER
    text += "\n" + (NUMBERS if perceptron else TEXTS) + "\n" + model
    text += "\n" + LORA if d.model == "lora" else ""
    body = _begin(d, layout, defect) + _loader(d, layout, defect) + _loop(d, layout, defect, zero)
    return f"{text}\n\ndef main():\n{indent(body, '    ')}\n\nif __name__ == '__main__':\n    main()\n"


def _begin(d: Draw, layout: str, defect: str) -> str:
    """The group, the model, its wrapper and the optimizer."""
    text = "rank, world = 0, 1\n"
    if layout.startswith("zero"):
        text = "import deepspeed\n\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        text += "deepspeed.init_distributed('gloo')\nrank, world = dist.get_rank(), dist.get_world_size()\n"
    elif layout != "one":
        text = "dist.init_process_group('gloo')\nrank, world = dist.get_rank(), dist.get_world_size()\n"
    seed = f"{d.seed} + rank" if defect == "untied seeds" else str(d.seed)
    text += f"torch.manual_seed({seed})\nmodel = Model().to(DTYPE)\n"
    late = defect == "adapter after the shard"
    if d.model == "lora" and not late:
        text += "model = add_lora(model)\n"
    makes = {"adamw": "torch.optim.AdamW(params, lr=1e-3)", "sgd": "torch.optim.SGD(params, lr=0.05, momentum=0.9)"}
    optimizer = "params = [p for p in model.parameters() if p.requires_grad]\noptimizer = " + makes[d.optimizer] + "\n"
    if layout == "tp":
        optimizer = optimizer.replace("lr", "foreach=False, lr")
    early = defect in ("optimizer before the wrap", "optimizer before the head")
    text += optimizer if early else ""
    if defect == "optimizer before the head":
        text += "model.head = nn.Linear(16, 4).to(DTYPE)\n"
    wraps = {
        "ddp": "net = nn.parallel.DistributedDataParallel(model)\n",
        "fsdp1": "from torch.distributed.fsdp import FullyShardedDataParallel\n\n"
        "net = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device('cpu'))\n",
        "fsdp2": "from torch.distributed.fsdp import fully_shard\n\n"
        "for block in model.blocks:\n    fully_shard(block)\nnet = fully_shard(model)\n",
        "tp": "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n\n"
        "mesh = init_device_mesh('cpu', (world,))\nplan = {'up': ColwiseParallel(), 'down': RowwiseParallel()}\n"
        "for block in model.blocks:\n    parallelize_module(block, mesh, plan)\nnet = model\n",
    }
    if not layout.startswith("zero"):
        text += wraps.get(layout, "net = model\n")
    if late:
        text += "torch.manual_seed(rank)\nadd_lora(model)\n"
    if layout.startswith("zero"):
        given = {"adamw": ("AdamW", "'lr': 1e-3, 'torch_adam': True"), "sgd": ("SGD", "'lr': 0.05, 'momentum': 0.9")}
        kind, settings = given[d.optimizer]
        accumulation = 1 if defect == "several backwards" else "ACCUMULATION"
        return text + (
            "config = {\n    'train_micro_batch_size_per_gpu': BATCH,\n"
            f"    'gradient_accumulation_steps': {accumulation},\n    'gradient_clipping': CLIP or 0.0,\n"
            f"    'zero_optimization': {{'stage': {layout[-1]}}},\n"
            f"    'optimizer': {{'type': '{kind}', 'params': {{{settings}}}}},\n"
            f"    'bf16': {{'enabled': {d.dtype == 'bf16'}}},\n    'zero_allow_untested_optimizer': True,\n}}\n"
            "net, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)\n"
        )
    if early:
        return text
    if layout == "fsdp1":
        optimizer = optimizer.replace("model.parameters()", "net.parameters()")
    return text + optimizer


def _loader(d: Draw, layout: str, defect: str) -> str:
    sampler = f"DistributedSampler(data, world, rank, seed={d.seed})"
    if layout == "one":
        sampler = "SequentialSampler(data)" if d.layout == "tp" else "RandomSampler(data)"
    elif defect == "sampler seeded by rank":
        sampler = "RandomSampler(data, generator=torch.Generator().manual_seed(rank))"
    elif defect == "no sampler" or layout == "tp":
        sampler = "SequentialSampler(data)"
    return (
        f"data = Rows()\nsampler = {sampler}\n"
        "loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=collate, drop_last=True)\n"
        "batches = iter(loader)\n"
    )


def _loop(d: Draw, layout: str, defect: str, zero: bool) -> str:
    """Two steps and the rest of a short training: the loss, its backward, the reduce, the clip, the step."""
    tokens = d.ragged and defect != "mean of means"  # else each row has as many targets
    several = layout not in ("one", "tp")
    lines = ["micro = [next(batches) for _ in range(ACCUMULATION)]"]
    if tokens:
        lines.append("targets = torch.tensor(sum(count(batch) for batch in micro))")
        lines += ["dist.all_reduce(targets)"] if several else []
    net = "model" if defect == "past the wrapper" else "net"
    divides = zero and defect != "several backwards"  # DeepSpeed divides by the accumulation by itself
    if tokens:
        scale = f"loss_of({net}, batch, 'sum') / targets"
        scale += " * world" if several and defect != "not times ranks" else ""
        scale += " * ACCUMULATION" if divides and defect != "divided by accumulation twice" else ""
    else:
        scale = f"loss_of({net}, batch, 'mean')"
        scale += "" if defect == "not divided by accumulation" else " / ACCUMULATION"
        if divides and defect != "divided by accumulation twice":
            scale = scale.removesuffix(" / ACCUMULATION")
    if defect == "times ranks":
        scale += " * world"
    lines += ["for number, batch in enumerate(micro):"]
    inner = [f"loss = {'-' if defect == 'sign' else ''}{scale}"]
    if defect == "last micro-batch":
        inner.insert(0, "optimizer.zero_grad()")
    if zero:
        inner.append("net.backward(loss)")
        inner += ["net.step()"] if divides else []
    elif d.no_sync and layout == "ddp":
        inner = ["net.require_backward_grad_sync = number == len(micro) - 1", *inner, "loss.backward()"]
    else:
        inner.append("loss.backward()")
    lines += ["    " + line for line in inner]
    if zero:
        return _steps([*lines, *([] if divides else ["net.step()"])])
    if defect == "clipped before the reduce":
        lines.append("nn.utils.clip_grad_norm_(params, CLIP)")
    if layout == "manual" and defect != "no reduce":
        lines.append("for p in params:")
        if defect == "no reduce of the norm":
            one = "model.blocks[0].up.lora_B" if d.model == "lora" else "model.norm.weight"
            lines.append(f"    if p is {one}:\n        continue")
        lines.append("    dist.all_reduce(p.grad)")
        lines += ["    p.grad /= world"] if defect != "sum, not mean" else []
    if layout == "tp" and defect != "no reduce of the norm":
        lines.append("for block in model.blocks:  # each rank has the gradient of its part of the hidden units alone")
        lines.append("    for p in block.inner.parameters():\n        dist.all_reduce(p.grad)")
    lines += _clip(d, layout, defect)
    return _steps([*lines, "optimizer.step()", "optimizer.zero_grad()"])


def _clip(d: Draw, layout: str, defect: str) -> list[str]:
    if not d.clip or defect == "clipped before the reduce":
        return []
    local = "nn.utils.get_total_norm([getattr(p.grad, '_local_tensor', p.grad) for p in params])"
    whole = (
        "nn.utils.get_total_norm([p.grad.full_tensor() if hasattr(p.grad, 'full_tensor') else p.grad for p in params])"
    )
    if layout in ("fsdp2", "tp") and defect == "local norm":
        return [f"norm = {local}", "nn.utils.clip_grads_with_norm_(params, CLIP, norm, foreach=False)"]
    if layout == "tp" or defect == "adapter after the shard":
        return [f"norm = {whole}", "nn.utils.clip_grads_with_norm_(params, CLIP, norm, foreach=False)"]
    if layout == "fsdp1" and defect != "local norm":
        return ["net.clip_grad_norm_(CLIP)"]
    return ["nn.utils.clip_grad_norm_(params, CLIP)"]


def _steps(lines: list[str]) -> str:
    return (
        "for step in range(3):\n" + indent("\n".join([*lines, "print(step, float(loss), flush=True)"]), "    ") + "\n"
    )
