"""Plans from a Trainer's file are those of its real runs, in its own loop."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.foreign.translate import read_job
from shardkit.memory.tracing.events import EventLog
from shardkit.memory.tracing.tracker import TensorTracker
from shardkit.plan.client import plan
from shardkit.plan.simulate.engines import StandInDDP
from shardkit.plan.target import choose_target
from tests.commands import python_m

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_fsdp2_has_the_units_that_accelerate_makes(tied: bool) -> None:
    """Which weights are gathered together, and which are freed after their forward."""
    pytest.importorskip("accelerate")
    done = python_m("tests.plan.units_run", int(tied), code=0)
    theirs, ours = (json.loads(line) for line in done.stdout.splitlines())
    assert len(theirs) == (3 if tied else 4), "two blocks, the last norm with the head, and the embedding"
    assert ours == theirs


MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
    "max_position_embeddings": 512,
}  # fmt: skip
SEQ_LEN = 128
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
SMALL = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
ZERO2 = {**AUTO, "zero_optimization": {"stage": 2, **SMALL}}
ZERO2_BF16 = {**ZERO2, "bf16": {"enabled": "auto"}}
ZERO3 = {**AUTO, "zero_optimization": {"stage": 3, **SMALL, "stage3_param_persistence_threshold": 0}}
slow = pytest.mark.slow


def test_ddp_of_other_loops_has_one_bucket_until_its_second_forward() -> None:
    """As torch's reducer has it, whose segments the allocator keeps."""

    def buckets(bucket_views: bool) -> list[list[int]]:
        layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(3)))
        made = []
        with TensorTracker(log := EventLog()):
            model = StandInDDP(layers, bucket_cap_mb=1.5, bucket_views=bucket_views)
            model.register_comm_hook(None, lambda _, bucket: _Done())
            for _ in range(2):
                begun = len(log.allocations)
                model(torch.ones(1, 512)).sum().backward()
                made.append([one.n_bytes for one in log.allocations[begun:] if one.op == "aten::empty"])
            first = [one.n_bytes for one in log.allocations if one.op == "aten::empty"]
            sent = [one.n_bytes for one in log.allocations if one.op == "aten::cat"]
        return [first[:1], made[1], sent]

    mib = 2**20
    assert buckets(bucket_views=False) == [[3 * mib], [mib, 2 * mib], [3 * mib]]
    assert buckets(bucket_views=True) == [[mib], [], []]


class _Done:
    def wait(self) -> None: ...


@slow
def test_zero3_computes_with_fp32_adapters_where_peft_made_them_after_the_sharding(tmp_path: Path) -> None:
    """Each adapted layer then keeps its input in fp32 too."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    ))  # fmt: skip
    arguments = tmp_path / "args.json"
    zero3 = {**ZERO3, "bf16": {"enabled": "auto"}}
    given = {"output_dir": "out", "use_cpu": True, "per_device_train_batch_size": 2, "bf16": True, "deepspeed": zero3}
    arguments.write_text(json.dumps(given))
    job = read_job([str(arguments)], str(tmp_path), 2, peft=str(tmp_path / "adapter_config.json"))
    config = job.load([f"train.seq_len={SEQ_LEN}"]).config
    target = choose_target(config, 2)
    more = plan(config, target, loop=job.loop).peak.allocated
    less = plan(config, target, loop={**job.loop, "fp32_adapters": False}).peak.allocated
    inputs = MODEL["num_hidden_layers"] * 2 * 2 * SEQ_LEN * MODEL["hidden_size"] * 4
    assert more - less == pytest.approx(inputs, rel=0.05)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("given", "model", "ranks"),
    [
        pytest.param({"bf16": True, "gradient_checkpointing": True}, {}, 1, id="bf16", marks=slow),
        pytest.param({"gradient_accumulation_steps": 4}, {"vocab_size": 8192}, 1, id="accumulation", marks=slow),
        pytest.param({"bf16": True}, {"dtype": "bfloat16"}, 1, id="bf16-weights", marks=slow),
        pytest.param({"optim": "adamw_torch"}, {}, 1, id="adamw-torch", marks=slow),
        pytest.param({"optim": "adafactor"}, {}, 1, id="adafactor", marks=slow),
        pytest.param({}, {}, 2, id="ddp", marks=slow),
        pytest.param({"gradient_checkpointing": True}, {}, 2, id="ddp-checkpointing", marks=slow),
        pytest.param({"deepspeed": ZERO2}, {}, 2, id="zero2", marks=slow),
        pytest.param({"deepspeed": ZERO2_BF16, "bf16": True}, {}, 2, id="zero2-bf16", marks=slow),
        pytest.param({"deepspeed": ZERO3}, {}, 2, id="zero3", marks=slow),
    ],
)  # fmt: skip
def test_the_peak_of_the_trainers_own_loop_is_predicted(
    given: dict[str, Any], model: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    arguments = tmp_path / "args.json"
    arguments.write_text(
        json.dumps({"output_dir": str(tmp_path / "out"), "use_cpu": True, "per_device_train_batch_size": 2, **given})
    )
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **model}))
    done = python_m(
        "tests.plan.trainer_run", arguments, tmp_path, SEQ_LEN, ranks=0 if ranks == 1 else ranks,
        env={"DS_ACCELERATOR": "cpu"}, code=0,
    )  # fmt: skip
    (measured,) = map(int, re.findall(r"^peak (\d+)$", done.stdout, re.MULTILINE))
    job = read_job([str(arguments)], str(tmp_path), ranks)
    config = job.load([f"train.seq_len={SEQ_LEN}"]).config
    estimate = plan(config, choose_target(config, ranks), loop=job.loop)
    assert measured == pytest.approx(estimate.peak.allocated, rel=0.03)
