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


CONTEXT = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def attend(q, k, v, is_causal):
    n = q.size(2)
    mask = torch.ones(n, n * dist.get_world_size(), dtype=torch.bool).tril(n * dist.get_rank())
    return F.scaled_dot_product_attention(q, Gather.apply(k), Gather.apply(v), attn_mask=mask)
"""

STAGE = """
class Stage(nn.Module):
    def __init__(self, model, rank, world):
        super().__init__()
        first, n = rank * len(model.blocks) // world, len(model.blocks) // world
        self.embed = model.embed if rank == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, first + n)})
        self.last = rank == world - 1
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x, attention_mask=None):
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x
"""

CAUSAL = """
class Causal(Model):
    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = super().forward(input_ids).float()
        arguments = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": LOSS, "logits": logits}
"""


PACKED = f"""
class Rows(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        cut = int(torch.randint(4, 9, (1,), generator=generator))
        documents = torch.tensor([0] * cut + [1] * (12 - cut))
        positions = torch.cat([torch.arange(cut), torch.arange(12 - cut)])
        return torch.randint(3, {VOCABULARY}, (12,), generator=generator), positions, documents


def collate(rows):
    ids, positions, documents = (torch.stack(column) for column in zip(*rows))
    labels = torch.where(positions == 0, -100, ids)
    return {{"input_ids": ids, "position_ids": positions, "documents": documents, "labels": labels}}


def loss_of(net, batch, reduction):
    logits = net(batch["input_ids"], batch["position_ids"], batch["documents"]).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction)
"""


def packed(transformer: str, defect: str) -> str:
    """The model for rows of two documents, in which a token sees those before it in its own."""
    causal = "torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()"
    mask = f"({causal} & (d[:, None] == d[:, :, None]))[:, None]"
    if defect == "documents see each other":
        mask = f"{causal}[None, None]"
    documents = "documents"
    if defect == "the last block's documents see each other":
        documents = "documents * (block is not self.blocks[-1])"
    if defect == "documents cut a token late":
        documents = "documents.roll(1, 1) * (position_ids.cummax(1).values > 0)"
    return (
        transformer.replace("def forward(self, x):", "def forward(self, x, d):")
        .replace("is_causal=True", f"attn_mask={mask}")
        .replace("x = block(x)", f"x = block(x, {documents})")
        .replace("attention_mask=None", "position_ids, documents")
        .replace("self.embed(input_ids)", "self.embed(input_ids) + torch.sin(position_ids[..., None] * 0.5).to(DTYPE)")
    )


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
    until: str = ""
    """The option that looks for it: save or leak."""


ALL = ("ddp", "manual", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
LAYOUTS = (*ALL, "tp")
FURTHER = ("hsdp", "cp", "pp", "accelerate", "trainer")
"""Two-dimensional sharding, a split sequence, two stages: by hand; and two libraries."""
TORCH = ("ddp", "manual", "fsdp1", "fsdp2", "hsdp")
MEAN = (*ALL, "hsdp", "accelerate", "trainer")
SPLIT = ("fsdp2", "hsdp", "tp")
PACKS = ("ddp", "manual", "fsdp1", "fsdp2", "zero1", "tp", "hsdp", "accelerate")
DEFECTS = [
    Defect("times ranks", ("factor",), MEAN, ragged=False),
    Defect("not times ranks", ("factor",), (*ALL, "hsdp", "accelerate"), "plain", ragged=True),
    Defect("sum, not mean", ("factor",), ("manual",), ragged=False),
    Defect("not divided by accumulation", ("factor",), (*TORCH, "pp"), "plain", accumulates=True, ragged=False),
    Defect(
        "divided by accumulation twice",
        ("factor",),
        ("zero1", "zero2", "zero3", "accelerate", "trainer"),
        "plain",
        accumulates=True,
    ),
    Defect("sign", ("sign",), (*LAYOUTS, *FURTHER), "plain"),
    Defect("no reduce", ("not summed",), ("manual", "cp")),
    Defect("no reduce of the norm", ("not summed",), ("manual", "tp", "cp")),
    Defect("past the wrapper", ("not summed",), ("ddp", "accelerate")),
    Defect(
        "mean of means",
        ("micro-batches",),
        (*TORCH, "accelerate", "trainer"),
        "plain",
        models=("transformer", "lora"),
        ragged=True,
        fp32=True,
    ),
    Defect("last micro-batch", ("micro-batches",), (*TORCH, "cp", "pp"), accumulates=True),
    Defect("several backwards", ("micro-batches",), ("zero2",), "plain", accumulates=True),
    Defect("clipped before the reduce", ("clip norm", "not summed"), ("manual", "cp")),
    Defect("local norm", ("clip norm",), ("fsdp1", "fsdp2", "tp", "hsdp", "pp")),
    Defect("untied seeds", ("copies differ",), ("manual", "cp")),
    Defect("adapter after the shard", ("copies differ", "not summed"), ("fsdp2", "hsdp"), models=("lora",)),
    Defect("sampler seeded by rank", ("rows",), (*ALL, "hsdp"), code="rows"),
    Defect("no sampler", ("rows",), (*ALL, "hsdp", "accelerate"), code="rows"),
    Defect("optimizer before the wrap", ("other tensors",), ("fsdp2", "hsdp")),
    Defect(
        "optimizer before the head",
        ("other tensors", "missing gradient"),
        ("ddp", "fsdp1", "fsdp2", "hsdp"),
        models=("perceptron",),
    ),
    Defect("replicas not reduced", ("not summed", "copies differ"), ("hsdp",)),
    Defect("divided by the parts", ("factor",), ("cp",)),
    Defect("mean of the parts' means", ("other", "micro-batches"), ("cp",), fp32=True),
    Defect("no reduce of keys and values", ("other",), ("cp",), models=("transformer",)),
    Defect("a stage's gradient divided", ("factor",), ("pp",)),
    Defect("a stage without gradient", ("missing gradient",), ("pp",)),
    Defect("ranks weigh alike", ("micro-batches",), ("trainer",), ragged=True, fp32=True),
    Defect("one shard saved", ("saved",), (*SPLIT, "fsdp1", "zero3"), until="save"),
    Defect("one shard saved, else zero", ("saved",), SPLIT, until="save"),
    Defect("one shard in a checkpoint", ("saved",), SPLIT, until="save"),
    Defect("a tensor not saved", ("saved",), (*TORCH, "zero1", "zero2", "tp", "pp"), until="save"),
    Defect("an old tensor saved", ("saved",), (*TORCH, "tp", "pp"), until="save"),
    Defect("documents see each other", ("leak",), PACKS, models=("transformer", "lora"), until="leak"),
    Defect("the last block's documents see each other", ("leak",), PACKS, models=("transformer",), until="leak"),
    Defect("documents cut a token late", ("leak",), PACKS, models=("transformer", "lora"), until="leak"),
]
OF_OPTION = {"": LAYOUTS, "save": (*LAYOUTS, "hsdp", "pp"), "leak": PACKS}
"""Option → the layouts that are drawn for it."""
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
    until: str = ""  # the option: save or leak
    file: str = ""  # torch's, safetensors, dcp, torch's by ranks, DeepSpeed's checkpoint
    adapter: bool = False  # only that is saved

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
        marks |= {"against": self.plain_reference, f"{self.file} file": self.file, "adapter": self.adapter}
        return ", ".join([*traits, self.optimizer, *(name for name, present in marks.items() if present)])

    def program(self) -> str:
        return script(self, self.layout, self.defect)

    def plain(self) -> str:
        return script(self, "one", "none")


def draw(seed: int, *, right: bool, layouts: tuple[str, ...] = LAYOUTS, until: str = "") -> Draw:
    """The program of this seed, with a planted defect or without; every defect comes as often."""
    rng = random.Random(f"{seed} {right}")
    defects = [defect for defect in DEFECTS if set(defect.layouts) & set(layouts) and defect.until == until]
    defect = None if right else defects[seed % len(defects)]
    names = [name for name in (defect.layouts if defect else layouts) if name in layouts]
    layout = rng.choices(names, [1 if name.startswith("zero") else 3 for name in names])[0]  # DeepSpeed starts slowly
    models = ("perceptron", "transformer", "lora")
    model = rng.choice([name for name in models if not defect or name in defect.models])
    if layout.startswith("zero") or layout == "tp":
        model = "transformer" if model == "lora" else model
    if layout in ("cp", "trainer"):
        model = "transformer" if model == "perceptron" else model
    if until == "leak":
        model = "transformer" if model == "perceptron" else model
    accumulates = defect.accumulates if defect and defect.accumulates is not None else rng.random() < 0.5
    accumulation = rng.choice([2, 3]) if accumulates and layout != "tp" else 1
    ragged = model != "perceptron" and layout not in ("tp", "cp") and rng.random() < 0.5
    if defect and defect.ragged is not None:
        ragged = defect.ragged if model != "perceptron" else False
    if defect and defect.name == "not times ranks":
        model = "transformer" if model == "perceptron" else model
        ragged = True
    plain_reference = layout == "tp" or (defect is not None and defect.reference == "plain") or rng.random() < 0.4
    dtype = "bf16" if rng.random() < 0.25 and layout != "tp" and not (defect and defect.fp32) else "fp32"
    if layout.startswith("zero") and dtype == "bf16" and (defect is None or defect.reference != "plain"):
        plain_reference = False  # DeepSpeed keeps weights in fp32 for its updates, which a plain loop in bf16 does not
    drawn = Draw(
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
    if layout == "hsdp":
        drawn = replace(drawn, world=4, batch=2)
    if layout == "pp":
        drawn = replace(drawn, world=2, layers=2, tied=False)
    if until == "leak":
        drawn = replace(drawn, until=until, ragged=False)
    if until == "save":
        file = rng.choice(["torch", "safetensors", "dcp", "rank"])
        if layout not in SPLIT or defect:  # each rank saves its shards
            file = {"rank": "torch"}.get(file, file)
        if layout.startswith("zero"):
            # Its engine's own; that of ZeRO-3 holds flat parts.
            file = {"dcp": "torch" if layout == "zero3" else "checkpoint"}.get(file, file)
        if defect and defect.name == "one shard in a checkpoint":
            file = "dcp"
        elif defect and file in ("dcp", "checkpoint"):
            file = "torch"
        drawn = replace(drawn, until=until, file=file, adapter=model == "lora" and rng.random() < 0.5)
    return drawn


def script(d: Draw, layout: str, defect: str) -> str:
    """The text of the program, as one would write it for this layout alone."""
    one = layout == "one"
    text = IMPORTS
    constants = {
        "RAGGED": d.ragged, "TIED": d.tied, "LAYERS": d.layers, "CLIP": 0.05 if d.clip else None,
        "BATCH": d.batch * (1 if d.layout in ("tp", "cp", "pp") else d.world) * d.accumulation if one else d.batch,
        "ACCUMULATION": 1 if one else d.accumulation,
    }  # fmt: skip
    text += "\n" + "".join(f"{name} = {value}\n" for name, value in constants.items())
    text += f"DTYPE = torch.{'bfloat16' if d.dtype == 'bf16' else 'float32'}\n"
    perceptron = d.model == "perceptron"
    model = PERCEPTRON if perceptron else TRANSFORMER
    if layout == "cp":
        context = CONTEXT.replace("dist.all_reduce(gradient)\n        ", "") if "values" in defect else CONTEXT
        model = context + "\n" + model.replace("F.scaled_dot_product_attention", "attend")
    texts = TEXTS
    if d.until == "leak":
        texts, model = PACKED, packed(model, defect)
    if d.layout == "trainer":  # of six sizes, so that ranks rarely have as many targets
        texts = TEXTS.replace("(4, 7, 21)[int(torch.randint(3,", "(4, 6, 9, 12, 16, 21)[int(torch.randint(6,")
        if d.defect != "mean of means":
            texts = texts.replace('batch["labels"][:, 1:] !=', 'batch["labels"] !=')
    text += "\n" + (NUMBERS if perceptron else texts) + "\n" + model
    text += "\n" + LORA if d.model == "lora" else ""
    text += "\n" + STAGE if layout == "pp" else ""
    if layout == "trainer":
        return text + "\n" + _trainer(d, defect)
    body = _begin(d, layout, defect) + _loader(d, layout, defect) + _loop(d, layout, defect)
    return f"{text}\n\ndef main():\n{indent(body, '    ')}\n\nif __name__ == '__main__':\n    main()\n"


def _begin(d: Draw, layout: str, defect: str) -> str:
    """The group, the model, its wrapper and the optimizer."""
    text = "rank, world = 0, 1\n"
    if layout.startswith("zero"):
        text = "import deepspeed\n\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        text += "deepspeed.init_distributed('gloo')\nrank, world = dist.get_rank(), dist.get_world_size()\n"
    elif layout == "accelerate":
        text = "from accelerate import Accelerator\n\n"
        text += "accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)\n"
        text += "rank, world = accelerator.process_index, accelerator.num_processes\n"
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
    replicas = "mesh" if defect != "replicas not reduced" else "mesh['shard']"
    wraps = {
        "ddp": "net = nn.parallel.DistributedDataParallel(model)\n",
        "fsdp1": "from torch.distributed.fsdp import FullyShardedDataParallel\n\n"
        "net = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device('cpu'))\n",
        "fsdp2": "from torch.distributed.fsdp import fully_shard\n\n"
        "for block in model.blocks:\n    fully_shard(block)\nnet = fully_shard(model)\n",
        "hsdp": "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n\n"
        "shape = (2, world // 2) if world > 1 else (1, 1)\n"
        "mesh = init_device_mesh('cpu', shape, mesh_dim_names=('replicate', 'shard'))\n"
        f"mesh = {replicas}\n"
        "for block in model.blocks:\n    fully_shard(block, mesh=mesh)\nnet = fully_shard(model, mesh=mesh)\n",
        "tp": "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n\n"
        "mesh = init_device_mesh('cpu', (world,))\nplan = {'up': ColwiseParallel(), 'down': RowwiseParallel()}\n"
        "for block in model.blocks:\n    parallelize_module(block, mesh, plan)\nnet = model\n",
        "pp": "net = model = Stage(model, rank, world)\n",
    }
    if not layout.startswith("zero"):
        text += wraps.get(layout, "net = model\n")
    if late:
        text += "torch.manual_seed(rank)\nadd_lora(model)\n"
    if layout.startswith("zero"):
        given = {"adamw": ("AdamW", "'lr': 1e-3, 'torch_adam': True"), "sgd": ("SGD", "'lr': 0.05, 'momentum': 0.9")}
        kind, settings = given[d.optimizer]
        accumulation = 1 if defect == "several backwards" else "ACCUMULATION"
        shards = ", 'stage3_param_persistence_threshold': 0" if d.until == "save" else ""
        return text + (
            "config = {\n    'train_micro_batch_size_per_gpu': BATCH,\n"
            f"    'gradient_accumulation_steps': {accumulation},\n    'gradient_clipping': CLIP or 0.0,\n"
            f"    'zero_optimization': {{'stage': {layout[-1]}{shards}}},\n"
            f"    'optimizer': {{'type': '{kind}', 'params': {{{settings}}}}},\n"
            f"    'bf16': {{'enabled': {d.dtype == 'bf16'}}},\n    'zero_allow_untested_optimizer': True,\n}}\n"
            "net, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)\n"
        )
    if early:
        return text
    if layout == "fsdp1":
        optimizer = optimizer.replace("model.parameters()", "net.parameters()")
    if layout == "accelerate":
        optimizer += "net, optimizer = accelerator.prepare(model, optimizer)\n"
    return text + optimizer


def _loader(d: Draw, layout: str, defect: str) -> str:
    sampler = f"DistributedSampler(data, world, rank, seed={d.seed})"
    if layout == "one":
        sampler = "SequentialSampler(data)" if d.layout in ("tp", "cp", "pp") else "RandomSampler(data)"
    elif layout == "accelerate":
        sampler = f"RandomSampler(data, generator=torch.Generator().manual_seed({d.seed}))"
    elif defect == "sampler seeded by rank":
        sampler = "RandomSampler(data, generator=torch.Generator().manual_seed(rank))"
    elif defect == "no sampler" or layout in ("tp", "cp", "pp"):
        sampler = "SequentialSampler(data)"
    loader = "DataLoader(data, BATCH, sampler=sampler, collate_fn=collate, drop_last=True)"
    if layout == "accelerate" and defect != "no sampler":
        loader = f"accelerator.prepare({loader})"
    return f"data = Rows()\nsampler = {sampler}\nloader = {loader}\nbatches = iter(loader)\n"


def _loop(d: Draw, layout: str, defect: str) -> str:
    """Two steps and the rest of a short training: the loss, its backward, the reduce, the clip, the step."""
    zero = layout.startswith("zero")
    # Else each row has as many targets; the Trainer counts the first token, which no token predicts, as one.
    tokens = (d.ragged or d.layout == "trainer") and defect != "mean of means"
    several = layout not in ("one", "tp", "cp", "pp")
    lines = ["micro = [next(batches) for _ in range(ACCUMULATION)]"]
    if tokens or layout == "cp":
        lines.append("targets = torch.tensor(sum(count(batch) for batch in micro))")
        lines += ["dist.all_reduce(targets)"] if several and layout != "accelerate" else []
        lines += ["targets = accelerator.reduce(targets, 'sum')"] if layout == "accelerate" else []
    net = {"past the wrapper": "model"}.get(defect, "(lambda *_: y)" if layout == "pp" else "net")
    divides = (zero and defect != "several backwards") or layout == "accelerate"  # by the accumulation, by itself
    if layout == "cp" and defect == "mean of the parts' means":
        scale = "F.cross_entropy(net(ids).float().flatten(0, 1), labels.flatten()) / world / ACCUMULATION"
    elif layout == "cp":
        scale = "F.cross_entropy(net(ids).float().flatten(0, 1), labels.flatten(), reduction='sum') / targets"
    elif tokens:
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
    if layout == "cp":
        inner = [
            "ids, labels = batch['input_ids'], F.pad(batch['labels'][:, 1:], (0, 1), value=-100)",
            "ids, labels = ids.chunk(world, 1)[rank], labels.chunk(world, 1)[rank]", *inner,
        ]  # fmt: skip
    if defect == "last micro-batch":
        inner.insert(0, "optimizer.zero_grad()")
    if zero:
        inner.append("net.backward(loss)")
        inner += ["net.step()"] if divides else []
    elif layout == "pp":
        inner = _stage(d, defect, inner)
    elif layout == "accelerate":
        inner += ["accelerator.backward(loss)", *_clip(d, layout, defect), "optimizer.step()", "optimizer.zero_grad()"]
        inner = ["with accelerator.accumulate(net):", *("    " + line for line in inner)]
    elif d.no_sync and layout == "ddp":
        inner = ["net.require_backward_grad_sync = number == len(micro) - 1", *inner, "loss.backward()"]
    else:
        inner.append("loss.backward()")
    lines += ["    " + line for line in inner]
    if zero:
        return _steps(d, layout, defect, [*lines, *([] if divides else ["net.step()"])])
    if layout == "accelerate":
        return _steps(d, layout, defect, lines)
    if defect == "clipped before the reduce":
        lines.append("nn.utils.clip_grad_norm_(params, CLIP)")
    if layout in ("manual", "cp") and defect != "no reduce":
        lines.append("for p in params:")
        if defect == "no reduce of the norm":
            norm = "model.blocks[0].up.lora_B" if d.model == "lora" else "model.norm.weight"
            lines.append(f"    if p is {norm}:\n        continue")
        lines.append("    dist.all_reduce(p.grad)")
        is_mean = defect == "divided by the parts" if layout == "cp" else defect != "sum, not mean"
        lines += ["    p.grad /= world"] if is_mean else []
    if layout == "tp" and defect != "no reduce of the norm":
        lines.append("for block in model.blocks:  # each rank has the gradient of its part of the hidden units alone")
        lines.append("    for p in block.inner.parameters():\n        dist.all_reduce(p.grad)")
    lines += _clip(d, layout, defect)
    return _steps(d, layout, defect, [*lines, "optimizer.step()", "optimizer.zero_grad()"])


def _stage(d: Draw, defect: str, loss: list[str]) -> list[str]:
    """A micro-batch through the two stages and back, one rank after the other."""
    given = "batch[0].to(DTYPE)" if d.model == "perceptron" else "batch['input_ids']"
    mask = "" if d.model == "perceptron" else ", batch['attention_mask']"
    shape = f"*x.shape, {WIDTH}" if d.model != "perceptron" else f"len(x), {WIDTH}"
    lines = [f"x = {given}", "if rank:", f"    x = torch.empty({shape}, dtype=DTYPE)"]
    lines += ["    dist.recv(x, rank - 1)", "    x.requires_grad_()", f"y = net(x{mask})"]
    lines += ["if rank < world - 1:", "    dist.send(y.detach(), rank + 1)"]
    has_gradient = defect != "a stage without gradient"
    if has_gradient:
        scaled = " / world" if defect == "a stage's gradient divided" else ""
        lines += ["    gradient = torch.empty_like(y)", "    dist.recv(gradient, rank + 1)"]
        lines += [f"    y.backward(gradient{scaled})"]
    zeroes = [line for line in loss if "zero_grad" in line]
    lines += ["else:", *(f"    {line}" for line in [*loss, "loss.backward()"] if line not in zeroes)]
    lines += ["    if rank:", "        dist.send(x.grad, rank - 1)"] if has_gradient else []
    return [*zeroes, "loss = torch.zeros(())", *lines]


def _clip(d: Draw, layout: str, defect: str) -> list[str]:
    if not d.clip or defect == "clipped before the reduce":
        return []
    local = "nn.utils.get_total_norm([getattr(p.grad, '_local_tensor', p.grad) for p in params])"
    whole = (
        "nn.utils.get_total_norm([p.grad.full_tensor() if hasattr(p.grad, 'full_tensor') else p.grad for p in params])"
    )
    with_norm = "nn.utils.clip_grads_with_norm_(params, CLIP, norm, foreach=False)"
    if layout in SPLIT and defect == "local norm":
        return [f"norm = {local}", with_norm]
    if layout == "pp" and defect != "local norm":  # of both stages
        norm = "nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]).float() ** 2"
        return [f"norm = {norm}", "dist.all_reduce(norm)", "norm = norm.sqrt()", with_norm]
    if layout == "tp" or defect == "adapter after the shard":
        return [f"norm = {whole}", with_norm]
    if layout == "accelerate":
        return ["if accelerator.sync_gradients:", "    accelerator.clip_grad_norm_(params, CLIP)"]
    if layout == "fsdp1" and defect != "local norm":
        return ["net.clip_grad_norm_(CLIP)"]
    return ["nn.utils.clip_grad_norm_(params, CLIP)"]


def _steps(d: Draw, layout: str, defect: str, lines: list[str]) -> str:
    lines = [*lines, "print(step, float(loss), flush=True)"]
    before = ""
    if d.until == "save" and layout != "one":
        lines += ["if step == SAVES:\n" + indent(_save(d, layout, defect), "    ")]
        before = f"SAVES = {1 + d.seed % 2}\n"
        before += "old = [p.detach().clone() for p in model.parameters()]\n" if defect == "an old tensor saved" else ""
    return before + "for step in range(3):\n" + indent("\n".join(lines), "    ") + "\n"


def _save(d: Draw, layout: str, defect: str) -> str:
    """Save the model, or its adapter: whole or by ranks, in the file of the draw."""
    full = "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n\n"
    full += f"state = get_model_state_dict(net, options=StateDictOptions(full_state_dict={d.file != 'dcp'}))\n"
    local = "getattr(p, '_local_tensor', p)"
    if layout in ("fsdp1", "zero3") and defect == "one shard saved":
        full = "state = {name: p.detach() for name, p in model.named_parameters()}\n"
    elif layout == "zero3":
        full = "with deepspeed.zero.GatheredParameters(list(model.parameters())):\n"
        full += "    state = {name: p.detach().clone() for name, p in model.named_parameters()}\n"
    elif layout in ("zero1", "zero2"):
        full = "state = net.module.state_dict()\n"
    elif layout in ("manual", "pp"):
        full = "state = model.state_dict()\n"
    elif d.file == "rank" or defect in ("one shard saved", "one shard in a checkpoint"):
        full = f"state = {{name: {local} for name, p in model.state_dict().items()}}\n"
    elif defect == "one shard saved, else zero":
        full = (
            "from torch.distributed.tensor._utils import compute_local_shape_and_global_offset\n\nstate = {}\n"
            "for name, p in model.state_dict().items():\n    state[name] = p\n    if hasattr(p, 'placements'):\n"
            "        _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)\n"
            f"        part, state[name] = {local}, torch.zeros(p.shape, dtype=p.dtype)\n"
            "        state[name][tuple(slice(a, a + n) for a, n in zip(offset, part.shape))] = part\n"
        )
    if d.adapter:
        full += "state = {name: tensor for name, tensor in state.items() if 'lora_' in name}\n"
    name = "blocks.0.up.lora_B" if d.model == "lora" else "blocks.0.up.weight"
    chosen = f"next(key for key in state if key.endswith('{name}'))" if layout != "pp" else "next(iter(state))"
    if defect == "a tensor not saved":
        full += f"del state[{chosen}]\n"
    if defect == "an old tensor saved":
        full += f"key = {chosen}\nnames = [name for name, _ in model.named_parameters()]\n"
        full += "tensor = next(t for name, t in zip(names, old) if name == key)\n"
        full += "state[key] = tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor\n"
    if d.file == "checkpoint":
        return "net.save_checkpoint('saved')\n"
    if d.file == "dcp":
        return (
            full + "import torch.distributed.checkpoint as dcp\n\ndcp.save({'model': state}, checkpoint_id='saved')\n"
        )
    by_rank = layout == "pp" or d.file == "rank"
    path = "f'part{rank}" if by_rank else "'model"
    write = f"torch.save({{'model': state}}, {path}.pt')"
    if d.file == "safetensors":
        full += "from safetensors.torch import save_file\n\n"
        full += "state = {key: tensor.detach().clone().contiguous() for key, tensor in state.items()}\n"
        write = f"save_file(state, {path}.safetensors')"
    return full + (f"{write}\n" if by_rank else f"if rank == 0:\n    {write}\n")


def _trainer(d: Draw, defect: str) -> str:
    """transformers' Trainer, which divides by the accumulation where the model takes no number of targets."""
    if defect == "mean of means":
        loss = "F.cross_entropy(*arguments)"
    else:
        loss = "F.cross_entropy(*arguments, reduction='sum') / kwargs['num_items_in_batch']"
        loss += " / ACCUMULATION" if defect == "divided by accumulation twice" else ""
        loss += " * dist.get_world_size()" if defect == "times ranks" else ""
        loss = f"-({loss})" if defect == "sign" else loss
    text = CAUSAL.replace("LOSS", loss)
    if defect == "mean of means":  # the Trainer looks for it
        text = text.replace(", **kwargs", "")
    makes = {"adamw": "torch.optim.AdamW(params, lr=1e-3)", "sgd": "torch.optim.SGD(params, lr=0.05, momentum=0.9)"}
    model = "add_lora(Causal().to(DTYPE))" if d.model == "lora" else "Causal().to(DTYPE)"
    body = (
        "from transformers import Trainer, TrainingArguments\n\n"
        f"torch.manual_seed({d.seed})\nmodel = {model}\n"
        f"params = [p for p in model.parameters() if p.requires_grad]\noptimizer = {makes[d.optimizer]}\n"
        "arguments = TrainingArguments(\n"
        "    output_dir='trained', per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION,\n"
        f"    seed={d.seed}, data_seed={d.seed}, max_steps=8,\n"
        "    use_cpu=True, report_to=[], save_strategy='no', disable_tqdm=True, max_grad_norm=CLIP or 0.0,\n"
        "    lr_scheduler_type='constant', remove_unused_columns=False, dataloader_drop_last=True,\n"
        f"    average_tokens_across_devices={defect != 'ranks weigh alike'},\n)\n"
        "Trainer(\n    model, arguments, train_dataset=Rows(), data_collator=collate, optimizers=(optimizer, None),\n"
        ").train()\n"
    )
    return f"{text}\n\ndef main():\n{indent(body, '    ')}\n\nif __name__ == '__main__':\n    main()\n"
