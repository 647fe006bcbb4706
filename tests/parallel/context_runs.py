"""Runs whose sequences are split over ranks, and the same runs with whole sequences: losses, norms and weights."""

from __future__ import annotations

import gc
import math
import random
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.memory.tracing.events import EventLog
from shardkit.memory.tracing.tracker import TensorTracker
from shardkit.models import packed_attention
from shardkit.models.packed_attention import BatchDocuments, document_attention
from shardkit.parallel.context import ContextParallel
from shardkit.parallel.mesh import new_group
from shardkit.parallel.world import process_groups, rank_env
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from shardkit.tasks.load import load_task
from tests.data.chats import write_lines, write_tokenizer
from tests.strategies.cases import PARTITION_ALL, assert_curve

GLOBAL_BATCH, ACCUM, STEPS, SEQ = 16, 2, 8, 24
RELATIVE, ABSOLUTE = 2e-5, 4e-6
"""How far a weight may be off: a share of its tensor's largest, and what AdamW makes of a gradient that is rounding."""
REFERENCE: dict[str, Any] = {
    "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 4, "model.vocab_size": 512, "model.max_seq_len": 64,
}  # fmt: skip
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip


def hf(model_type: str, **keys: Any) -> dict[str, Any]:
    return {"task.name": "hf_causal_lm", "model.hf": {"model_type": model_type, **_LLAMA, **keys}}


MODELS = {
    "reference": REFERENCE,
    "tied": {**REFERENCE, "model.tie_weights": True, "model.loss_chunk_size": 8},
    "llama": hf("llama"),
    "one key head": hf("llama", num_key_value_heads=1),
    "qwen3": hf("qwen3", head_dim=8),
    "mistral with a window": hf("mistral", sliding_window=5),
    "gemma 2 with softcaps": {**hf("gemma2", head_dim=8, sliding_window=5), "model.loss_chunk_size": 0},
    "gemma 3": hf("gemma3_text", head_dim=8, sliding_window=5),
    "gpt-oss with sinks": hf("gpt_oss", head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # The step is the gradient: a wrong factor, which AdamW would hide, shows in the weights.
    "sgd": {"optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 0.0, "train.max_norm": None},
    "adamw": {"optim.name": "adamw", "optim.lr": 3e-3, "train.max_norm": 0.5},
}


def documents(folder: Path, pairs: bool) -> dict[str, Any]:
    """Texts of 2 to some 40 tokens, which straddle every cut."""
    drawn = random.Random(1)
    words = ["def", "return x", "0", "import", "while"]
    texts = [" ".join(drawn.choices(words, k=drawn.randint(1, 12))) for _ in range(300)]
    rows = [
        {"prompt": text[: len(text) // 2], "completion": text[len(text) // 2 :]} if pairs else {"text": text}
        for text in texts
    ]
    write_lines(folder / "texts.jsonl", rows)
    tokenizer = write_tokenizer(folder / "tokenizer", template=None)
    return {"data.path": str(folder / "texts.jsonl"), "data.tokenizer": str(tokenizer), "data.cache_dir": str(folder)}


State = dict[str, torch.Tensor]


@dataclass
class Ran:
    steps: list[tuple[float, float]]  # (loss, norm)
    weights: dict[str, torch.Tensor]  # after them
    val_loss: float
    texts: list[str]  # what the model wrote at the end


def completed(settings: dict[str, Any], folder: str, accum: int = ACCUM) -> dict[str, Any]:
    """The settings of a run on this world, with a folder that all ranks share."""
    data_ranks = dist.get_world_size() // (settings.get("parallel.cp", 1) * settings.get("parallel.tp", 1))
    shared: list[Any] = [folder]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        data = documents(Path(folder), settings.get("data.packing", "none") == "none")
    full = {
        "run.dir": f"{shared[0]}/run", "run.device": "cpu", "train.max_steps": STEPS, "train.seq_len": SEQ,
        "train.grad_accum_steps": accum, "train.micro_batch_size": GLOBAL_BATCH // accum // data_ranks,
        "optim.schedule": "constant", "train.eval_samples": 8, "train.eval_every": STEPS, **settings,
    }  # fmt: skip
    if full["parallel.strategy"] == "zero3":
        full["parallel.ds_config"] = PARTITION_ALL
    both: list[Any] = [{**full, **data} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(both)
    return dict(both[0])


def run(settings: dict[str, Any]) -> Ran:
    """Train by `settings` in this rank's world."""
    with tempfile.TemporaryDirectory() as folder:
        with start(None, completed(settings, folder)) as job:
            trainer = Trainer(job)
            records = list(trainer.steps())
            steps = [(record["loss"], record["grad_norm"]) for record in records]
            texts = [text["text"] for text in trainer.loop.texts]
            ran = Ran(steps, whole_weights(job.strategy), records[-1]["val_loss"], texts)
        gc.collect()
        dist.barrier()
    return ran


def whole_weights(strategy: Any) -> State:
    return {name: tensor for name, tensor in whole_state(strategy).items() if name.startswith("model.")}


def whole_state(strategy: Any) -> State:
    pieces: list[Any] = [None] * dist.get_world_size()
    mine = [
        (s.name, s.shape, start, part.detach().clone())
        for s in strategy.shards() if s.name.startswith("model.") for start, part in s.ranges()
    ]  # fmt: skip
    dist.all_gather_object(pieces, mine)
    out: State = {}
    for name, shape, start_at, local in (piece for rank in pieces for piece in rank):
        flat = out.setdefault(name, torch.full(shape, float("nan")).view(-1))
        flat[start_at : start_at + local.numel()] = local.float()
    return out


def runs(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: run(settings) for name, settings in cases.items()}


def assert_same(found: Ran, want: Ran, name: object) -> None:
    """Losses within 1e-5, norms within a share 1e-4, and every weight."""
    assert_curve(found.steps, want.steps, name)
    assert abs(found.val_loss - want.val_loss) <= 1e-5, name
    assert found.weights.keys() == want.weights.keys()
    for key, weight in want.weights.items():
        largest = float((found.weights[key] - weight).abs().max())
        allowed = RELATIVE * float(weight.abs().max()) + ABSOLUTE
        assert largest <= allowed, f"{name}: {key} differs by {largest}"


def leg(settings: dict[str, Any], folder: str) -> tuple[list[tuple[float, float]], State, State]:
    """Train on from the folder's last checkpoint: (loss, norm) of each step, and the state before and after them."""
    zero3 = {"parallel.ds_config": PARTITION_ALL} if settings["parallel.strategy"] == "zero3" else {}
    given = {
        **REFERENCE,
        **OPTIMIZERS["adamw"],
        "run.device": "cpu",
        "run.dir": f"{folder}/run",
        "run.resume": "auto",
        "optim.schedule": "constant",
    }
    given |= {"train.seq_len": SEQ, "train.global_batch_size": 8, "train.micro_batch_size": 2, "train.eval_samples": 0}
    given |= {"data.path": f"{folder}/texts.jsonl", "data.tokenizer": f"{folder}/tokenizer", "data.cache_dir": folder}
    with start(None, {**given, **zero3, **settings}) as job:
        trainer = Trainer(job)
        job.strategy.create_optimizer_state()
        before = whole_state(job.strategy)
        records = list(trainer.recorded_steps())
        after = whole_state(job.strategy)
    gc.collect()
    return [(record["loss"], record["grad_norm"]) for record in records], before, after


class Attention(nn.Module):
    """A user's own attention, with the hook of docs/long.md."""

    context_parallel: ContextParallel | None = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).unbind(2)  # [rows, T, heads, width]
        context = self.context_parallel
        if context is not None:
            q, k, v = context.to_heads(q), context.to_heads(k), context.to_heads(v)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if context is not None:
            heads = context.to_positions(heads)
        return self.out(heads.flatten(2))


class Own(nn.Module):
    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.blocks = nn.Embedding(20, 16), nn.ModuleList(attention() for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Forgetful(Attention):
    """Declares the hook and does not call it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context, self.context_parallel = self.context_parallel, None
        out = super().forward(x)
        self.context_parallel = context
        return out


def own_loop(strategy: str, cp: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    settings = {
        "parallel.strategy": strategy, "parallel.cp": cp, "run.device": "cpu", "train.seq_len": 12,
        "optim.name": "sgd", "optim.lr": 0.5, "optim.weight_decay": 0.0, "train.max_norm": None,
    }  # fmt: skip
    with start(None, settings) as job:
        job.wrap(Own)
        world, steps = job.world, []
        for number in range(4):
            rows = torch.randint(0, 20, (4, 13), generator=torch.Generator().manual_seed(number))
            rows = rows[world.data_rank :: world.data_size]
            part = slice(world.rank % cp, None, cp)
            batch = rows[:, :-1][:, part], rows[:, 1:][:, part]
            result = job.step([batch], summed, lambda batch: batch[1].numel())
            steps.append((result.loss, result.grad_norm))
        return steps, whole_weights(job.strategy)


def summed(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def without_hook(model: str) -> str:
    """What is said of a model that cannot split its sequences."""
    settings = {"parallel.strategy": "ddp", "parallel.cp": 2, "run.device": "cpu", "train.seq_len": 12}
    beside = {
        "batch norm": lambda: nn.BatchNorm1d(20),
        "recurrent": lambda: nn.GRU(20, 20),
        "other": lambda: nn.Conv1d(3, 3, 3),
        "torch's attention": lambda: nn.TransformerEncoderLayer(20, 4),
    }
    built = (lambda: Own(nn.Identity)) if model == "plain" else lambda: nn.Sequential(Own(), beside[model]())
    with pytest.raises(ConfigError) as caught, start(None, settings) as job:
        job.wrap(built)
    return str(caught.value)


def mistaken_loops() -> list[str]:
    """What the first step says of a loop that does not split its rows, of a model that exchanges nothing, and of rows
    that are all alike."""
    settings = {"parallel.strategy": "ddp", "parallel.cp": 2, "run.device": "cpu", "train.seq_len": 12}
    rank, rows = dist.get_rank(), torch.randint(0, 20, (4, 13), generator=torch.Generator().manual_seed(0))
    part, constant = slice(rank, None, 2), torch.full((4, 6), 3)
    causes = []
    for attention, batch in (
        (Attention, (rows[:, :-1], rows[:, 1:])),
        (Forgetful, (rows[:, :-1][:, part], rows[:, 1:][:, part])),
        (Attention, (constant, constant)),
    ):
        with start(None, settings) as job:
            job.wrap(partial(Own, attention))
            try:
                causes.append(f"trained with loss {job.step([batch], summed, lambda batch: batch[1].numel()).loss:.1f}")
            except ConfigError as error:
                causes.append(error.cause)
        gc.collect()
        dist.barrier()
    return causes


def exchanges(policies: list[str]) -> dict[str, int]:
    """All-to-alls of a step, by the policy of recomputation."""
    counts = {}
    for policy in policies:
        settings = {**MODELS["reference"], "parallel.strategy": "fsdp", "parallel.cp": 2, "activation.policy": policy}
        with tempfile.TemporaryDirectory() as folder, start(None, completed(settings, folder, accum=1)) as job:
            trainer = Trainer(job)
            steps = iter(trainer.steps())
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                next(steps)
            events = profiler.key_averages()
            counts[policy] = sum(event.count for event in events if event.key == "gloo:all_to_all")
        gc.collect()
        dist.barrier()
    return counts


def exchanged(models: list[str]) -> dict[str, list[int]]:
    """Elements that a rank holds in each all-to-all of a step, forward and backward, by model."""
    found = {}
    for model in models:
        settings = {**MODELS[model], "parallel.strategy": "ddp", "parallel.cp": dist.get_world_size()}
        with tempfile.TemporaryDirectory() as folder, start(None, completed(settings, folder, accum=1)) as job:
            steps = iter(Trainer(job).steps())
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
            ) as profiler:
                next(steps)
        shapes = [e.input_shapes[0] for e in profiler.events() if e.name == "_c10d_functional::all_to_all_single"]
        found[model] = [math.prod(shape) for shape in shapes]
        gc.collect()
        dist.barrier()
    return found


def buffers() -> int:
    """Bytes that a trace counts as communication where 16 KiB exchange heads, once each way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    context, log = new_group(rank, size, size), EventLog()
    with TensorTracker(log):
        context.to_positions(context.to_heads(torch.zeros(1, 64, 4, 16)))
    return sum(made.n_bytes for made in log.allocations if made.category == "communication")


def arguments_of_kernels() -> None:
    """Attention of a rank's positions, as if on a card, hands the kernels what they get of whole sequences: every
    position of the rank's heads. The kernel of FlashAttention is a stand-in here, which computes by documents."""
    rank, size = dist.get_rank(), dist.get_world_size()
    context = new_group(rank, size, size)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 16, generator=generator).bfloat16() for heads in (8, 2, 2))
    documents = BatchDocuments(torch.tensor([0, 5, 12, 24], dtype=torch.int32), [5, 7, 12])
    sinks = torch.randn(8, generator=generator)
    heads, scored = slice(rank * 8 // size, (rank + 1) * 8 // size), packed_attention._scored
    seen: list[Any] = []

    def flash(*args: Any) -> torch.Tensor:
        seen.append(args)
        parts = zip(*(torch.split(tensor, [5, 7, 12]) for tensor in args[:3]), strict=True)
        return torch.cat([packed_attention._attend_to_itself(*part, *args[5:], None, None) for part in parts])

    def noted(*args: Any) -> torch.Tensor:
        seen.append(args)
        return scored(*args)

    kernels = patch.multiple(packed_attention, flash_by_documents=flash, _scored=noted)
    card = patch("torch.cuda.get_device_capability", lambda device: (9, 0))
    capped: dict[str, Any] = {"softcap": 7.0, "scale": 0.3}
    for options in ({}, {"window": 4, "scale": 0.3}, {"window": 4, "sinks": sinks}, capped):
        seen.clear()
        want = document_attention(q, k, v, documents, **options)
        with kernels, card, patch.object(torch.Tensor, "is_cuda", True):
            part = [tensor[:, rank::size] for tensor in (q, k, v)]
            found = document_attention(*part, documents, **options, context=context)
        torch.testing.assert_close(found, want[:, rank::size], rtol=2e-2, atol=2e-2)
        if not {"sinks", "softcap"} & options.keys():
            ((query, key, value, bounds, longest, dropout, scale, window),) = seen
            assert torch.equal(query, q.flatten(0, 1)[:, heads])
            key_heads = sorted({head // 4 for head in range(8)[heads]})  # four query heads share one
            for tensor, whole in ((key, k), (value, v)):
                assert torch.equal(tensor.unique_consecutive(dim=1), whole.flatten(0, 1)[:, key_heads])
            assert (bounds.tolist(), longest, dropout) == ([0, 5, 12, 24], 12, 0.0)
            assert (scale, window) == (options.get("scale"), options.get("window"))
            continue
        for document, (query, key, _, mask, _, scale, softcap, shares) in zip((5, 7, 12), seen, strict=True):
            assert query.shape == key.shape == (1, 8 // size, document, 16)
            ago = torch.arange(document)[:, None] - torch.arange(document)
            assert torch.equal(mask, (ago >= 0) & (ago < options.get("window", 12)))
            assert (scale, softcap) == (options.get("scale"), options.get("softcap"))
            assert shares is None if "sinks" not in options else torch.equal(shares, sinks[heads])


def leaks(packed: bool) -> list[float]:
    """How much the loss of each other document moves if a token of one changes; of the changed one, last."""
    lengths = [5, 9, 3, 7]  # every cut of a row in 2 or 4 lies within a document
    settings = {**MODELS["reference"], "parallel.strategy": "ddp", "parallel.cp": dist.get_world_size()}
    settings |= {"run.device": "cpu", "train.seq_len": SEQ, "train.micro_batch_size": 1}
    with start(None, settings) as job:
        task: Any = load_task(job.config)
        job.wrap(task.build_model, init_parameter=task.init_parameter, block_classes=task.block_classes)
        losses = []
        for changed in (False, True):
            tokens = torch.arange(24)[None] % 7 + 1
            tokens[0, 7] += int(changed)  # of the second document
            batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "lengths": lengths if packed else [24]}
            sums = []
            for begin, length in zip([0, 5, 14, 17], lengths, strict=True):
                targets = torch.full_like(tokens, -100)
                targets[:, begin : begin + length] = batch["targets"][:, begin : begin + length]
                share = task.split_sequences({**batch, "targets": targets}, job.world.rank, dist.get_world_size())
                with torch.no_grad():
                    sums.append(float(task.loss(job.model, share)))
            losses.append(job.world.sum(sums))
        moved = [abs(a - b) for a, b in zip(*losses, strict=True)]
        return [moved[0], *moved[2:], moved[1]]


def scattered(across: bool) -> str:
    """What is said if this world's two neighbours are on two nodes."""
    config = load_config(None, {"parallel.cp": 2, "parallel.cp_across_nodes": across, "run.device": "cpu"}).config
    env = replace(rank_env(), node_rank=dist.get_rank(), n_nodes=2, local_rank=0, local_world_size=1)
    try:
        with process_groups(config, env) as world:
            return f"joined {world.data_size}"
    except ConfigError as error:
        return error.cause
