"""Save and load two models under any engine with any split of layers, experts and sequences, at any world size."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.errors import ShardkitError
from shardkit.run.job import Job, start
from shardkit.tasks.load import load_task, splitting
from tests.parallel.expert_runs import OPTIMIZERS, hf, state
from tests.strategies.cases import PARTITION_ALL

SAVED_AT, GO_ON = 2, 2
"""Steps before the save, and losses compared after it."""
ROWS, SEQ = 12, 16
_DENSE = {key: size for key, size in hf("mixtral")["model.hf"].items() if "experts" not in key}
MODELS: dict[str, dict[str, Any]] = {
    "layers": {"task.name": "hf_causal_lm", "model.hf": {  # with norms of heads, which all ranks of a group have
        **_DENSE, "model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 8,
    }},
    "experts": hf("mixtral"),
}  # fmt: skip


def _keys(engine: str, **sizes: int) -> dict[str, Any]:
    partition = {"parallel.ds_config": PARTITION_ALL} if engine == "zero3" else {}
    return {"parallel.strategy": engine, **{f"parallel.{key}": size for key, size in sizes.items()}, **partition}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, _keys("single")),
    "ddp": (2, _keys("ddp")),
    "zero1": (2, _keys("zero1")),
    "zero3": (2, _keys("zero3")),
    "tp2": (2, _keys("fsdp", tp=2)),
    "ep2": (2, _keys("fsdp", ep=2)),
    "fsdp": (3, _keys("fsdp")),
    "hsdp": (4, _keys("hsdp", dp_replicate=2)),
    "zero2": (4, _keys("zero2")),
    "cp2 x zero1": (4, _keys("zero1", cp=2)),
    "cp4": (4, _keys("fsdp", cp=4)),
    "tp2 x fsdp2": (4, _keys("fsdp", tp=2)),
    "tp2 x replicas": (4, _keys("hsdp", tp=2, dp_shard=1)),
    "tp2 x cp2": (4, _keys("fsdp", tp=2, cp=2)),
    "tp4": (4, _keys("fsdp", tp=4)),
    "ep2 x fsdp2": (4, _keys("fsdp", ep=2)),
    "ep2 x replicas": (4, _keys("hsdp", ep=2, dp_replicate=2, dp_shard=2)),
    "ep2 x cp2": (4, _keys("fsdp", ep=2, cp=2)),
    "ep2 x tp2": (4, _keys("fsdp", ep=2, tp=2)),
    "ep4": (4, _keys("fsdp", ep=4)),
}  # fmt: skip
"""Name → (ranks, settings)."""


def layouts(model: str) -> list[str]:
    """Those that a model is tried with."""
    others = {"layers": ("ep",), "experts": ("tp", "cp4")}[model]
    return [name for name in LAYOUTS if not name.startswith(others)]


def batch(step: int) -> dict[str, torch.Tensor]:
    """The step's rows, of different lengths."""
    tokens = torch.randint(0, 64, (ROWS, SEQ), generator=torch.Generator().manual_seed(100 + step))
    targets = tokens.roll(-1, 1)
    for row in range(ROWS):
        targets[row, SEQ - 1 - row :] = -100
    return {"tokens": tokens, "targets": targets}


def losses(job: Job, task: Any, first: int, count: int) -> list[float]:
    world, found = job.world, []
    split = splitting(task, world.loss_rank, job.config.parallel.cp)
    for step in range(first, first + count):
        rows = {key: rows[world.data_rank :: world.data_size] for key, rows in batch(step).items()}
        piece = split({**rows, "lengths": [SEQ] * len(rows["tokens"])})
        found.append(job.step([piece], task.loss, lambda batch: int((batch["targets"] != -100).sum())).loss)
    return found


Found = dict[tuple[str, str, str], tuple[list[str], list[float]]]
"""(model, layout, loaded layout) → names of what was not loaded as it was first saved, losses of the next steps."""


def exchange(legs: list[tuple[str, str, list[str]]], root: str) -> Found:
    """Each leg (model, layout, layouts to load) loads one checkpoint after the other, or trains `SAVED_AT` steps if it
    has none to load; then it saves what it has in root/<model>/<layout>, if nobody has."""
    found: Found = {}
    for model, name, sources in legs:
        found |= _exchange(model, name, sources, Path(root) / model)
        gc.collect()
        dist.barrier()
    return found


def _exchange(model: str, name: str, sources: list[str], folder: Path) -> Found:
    found: Found = {}
    settings = {
        **MODELS[model], **OPTIMIZERS["adamw"], "run.device": "cpu", "train.seq_len": SEQ, "optim.schedule": "constant",
        **LAYOUTS[name][1],
    }  # fmt: skip
    with start(None, settings) as job:
        task: Any = load_task(job.config)
        job.wrap(task.build_model, init_parameter=task.init_parameter, block_classes=task.block_classes)
        # Small chunks, so that even this model's tensors are cut.
        options = {"timeout_s": 60, "chunk_bytes": 1024}
        saves = Checkpointer(job.strategy, job.world, job.config.checkpoint, folder / name, **options)
        is_saved = saves.root.exists()
        dist.barrier()
        for source in sources or [""]:
            differing: list[str] = []
            if source:
                loaded = saves.resume(folder / source)
                assert loaded is not None and loaded[1].step == SAVED_AT
                differing = _differing(job, torch.load(folder / "state.pt"))
            else:
                losses(job, task, 0, SAVED_AT)
                torch.save((state(job), job.strategy.scalars()), folder / "state.pt")
            if not is_saved and source == (sources or [""])[-1]:
                saves.save(RunState(step=SAVED_AT))
            found[model, name, source] = differing, losses(job, task, SAVED_AT, GO_ON)
        saves.close()
    return found


def refusals(legs: list[tuple[str, str, str]], root: str) -> list[str]:
    """What a resume says of checkpoints that cannot be read, one for each leg (model, layout, layout to load)."""
    said = []
    for model, name, source in legs:
        with pytest.raises(ShardkitError) as caught:
            _exchange(model, name, [source], Path(root) / model)
        said.append(str(caught.value))
        gc.collect()
        dist.barrier()
    return said


def _differing(job: Job, first: tuple[dict[str, torch.Tensor], dict[str, float]]) -> list[str]:
    """Names of weights, moments and numbers that are not bit for bit those of the first run: in what ranks write, and
    in every copy that a rank has."""
    expected, scalars = first
    written = state(job)
    bad = sorted(written.keys() ^ expected.keys())
    bad += [name for name in written.keys() & expected.keys() if not torch.equal(written[name], expected[name])]
    for shard in job.strategy.load_targets():
        flat = expected[shard.name].reshape(-1)
        for start_at, part in shard.ranges():
            if not torch.equal(part, flat[start_at : start_at + part.numel()]):
                bad.append(f"{shard.name} from {start_at} on")
    return bad + (["scalars"] if job.strategy.scalars() != scalars else [])
