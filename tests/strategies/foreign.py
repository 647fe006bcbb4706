"""Models that nobody tuned shardkit for, one small training job for each, and what its ranks report."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.errors import ConfigError
from shardkit.run.job import start
from tests.strategies.cases import on_cpus

WIDTH, VOCAB, LENGTH, ROWS = 16, 40, 8, 4


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class ExpertLayer(nn.Module):
    """One expert a sample, chosen by the data: by the first token modulo their number.

    Args:
        name: of the list of experts.
    """

    def __init__(self, experts: int = 4, name: str = "experts") -> None:
        super().__init__()
        self.norm, self.name = nn.LayerNorm(WIDTH), name
        setattr(self, name, nn.ModuleList([Expert() for _ in range(experts)]))

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out, experts = x.clone(), self.get_submodule(self.name)
        for index in (choice % len(experts)).unique().tolist():  # others are not even called
            rows = choice % len(experts) == index
            out[rows] = x[rows] + experts[index](self.norm(x[rows]))
        return out


class NextToken(nn.Module):
    """An embedding and a head; what is between them is `hidden`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embed(tokens), tokens))


class Experts(NextToken):
    """Next-token prediction by layers with a list of experts each."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ExpertLayer() for _ in range(layers)])

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, tokens[:, 0])
        return x


class TopExperts(NextToken):
    """The same, but the experts are the model's only list, and named otherwise: `find_blocks` takes them for blocks."""

    list_name = "parts"

    def __init__(self) -> None:
        super().__init__()
        self.mixture = ExpertLayer(name=self.list_name)

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.mixture(x, tokens[:, 0])


class NamedExperts(TopExperts):
    """The same, where the name of the list tells."""

    list_name = "experts"


class BranchedBlock(nn.Module):
    """A part of it is used by the samples whose first token is even."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.branch = nn.LayerNorm(WIDTH), Expert(), Expert()

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.norm(x))
        rows = choice % 2 == 0
        if rows.any():
            hidden = hidden.clone()
            hidden[rows] = hidden[rows] + self.branch(hidden[rows])
        return x + hidden


class Branched(NextToken):
    """Blocks with a part that a rank may not need, and a norm that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BranchedBlock() for _ in range(3)])
        for block in self.blocks:
            block.norm = self.blocks[0].norm

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, tokens[:, 0])
        return x


class Plain(NextToken):
    """Calls the blocks that `choose` returns; without it, every rank calls every block."""

    def __init__(self, choose: Callable[[Plain, torch.Tensor], Any] = lambda model, tokens: model.blocks) -> None:
        super().__init__()
        self.blocks, self.calls, self.choose = nn.ModuleList([Expert() for _ in range(4)]), 0, choose

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.choose(self, tokens):
            x = x + block(x)
        return x


def leaving(model: Plain, tokens: torch.Tensor) -> Any:
    """Ranks leave the model at different depths: the number of blocks follows the data."""
    return model.blocks[: 2 + int(tokens[0, 0]) % 3]


def another(model: Plain, tokens: torch.Tensor) -> Any:
    """Another block, and as many, where the first token is above 30: no engine would notice."""
    return [*model.blocks[:2], model.blocks[3 if int(tokens[0, 0]) > 30 else 2]]


def tokens(step: int, rows: int) -> torch.Tensor:
    """Token rows of a step's global batch; the first tokens differ from row to row, so that experts do too."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 30, (rows, LENGTH), generator=generator)
    found[:, 0] = torch.arange(rows)
    return found


def next_token(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")


def settings(strategy: str, **extra: Any) -> dict[str, Any]:
    return {**on_cpus(strategy), "optim.lr": 1e-2, "optim.weight_decay": 0.1} | extra


def train(
    build: Callable[[], nn.Module],
    strategy: str,
    batches: Callable[[int, int], Any] = tokens,
    loss: Callable[[Any, Any], torch.Tensor] = next_token,
    block_classes: tuple[type[nn.Module], ...] = (),
    init: Any = None,
    steps: int = 4,
    micro_batches: int = 1,
    **extra: Any,
) -> list[float] | str:
    """Losses of each step over the same global batches, then the last step's norm; or the words of the refusal.

    `micro_batches`: 0 = one for each row.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    try:
        micro_batches = micro_batches or ROWS // world
        if micro_batches > 1:
            extra |= {"train.grad_accum_steps": micro_batches}
        with start(None, settings(strategy, **extra)) as job:
            job.wrap(build, block_classes=block_classes, init_parameter=init)
            found = []
            for step in range(steps):
                mine = _rows(batches(step, ROWS), rank, world)
                parts = [_rows(mine, index, micro_batches) for index in range(micro_batches)]
                done = job.step(parts, loss, count)
                found.append(done.loss)
            return [*found, done.grad_norm]
    except ConfigError as error:
        return str(error)
    finally:
        gc.collect()


def _rows(batch: Any, rank: int, world: int) -> Any:
    if isinstance(batch, dict):
        return {key: value.chunk(world)[rank] for key, value in batch.items()}
    return batch.chunk(world)[rank]


def count(batch: Any) -> int:
    return (next(iter(batch.values())) if isinstance(batch, dict) else batch).numel()


def together(model: Plain, tokens: torch.Tensor) -> Any:
    """Every rank leaves the model after the same block, from the third step on before the last."""
    return model.blocks[: 4 if model.calls < 4 else 3]


def early(model: Plain, tokens: torch.Tensor) -> Any:
    """The last block is called in every other micro-batch, and never in the last one of a step."""
    return model.blocks[: 3 + model.calls % 2]


def early_reentrant(model: Plain, tokens: torch.Tensor) -> Any:
    """The same with reentrant checkpoints, each of which ends a backward of its own."""
    return [partial(checkpoint, block, use_reentrant=True) for block in early(model, tokens)]


def on_one_rank(step: int, rows: int) -> torch.Tensor:
    """Tokens by which each step needs the branches of `Branched` in the first micro-batch of one rank alone."""
    found = tokens(step, rows)
    found[:, 0] = 1 + 2 * torch.arange(rows)
    found[step % 2 * rows // 2, 0] = 2
    return found


def in_two_of_three(step: int, rows: int) -> torch.Tensor:
    """The same, but no rank needs them in the third step."""
    return on_one_rank(step, rows) | (step == 2)


def later_on_one_rank(step: int, rows: int) -> torch.Tensor:
    """The same, but every rank needs them for one of its two samples in the first two steps."""
    found = on_one_rank(step, rows)
    if step < 2:
        found[:, 0] = 2 + torch.arange(rows)
    return found


def idle(step: int, rows: int) -> torch.Tensor:
    """Tokens by which each step leaves out another of four experts on all ranks."""
    found = tokens(step, rows)
    found[:, 0] = torch.arange(rows) % 3 + step % 2
    return found


class RareExperts(NextToken):
    """Experts in a list of the model's own beside its blocks: no block holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ScaledBlock() for _ in range(2)])
        self.experts = nn.ModuleDict({str(index): nn.Linear(WIDTH, WIDTH) for index in range(4)})

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        expert = self.experts[str(int(tokens[0, 0]) % 4)]  # a whole micro-batch goes to one of them
        return x + expert(x)


def late(step: int, rows: int) -> torch.Tensor:
    """Only the fourth step's tokens let one rank call another block."""
    found = tokens(step, rows)
    if step == 3:
        found[0, 0] = 35
    return found


class Scaled(NextToken):
    """A 0-d parameter in the model, another in a block, a frozen third."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ScaledBlock() for _ in range(2)])
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.logit_scale.shape == () and self.blocks[0].gate.shape == (), "the model's own code sees a number"
        return super().forward(tokens) * self.logit_scale.exp() + self.offset


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = Expert(), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.inner(x)


def draw(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    """Weights of `Scaled`; a 0-d parameter has to arrive as one."""
    if fqn.rpartition(".")[2] in ("logit_scale", "gate", "offset"):
        assert full.shape == ()
        full.fill_(0.3)
    else:
        full.normal_(std=0.1, generator=generator)


def resumed(
    build: Callable[[], nn.Module], name: str, init: Any, source: str | None, target: str | None, numbers: range,
    batches: Callable[[int, int], Any],
) -> list[float]:  # fmt: skip
    """Losses of some steps, from a checkpoint at `source` if any, saved at `target` if given."""

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with start(None, settings(name)) as job:
        job.wrap(build, init_parameter=init)
        checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, source or target, timeout_s=60)
        if source is not None:
            assert checkpoints.resume(source) is not None
        found = [job.step([_rows(batches(i, ROWS), rank, world)], next_token, torch.numel).loss for i in numbers]
        if target is not None:
            checkpoints.save(RunState(step=1, seed=0))
        checkpoints.close()
    gc.collect()
    return found


def travelled(
    root: str, build: Callable[[], nn.Module], batches: Callable[[int, int], Any], steps: int, savers: list[str],
    others: list[str], init: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Losses of the later steps, after checkpoints of the first step, by who saved them and who goes on."""
    for saver in savers:
        resumed(build, saver, init, None, f"{root}/{saver}", range(1), batches)
    return {
        f"{saver} to {name}": resumed(build, name, init, f"{root}/{saver}", None, range(1, steps), batches)
        for name in others
        for saver in savers
    }


class Mixed(Plain):
    """Multiplies by an fp32 tensor that its forward makes itself, as window attention with a computed mask does."""

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        mean = torch.full((LENGTH, LENGTH), 1 / LENGTH, device=tokens.device).tril()
        return mean @ super().hidden(x, tokens)


class Preprocessed(Plain):
    """Has what its loss asks for beside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = 1

    def prepare(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.roll(self.shift, 1)


def normal(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    full.normal_(std=0.1, generator=generator)


class Lazy(Plain):
    """Imports what changes torch's own functions only when it is built."""

    def __init__(self) -> None:
        importlib.import_module("torch._dynamo")
        super().__init__()


def lazy() -> list[float] | str:
    assert "torch._dynamo" not in sys.modules, "nothing is lazy in this process"
    return train(Lazy, "zero3", init=normal, steps=1)


# The matrix: small configurations of other people's models, none of which anything here was tuned for.


def hf(name: str, head: str, **config: Any) -> Callable[[], nn.Module]:
    """A model of transformers of random weights, without anything that drops values at random."""

    def build() -> nn.Module:
        import transformers

        found = getattr(transformers, f"{name}Config")(**config)
        for part in [found, *(value for value in vars(found).values() if hasattr(value, "to_dict"))]:
            for key, value in vars(part).items():
                if "drop" in key and isinstance(value, float):
                    setattr(part, key, 0.0)
        return getattr(transformers, f"{name}{head}")(found)

    return build


def images(step: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "labels": torch.randint(0, 3, (rows,), generator=generator),
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
    }


def pairs(step: int, rows: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(step, rows), "pixel_values": images(step, rows)["pixel_values"]}


def waves(step: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"labels": images(step, rows)["labels"], "input_values": torch.randn(rows, 400, generator=generator)}


def classify(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(*(value for key, value in batch.items() if key != "labels"))
    logits = getattr(out, "logits", out)
    return F.cross_entropy(logits.float(), batch["labels"], reduction="sum")


def translate(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return next_token(lambda _: model(input_ids=batch.flip(1), decoder_input_ids=batch), batch)


def match(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return -F.logsigmoid(model(**batch).logits_per_image.diagonal().float()).sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SEEN: dict[str, Any] = {"image_size": 32, "num_labels": 3}
FEW: dict[str, Any] = {"num_key_value_heads": 2}
TOWER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8,
    "image_size": 32,
}  # fmt: skip

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any], Callable[[Any, Any], torch.Tensor]]] = {
    "t5": (
        hf("T5", "ForConditionalGeneration", vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2,
           num_heads=2), tokens, translate,
    ),
    "wav2vec2": (
        hf("Wav2Vec2", "ForSequenceClassification", **TEXT, num_labels=3, conv_dim=(8, 8), conv_stride=(4, 4),
           conv_kernel=(4, 4), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8,
           mask_time_prob=0.0, apply_spec_augment=False), waves, classify,
    ),
    "clip": (
        hf("CLIP", "Model", text_config=TEXT | {"max_position_embeddings": 16}, vision_config=TOWER, projection_dim=8),
        pairs, match,
    ),
    "mixtral": (hf("Mixtral", "ForCausalLM", **TEXT, **FEW, num_local_experts=4), tokens, next_token),
    "qwen2_moe": (
        hf("Qwen2Moe", "ForCausalLM", **TEXT, **FEW, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
           shared_expert_intermediate_size=16), tokens, next_token,
    ),
    "deberta": (
        hf("DebertaV2", "ForMaskedLM", **TEXT, relative_attention=True, max_position_embeddings=16,
           pos_att_type=["p2c", "c2p"]), tokens, next_token,
    ),
    "albert": (hf("Albert", "ForMaskedLM", **TEXT, embedding_size=8), tokens, next_token),
    "mamba": (hf("Mamba", "ForCausalLM", **TEXT, state_size=4), tokens, next_token),
    "swin": (
        hf("Swin", "ForImageClassification", **SEEN, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2],
           window_size=4), images, classify,
    ),
    "convnext": (
        hf("ConvNext", "ForImageClassification", num_labels=3, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
        images, classify,
    ),
    "lstm": (Recurrent, tokens, next_token),
}  # fmt: skip


class Sparse(Recurrent):
    """Embeddings whose gradients are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, sparse=True)


class SparseBag(Recurrent):
    """A bag of embeddings whose gradients are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, VOCAB, mode="sum", sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.bag(tokens)[:, None]


class Complex(Plain):
    """Multiplies by complex numbers, as a filter in frequencies does."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.complex64))

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, dim=1)
        return super().hidden(filtered, tokens)


class Uninitialised(Plain):
    """Has a layer whose size follows the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(VOCAB)


class Expanded(Plain):
    """A bias of one number, seen as many."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias = nn.Parameter(torch.zeros(1).expand(VOCAB))


class Transposed(Plain):
    """Weights that are not contiguous: a view of their memory, channels_last, and one that is drawn in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.empty(WIDTH, 2**15).t())
        nn.init.normal_(self.wide, std=0.02)
        self.layer = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) + self.wide[:LENGTH]
        return super().hidden(x + self.conv(x[:, None].expand(-1, 2, -1, -1)).mean(1), tokens)


class Hooked(Plain):
    """Halves the gradients of its own head, and of a block after they are complete."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: 0.5 * grad)
        expert = self.blocks[1]
        expert[0].weight.register_post_accumulate_grad_hook(_halve)


def _halve(param: torch.Tensor) -> None:
    param.grad.mul_(0.5)


class Reentrant(nn.Module):
    """A layer in a reentrant checkpoint(), which hides it from the loss's graph, and one that rank 0 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.rare = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.hidden, self.first(x), use_reentrant=True)
        return out + self.rare(out) if uses_rare else out


def reentrant() -> list[float]:
    """How far each parameter of `Reentrant` has moved under ddp."""
    rank = torch.distributed.get_rank()
    with start(None, settings("ddp")) as job:
        params = [*job.wrap(Reentrant).parameters()]
        before = [param.detach().clone() for param in params]
        for _ in range(2):
            job.step([torch.ones(2, WIDTH)], lambda model, x: model(x, rank == 0).pow(2).sum(), len)
        return [float((param - old).norm()) for param, old in zip(params, before, strict=True)]


SGD = {"optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 0.0}
"""AdamW would hide a wrong scale."""
PLAIN_SGD = SGD | {"optim.momentum": 0.0}
BF16 = {"precision.mode": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    # The ranks use different parts.
    "nested": {"build": Experts}, "top": {"build": TopExperts}, "named": {"build": NamedExperts},
    "leaver": {"build": partial(Plain, leaving)}, "together": {"build": partial(Plain, together), "steps": 6},
    "late": {"build": partial(Plain, another), "batches": late, "steps": 5},
    "top, by class": {"build": TopExperts, "block_classes": (ExpertLayer,)},
    "top, not looked for": {"build": TopExperts, "parallel.find_unused": False},
    "named, looked for": {"build": NamedExperts, "parallel.find_unused": True},
    # A rank needs a part of the blocks.
    "branch": {"build": Branched, "batches": on_one_rank},
    "branch, recomputed": {"build": Branched, "batches": on_one_rank, "activation.policy": "full"},
    "branch, accumulated": {"build": Branched, "batches": on_one_rank, "micro_batches": 0},
    "branch, idle": {"build": Branched, "batches": in_two_of_three},
    "branch, late": {"build": Branched, "batches": later_on_one_rank},
    # The last micro-batches of all ranks leave a block out.
    "early": {"build": partial(Plain, early), "micro_batches": 0},
    "early, reentrant": {"build": partial(Plain, early_reentrant), "micro_batches": 0},
    # No rank uses an expert in some steps.
    "idle": {"build": Experts, "batches": idle, "steps": 6},
    "idle, accumulated": {"build": Experts, "batches": idle, "steps": 6, "micro_batches": 2},
    "idle, clipped": {"build": Experts, "batches": idle, "steps": 3, "train.max_norm": 0.1},
    "rare": {"build": RareExperts, "batches": idle, "steps": 6, "micro_batches": 0},
    # Types and calls.
    "mixed": {"build": Mixed, **BF16}, "mixed, autocast": {"build": Mixed, **BF16, "precision.autocast": True},
    "prepared": {"build": Preprocessed, "loss": lambda model, batch: next_token(model, model.prepare(batch)),
                 "init": normal},
    "round": {"build": Plain, "loss": lambda model, batch: next_token(lambda x: model.head(model.embed(x)), batch)},
    # Unusual parameters; "drawn": by their names.
    "sparse": {"build": Sparse, **PLAIN_SGD}, "bag": {"build": SparseBag, **PLAIN_SGD},
    "complex": {"build": Complex, **PLAIN_SGD}, "expanded": {"build": Expanded, **PLAIN_SGD},
    "lazy": {"build": Uninitialised, **PLAIN_SGD}, "lazy, drawn": {"build": Uninitialised, "init": normal, **PLAIN_SGD},
    "hooked, drawn": {"build": Hooked, "init": normal, **PLAIN_SGD},
    "scaled": {"build": Scaled}, "scaled, drawn": {"build": Scaled, "init": draw},
    # Other people's models.
    **{
        name: {"build": build, "batches": batches, "loss": loss, **SGD, "train.max_norm": 1.0}
        for name, (build, batches, loss) in MODELS.items()
    },
}  # fmt: skip
"""Case → the arguments of `train`."""


def trained(todo: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """What `train` returns for each (strategy, case); "zero1+optimizer" is a strategy, too."""
    return {(name, case): train(strategy=name, **CASES[case]) for name, case in todo}
