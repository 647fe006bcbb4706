"""Small runs whose checkpoints are exported, and runs that start from what was exported."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.strategies.cases import on_cpus

SMALL = {
    "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "model.max_seq_len": 24, "model.tie_weights": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"task.name": "hf_causal_lm", "model.preset": "gpt2-debug", "parallel.strategy": "fsdp"},
    "llama": {"task.name": "hf_causal_lm", "model.preset": "llama-debug", "parallel.strategy": "ddp"},
    "native": {**SMALL, "parallel.strategy": "zero2", "train.ema_decay": 0.5},
}


def settings(case: str, root: str, **extra: Any) -> dict[str, Any]:
    out = {
        "run.dir": f"{root}/{case}", "train.max_steps": 2, "train.micro_batch_size": 4,
        "train.seq_len": 24, "data.path": f"{root}/text.txt", "data.cache_dir": f"{root}/cache", "optim.lr": 3e-3,
        "train.eval_samples": 16, "logging.tensorboard": False, "checkpoint.every_steps": 1, **CASES[case],
    }  # fmt: skip
    out |= extra
    return out | on_cpus(out["parallel.strategy"])


def train_all(root: str) -> None:
    for case in CASES:
        with start(None, settings(case, root)) as job:
            Trainer(job).fit()
        gc.collect()


def start_all(root: str, cases: list[tuple[str, str, str, dict[str, Any]]]) -> list[tuple[list[str], float]]:
    """For each (case, strategy, what to start from, settings): names that differ from it, and the first loss.

    The learning rate is 0; `resume` in the settings means `run.resume` in place of `model.init_from`.
    """
    out = []
    for index, (case, strategy, source, more) in enumerate(cases):
        more = dict(more)
        key = "run.resume" if more.pop("resume", False) else "model.init_from"
        extra = {
            "parallel.strategy": strategy, key: source, "run.dir": f"{root}/started-{index}", "optim.lr": 0.0,
            "train.max_steps": 1, "train.eval_samples": 0, "train.ema_decay": None, "checkpoint.at_end": False,
            "checkpoint.every_steps": None, **more,
        }  # fmt: skip
        with start(None, settings(case, root, **extra)) as job:
            trainer = Trainer(job)
            out.append((differing(job, source), next(iter(trainer.recorded_steps()))["loss"]))
        gc.collect()
    return out


def dcp_of_native(folder: Path, root: str) -> Path:
    """The native case's model after a step of AdamW in a plain loop, as torch.distributed.checkpoint saves it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from shardkit.config.load import load_config
    from shardkit.models.transformer import Transformer

    model = Transformer(load_config(None, settings("native", root)).config.model)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (2, 16))
    model(tokens, tokens).backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder, no_dist=True)
    return folder


def differing(job: Any, source: str) -> list[str]:
    """Names of this rank's weights that are not what the source holds."""
    from shardkit.checkpoint.formats.detect import open_source

    held = open_source(Path(source), weights_only=True)
    bad = []
    for shard in job.strategy.load_targets():
        if shard.name.startswith(("model.", "ema.")):
            name = shard.name.replace("ema.", "model.", 1)
            expected = torch.empty(shard.local.numel(), dtype=held.tensors[name].dtype)
            held.read_into(name, shard.start, expected)
            if not torch.equal(shard.local.float(), expected.float()):
                bad.append(shard.name)
    held.close()
    return bad


def resume_all(pairs: list[tuple[str, dict[str, Any]]], folder: str) -> list[list[str]]:
    """Resume each converted folder with a job of its own settings; names that are not bit for bit the folder's."""
    from tests.checkpoint import cases
    from tests.checkpoint.formats.foreign import Net

    out = []
    for source, extra in pairs:
        with start(None, {"run.device": "cpu", **extra}) as job:
            torch.manual_seed(1)
            job.wrap(Net())
            checkpoints = cases.checkpointer(job, Path(folder) / "none")
            found = checkpoints.resume(source)
            assert found[1].step == 3
            out.append(cases.differences(job, found[0]))
            checkpoints.close()
        gc.collect()
    return out
