"""transformers' Trainer in one line: the bytes of every rank, and an out-of-memory error with planned advice."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigError
from shardkit.memory import read_jsonl
from shardkit.report.read import read_run
from tests.commands import Done, python_m
from tests.integrations.loops import KINDS

pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip
NUMEL = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
TENSORS = 2 + 2 * 9 + 1
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
ZERO3 = {
    **AUTO,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000_000, "stage3_param_persistence_threshold": 0},
}


def train(folder: Path, ranks: int = 2, watch: dict[str, Any] | None = None, code: int = 0, **given: Any) -> Done:
    args = {
        "output_dir": str(folder / "out"), "use_cpu": True, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_steps": 3, **given.pop("args", {}),
    }  # fmt: skip
    settings = {"model": LLAMA, "seq_len": 32, **given, "args": args}
    settings["watch"] = {"run_dir": str(folder / "run"), "every": 2, "tensorboard": False, **(watch or {})}
    (folder / "settings.json").write_text(json.dumps(settings))
    env = {"DS_ACCELERATOR": "cpu"}
    return python_m("tests.integrations.trainer_run", folder / "settings.json", ranks=ranks, env=env, code=code)


def counted(folder: Path) -> list[dict[str, int]]:
    """Bytes by category of each rank at the last gather."""
    *_, (_, rows) = read_jsonl(folder / "run" / "memory.jsonl")
    return [{k: n.total for k, n in (row.state or {}).items() if k not in ("buffers", "quantized")} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "args", "expected"),
    [
        ("ddp", {}, (4 * NUMEL, 0, 4 * NUMEL, 8 * NUMEL + 4 * TENSORS)),
        ("zero3", {"deepspeed": ZERO3}, (2 * NUMEL, 2 * NUMEL, 2 * NUMEL, 4 * NUMEL + 4 * 2)),
    ],
)
def test_a_trainers_ranks_are_counted(engine: str, args: dict[str, Any], expected: tuple[int], tmp_path: Path) -> None:
    done = train(tmp_path, args=args)
    assert counted(tmp_path) == [dict(zip(KINDS, expected, strict=True))] * 2
    run = read_run(tmp_path / "run")
    assert run.notes == [] and run.setting("parallel.strategy") == engine
    assert [(line["step"], line["loss"] > 0, line["lr"] > 0) for line in run.metrics] == [
        (step, True, True) for step in (1, 2, 3)
    ]
    assert [gather.step for gather in run.gathers] == [1, 2, 3]
    assert "look at the run: shardkit report" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_an_adapters_bytes_are_counted(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft")
    train(tmp_path, ranks=ranks, lora={"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"})
    adapters, tensors = 2 * 2 * (4 * 64 + 64 * 4), 2 * 2 * 2
    expected = {
        "params": 4 * (NUMEL + adapters), "master_params": 0, "grads": 4 * adapters,
        "optimizer": 8 * adapters + 4 * tensors,
    }  # fmt: skip
    assert counted(tmp_path) == [expected] * max(1, ranks)


def runs_out(folder: Path, code: int, **args: Any) -> Done:
    model = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
    args |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    return train(folder, 0, {"cap": "96MiB"}, code, model=model, seq_len=128, args=args)


@pytest.mark.slow
def test_memory_that_runs_out_is_explained_and_planned(tmp_path: Path) -> None:
    done = runs_out(tmp_path, code=1)
    cause, fix = done.stderr.rstrip().splitlines()[-2:]
    assert cause.startswith("shardkit: rank 0 ran out of memory in ") and "memory.cap=96MiB" in cause
    assert "(planned: " in fix and " MiB, fits)" in fix
    found = json.loads((tmp_path / "run" / "oom" / "rank0.json").read_text())
    assert found["gaps"] == []
    by_change = {one["change"]: one for one in found["advice"]}
    assert "fits" in {one.get("verdict") for one in by_change.values()}
    assert "train.micro_batch_size=4 train.grad_accum_steps=2" in by_change


@pytest.mark.slow
def test_a_trainer_that_swallows_the_error_begins_again(tmp_path: Path) -> None:
    done = runs_out(tmp_path, code=0, auto_find_batch_size=True)
    assert "the Trainer ran out of memory and begins again with per_device_train_batch_size=" in done.stderr
    run = read_run(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2, 3] and run.setting("train.micro_batch_size") < 8


def test_a_missing_library_is_said_in_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("transformers", "lightning"):
        for name in (module, "lightning.pytorch", "pytorch_lightning"):
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"shardkit.integrations.{module}", raising=False)
        with pytest.raises(ConfigError) as missing:
            importlib.import_module(f"shardkit.integrations.{module}")
        assert missing.value.cause.startswith(f"shardkit.integrations.{module} needs {module}, which does not import")
        assert missing.value.fix == f"pip install {module}"
