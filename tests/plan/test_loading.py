"""What a plan says of loading and saving in the Trainer's loop is what its ranks do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.foreign.transfers import Sizes
from shardkit.foreign.translate import read_job
from tests.commands import python_m
from tests.timing import measured_again

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist, pytest.mark.deepspeed, pytest.mark.slow]

MODEL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 128,
}  # fmt: skip
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
SMALL = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "stage3_param_persistence_threshold": 0}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {**AUTO, "zero_optimization": {"stage": stage, **SMALL, **more}, "bf16": {"enabled": "auto"}}


def job(folder: Path, dtype: str = "float32", **given: Any) -> Sizes:
    """Write a model and the Trainer's arguments; returns the model's sizes on two ranks."""
    import torch

    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).to(getattr(torch, dtype))
    network.save_pretrained(folder)
    arguments = {"output_dir": str(folder / "out"), "per_device_train_batch_size": 1, **given}
    (folder / "args.json").write_text(json.dumps(arguments))
    numel = [param.numel() for param in network.parameters()]
    block = sum(param.numel() for param in network.model.layers[0].parameters())
    return Sizes(sum(numel), max(numel), block, 2)


def ran(stdout: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"rank"')]
    return sorted(found, key=lambda one: int(one["rank"]))


def planned(folder: Path, of: Callable[[Any], int], phase: str, rank: int) -> int:
    """The most bytes of the rows that concern a rank."""
    rows = read_job([str(folder / "args.json")], str(folder), 2).transfers
    named = ("every rank",) if rank else ("every rank", "rank 0")
    return sum(of(row) for row in rows if row.phase == phase and row.expected and row.ranks in named)


@pytest.mark.parametrize("more", [zero(2), zero(3, **GATHER)], ids=["zero2", "zero3"])
@measured_again  # a rank that waits may still hold the layer that was gathered before
def test_saving_adds_the_planned_copies_on_each_of_two_ranks(more: dict[str, Any], tmp_path: Path) -> None:
    sizes = job(tmp_path, use_cpu=True, bf16=True, deepspeed=more)
    env = {"DS_ACCELERATOR": "cpu", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
    done = python_m("tests.plan.loading_run", tmp_path, "first", ranks=2, env=env, code=0)
    first, second = ran(done.stdout)
    for rank, found in enumerate((first, second)):
        added = found["saving"]["cpu"] - found["held"]["cpu"]
        expected = planned(tmp_path, lambda row: row.on_host(sizes), "saving", rank)
        if not expected:  # a layer gathered for rank 0: on the CPU the device is the host
            expected = planned(tmp_path, lambda row: row.on_device(sizes, 0), "saving", rank)
        assert added == pytest.approx(expected, rel=0.03), rank
    if more["zero_optimization"]["stage"] == 3:
        most = planned(tmp_path, lambda row: row.on_device(sizes, 0) + row.in_file(sizes), "loading", 0)
        assert first["loading"]["cpu"] == pytest.approx(most, rel=0.03), "the mapped file beside its shard"
