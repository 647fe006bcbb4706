"""What only the DeepSpeed strategies have: a config of their own and a native op."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpuinfo
import pytest
import torch

from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.strategies.zero.config import build_ds_config, first_compiler_error, remember_cpu, sole_builder
from shardkit.strategies.zero.state import masters, share_rates, zero3_shards, zero_scalars
from tests.commands import python_m
from tests.run.test_train import REPO, user_error


def built(world: int = 4, accum: int = 3, numel: int | None = 1001, **settings: Any) -> dict[str, Any]:
    values = {k.replace("__", "."): v for k, v in settings.items()}
    config = load_config(None, {"parallel.strategy": "zero2", **values}).config
    return build_ds_config(config, world, accum, False, numel and (numel, numel))


def test_batch_accumulation_and_clipping_reach_the_engine() -> None:
    made = built(train__micro_batch_size=2, train__max_norm=0.7)
    assert made["train_micro_batch_size_per_gpu"] == 2
    assert made["gradient_accumulation_steps"] == 3
    assert made["train_batch_size"] == 24
    assert made["gradient_clipping"] == 0.7
    assert built(train__max_norm=None)["gradient_clipping"] == 0.0


def test_the_processor_is_looked_at_once_however_many_optimizers_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look() -> dict[str, str]:
        looked.append("once")
        return {"vendor_id_raw": "a vendor"}

    monkeypatch.setattr(cpuinfo, "get_cpu_info", look)
    for _ in range(2):  # each build of an engine
        remember_cpu()
        assert cpuinfo.get_cpu_info()["vendor_id_raw"] == "a vendor"
    assert looked == ["once"]


def test_buckets_are_no_larger_than_the_model() -> None:
    zero = built()["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 1002  # even
    assert built(numel=10**9, parallel__bucket_mb=1)["zero_optimization"]["reduce_bucket_size"] == 2**20 // 4


def test_raw_keys_pass_through_and_may_repeat_ours() -> None:
    raw = {"zero_optimization": {"overlap_comm": True, "stage": 2}, "wall_clock_breakdown": True}
    made = built(parallel__ds_config=raw)
    assert made["zero_optimization"]["overlap_comm"] is True
    assert made["wall_clock_breakdown"] is True


@pytest.mark.parametrize(
    ("raw", "owner"),
    [
        ({"gradient_clipping": 5}, "train.max_norm"),
        ({"train_batch_size": 7}, "train.global_batch_size"),
        ({"zero_optimization": {"stage": 3}}, "parallel.strategy"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "parallel.offload_optimizer"),
        ({"bf16": {"enabled": True}}, "precision.mode"),
        ({"optimizer": {"type": "Adam"}}, "optim.name"),
    ],
)
def test_a_raw_key_that_contradicts_is_refused_by_both_names(raw: dict[str, Any], owner: str) -> None:
    with pytest.raises(ConfigError) as error:
        built(parallel__ds_config=raw)
    assert owner in error.value.cause
    assert "parallel.ds_config." in error.value.cause


def test_the_first_compiler_error_is_found() -> None:
    error = "cpu_adam.h:20:10: fatal error: Python.h: No such file or directory"
    assert first_compiler_error(f"[1/3] c++ -MMD ...\n{error}\n compilation terminated.") == error


def test_a_build_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    guard = tmp_path / "lock"  # torch's
    script = (
        "import os, sys; from pathlib import Path; from shardkit.strategies.zero.config import sole_builder\n"
        "with sole_builder(Path(sys.argv[1])):\n"
        "    Path(sys.argv[1], 'lock').touch(); os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=REPO, timeout=100)
    assert killed.returncode == -9
    assert guard.exists()
    with sole_builder(tmp_path):
        assert not guard.exists()
        guard.touch()
    with sole_builder(tmp_path):
        assert guard.exists(), "somebody else's build, which may be alive"


def test_a_build_that_fails_says_why_and_what_to_do(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-g++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-dump*|*-v) exec g++ "$@";; esac\n'  # says which version it is, compiles nothing
        "echo 'adam.cpp:1:1: fatal error: no such header' >&2\n"
        "exit 1\n"
    )
    compiler.chmod(0o755)
    done = python_m(
        "shardkit.train", "parallel.strategy=zero2", "parallel.offload_optimizer=cpu",
        f"run.dir={tmp_path}/run", "run.device=cpu", "train.max_steps=1",
        env={"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}, timeout=200,
    )  # fmt: skip
    assert "building DeepSpeedCPUAdam" in done.stderr
    user_error(done, "fatal error: no such header", "apt-get install g++")


def test_fp32_accumulation_under_zero1_and_bf16_is_refused() -> None:
    raw = {"data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(ConfigError, match="BF16_Optimizer") as error:
        built(parallel__strategy="zero1", parallel__ds_config=raw, precision__mode="bf16")
    assert "zero2" in error.value.fix
    built(parallel__strategy="zero2", parallel__ds_config=raw, precision__mode="bf16")


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_packed_bytes_that_deepspeed_would_quantise_again_are_refused(key: str) -> None:
    keys = {"parallel__strategy": "zero3", "parallel__ds_config": {"zero_optimization": {key: True}}}
    packed = {"task__name": "hf_causal_lm", "adapter__type": "lora", "model__quantize": {"bits": 4}}
    with pytest.raises(ConfigError, match=f"{key}=true with model.quantize: DeepSpeed would quantise") as error:
        built(**keys, **packed)
    assert error.value.fix == "remove the raw key, or remove model.quantize"
    built(**keys)


def test_states_on_the_gpu_beside_offloaded_ones_are_seen_and_follow_the_schedule() -> None:
    """With `offload_ratio` DeepSpeed keeps a second optimizer, for the masters that stay (here on meta)."""
    on_host, on_gpu = torch.zeros(4), torch.zeros(4, device="meta")
    host, gpu = (
        SimpleNamespace(state={master: {"exp_avg": torch.zeros_like(master), "step": 7}}, param_groups=[{"lr": lr}])
        for master, lr in ((on_host, 0.5), (on_gpu, 1.0))
    )
    params: list[Any] = [SimpleNamespace(partition_numel=lambda: 4, ds_numel=4, ds_shape=(4,)) for _ in range(2)]
    zero = SimpleNamespace(
        optimizer=host, backup_optimizer=gpu, fp16_groups=[[params[0]], [params[1]]],
        fp32_partitioned_groups_flat=[on_host, on_gpu], sub_group_to_group_id={0: 0, 1: 0},
    )  # fmt: skip
    fqns = {id(params[0]): "a", id(params[1]): "b"}
    found = {shard.name: shard.local.device.type for shard in zero3_shards(zero, fqns, 0)}
    assert found == {"model.a": "cpu", "optim.a.exp_avg": "cpu", "model.b": "meta", "optim.b.exp_avg": "meta"}
    assert zero_scalars(zero, 3, fqns) == {"optim.a.step": 7, "optim.b.step": 7}
    assert [group["lr"] for _, _, group in masters(zero, 3)] == [0.5, 1.0]
    share_rates(zero)
    assert gpu.param_groups[0]["lr"] == 0.5
