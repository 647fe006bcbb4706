"""What is advised exists, is allowed, is not set yet, and is ranked by what it saves."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from shardkit.config import capability
from shardkit.config.load import load_config, resolve_batch
from shardkit.config.strategy import STRATEGIES
from shardkit.errors import ConfigError
from shardkit.memory.rows import KINDS, StateBytes
from shardkit.oom import advice_rules
from shardkit.oom.advice import Advice, Used, advise

GIB = 2**30


def state(**gib: float) -> dict[Any, StateBytes]:
    """Categories in GiB; `host_params=4` for what lies on the host."""
    return {kind: StateBytes(int(gib.get(kind, 0) * GIB), int(gib.get(f"host_{kind}", 0) * GIB)) for kind in KINDS}


def advice(overrides: list[str], world: int = 8, device: str = "cuda", **used: Any) -> dict[str, Advice]:
    config = load_config(overrides=overrides).config
    found = advise(config, world, world, device, Used(**used))
    savings = [one.saving_bytes or 0 for one in found]
    assert savings == sorted(savings, reverse=True), "the largest saving first"
    assert all(one.cost and one.why and "\n" not in one.cost + one.why for one in found)
    return {one.change: one for one in found}


FULL: dict[str, Any] = {
    "state": state(params=4, grads=4, optimizer=8),
    "not_state": 20 * GIB,
    "phase": "forward",
    "n_blocks": 24,
}


def gib(one: Advice) -> float:
    assert one.saving_bytes is not None
    return round(one.saving_bytes / GIB, 2)


def test_a_ddp_run_full_of_activations() -> None:
    found = advice(["parallel.strategy=ddp"], missing=2 * GIB, **FULL)
    assert gib(found["activation.policy=full"]) == 17.99  # 20 × (1 − 1/24 − 2/34)
    assert gib(found["parallel.strategy=fsdp"]) == 13.67  # 16 × 7/8 − 2 blocks of 4/24
    assert gib(found["train.micro_batch_size=4 train.grad_accum_steps=2"]) == 10
    assert gib(found["precision.mode=bf16"]) == 8  # half the activations, but bf16 copies of the weights
    assert next(iter(found)).startswith("activation.")
    if find_spec("deepspeed"):
        assert gib(found["parallel.strategy=zero1"]) == 7
        assert gib(found["parallel.strategy=zero2"]) == 10.5
        assert gib(found["parallel.strategy=zero2 parallel.offload_optimizer=cpu"]) == 11.5


def test_the_micro_batch_shrinks_as_far_as_needed() -> None:
    assert "train.micro_batch_size=2 train.grad_accum_steps=4" in advice([], missing=12 * GIB, **FULL)
    assert "train.micro_batch_size=1 train.grad_accum_steps=8" in advice([], missing=10**15, **FULL)
    derived = advice(["train.global_batch_size=128"], missing=2 * GIB, **FULL)
    assert "train.micro_batch_size=4" in derived, "accumulation follows from the global batch"
    assert not any("micro_batch" in change for change in advice(["train.micro_batch_size=1"], **FULL))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "more", [[], ["activation.policy=full", "precision.mode=bf16"], ["optim.name=muon"], ["train.max_norm=null"]]
)
def test_everything_advised_is_allowed_and_new(strategy: str, device: str, more: list[str]) -> None:
    overrides, world = [f"parallel.strategy={strategy}", *more], 1 if strategy == "single" else 4
    config = load_config(overrides=overrides).config
    try:
        capability.check(config, device=device, world_size=world, local_world_size=world)
    except ConfigError:
        pytest.skip("the run itself is refused")
    for change in advice(overrides, world, device, **FULL):
        if "=" not in change or change.startswith("PYTORCH"):
            continue
        changed = load_config(overrides=[*overrides, *change.split(" ")]).config  # as a user would set it
        capability.check(changed, device=device, world_size=world, local_world_size=world)
        resolve_batch(changed, world)
        assert changed != config


def test_offload_is_no_help_where_device_and_host_are_one() -> None:
    assert not any("offload" in change for change in advice(["parallel.strategy=fsdp"], device="cpu", **FULL))
    assert "parallel.offload_param=cpu" in advice(["parallel.strategy=fsdp"], **FULL)


def test_activations_are_not_to_blame_for_what_a_step_asks() -> None:
    used = {**FULL, "phase": "update"}
    found = advice(["parallel.strategy=ddp"], **used)
    assert not any(change.startswith(("activation", "train.micro", "precision")) for change in found)
    assert "parallel.strategy=fsdp" in found


def test_moments_that_do_not_exist_yet_are_counted() -> None:
    used: dict[str, Any] = {"state": state(params=4), "not_state": GIB, "phase": "update", "n_blocks": 0}
    assert gib(advice(["parallel.strategy=ddp"], **used)["parallel.strategy=fsdp"]) == 14  # (4 + 4 + 8) × 7/8


def test_while_wrapping_there_are_weights_only() -> None:
    found = advice(["parallel.strategy=ddp"], phase="wrap", not_state=8 * GIB)
    assert gib(found["parallel.strategy=fsdp"]) == 7
    assert "parallel.strategy=zero1" not in found


LORA = ["task.name=hf_causal_lm", "model.hf.model_type=llama", "adapter.type=lora", "precision.mode=bf16"]
BASE: dict[str, Any] = {"state": state(params=16), "not_state": GIB, "phase": "forward", "n_blocks": 32}


def test_a_frozen_base_in_16_bits_is_offered_4() -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    found = advice(LORA, packable=(0.75, 0.0), **BASE)
    assert gib(found["model.quantize.bits=4"]) == 8.62  # 16 × 0.75 × (1 − 4.5 / 16)
    assert "unpacks a layer" in found["model.quantize.bits=4"].cost
    assert gib(advice([*LORA, "precision.mode=fp32"], packable=(0.75, 0.0), **BASE)["model.quantize.bits=4"]) == 10.31
    for overrides, share in ((LORA, 0.0), ([*LORA, "model.quantize={bits: 4}"], 0.75), ([], 0.75)):
        assert not any("quantize" in change for change in advice(overrides, packable=(share, 0.0), **BASE))
    zero3 = advice([*LORA, "parallel.strategy=zero3"], packable=(0.75, 0.0), **BASE)
    assert gib(zero3["model.quantize.bits=4"]) == 8.62


def test_experts_are_packed_with_the_linear_layers() -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    found = advice(LORA, packable=(0.03, 0.96), **BASE)
    packed = found["model.quantize.bits=4 model.quantize.experts=true"]
    assert gib(packed) == 11.38 and "linear layers and experts hold 99%" in packed.why


def test_without_bitsandbytes_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice_rules, "find_spec", lambda name: None)
    changes = [change for change in advice(LORA, packable=(0.75, 0.0), **BASE) if "quantize" in change]
    assert changes == ["pip install 'shardkit[quantize]', then model.quantize.bits=4"]


def test_packed_weights_are_shared_out_and_offloaded_and_an_adapter_asks_for_no_gradients_of_its_base() -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    used = {**BASE, "state": state(params=2, quantized=8)}
    packed = [*LORA, "model.quantize={bits: 4}"]
    fsdp = advice([*packed, "parallel.strategy=ddp"], **used)["parallel.strategy=fsdp"]
    assert gib(fsdp) == 8.12 and "packed weights" in fsdp.why  # 10 × 7/8 − 2 blocks of 10/32
    zero3 = advice([*packed, "parallel.strategy=zero2"], **used)["parallel.strategy=zero3"]
    assert gib(zero3) == 8.12 and "packed weights" in zero3.why
    offload = advice([*packed, "parallel.strategy=fsdp"], **used)["parallel.offload_param=cpu"]
    assert gib(offload) == 9.69 and "packed weights" in offload.why  # 10 × (1 − 1/32)
    found = advice([*LORA, "parallel.strategy=ddp", "precision.mode=fp32"], **BASE)
    assert gib(found["precision.mode=bf16"]) == 8.5, "the frozen base is held in bf16, too"
    assert "frozen base" in found["precision.mode=bf16"].cost


def test_whole_logits_are_cut_into_chunks() -> None:
    overrides = ["model.loss_chunk_size=0", "model.vocab_size=50257", "train.micro_batch_size=16", "train.seq_len=256"]
    saved = advice(overrides, **FULL)["model.loss_chunk_size=1024"].saving_bytes
    assert saved == (16 * 256 - 1024) * 50257 * 8
    assert not any("loss_chunk" in change for change in advice([], **FULL))


def test_a_fragmented_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    change = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert gib(advice([], missing=2 * GIB, fragmentation=3 * GIB, **FULL)[change]) == 3
    assert change not in advice([], missing=2 * GIB, fragmentation=GIB, **FULL), "it would not have been enough"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert change not in advice([], missing=2 * GIB, fragmentation=3 * GIB, **FULL)


def test_sharded_state_halves_with_twice_the_ranks() -> None:
    assert gib(advice(["parallel.strategy=fsdp"], **FULL)["16 ranks"]) == 8
    assert not any("ranks" in change for change in advice(["parallel.strategy=ddp"], **FULL))


def test_a_full_host() -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    found = advice(
        ["parallel.strategy=zero2", "parallel.offload_optimizer=cpu", "data.workers=4", "checkpoint.async_save=true"],
        short_of="host", state=state(params=4, host_optimizer=30), workers=4 * GIB, staging=3 * GIB,
    )  # fmt: skip
    assert {change: gib(one) for change, one in found.items()} == {
        "parallel.offload_optimizer=none": 30, "checkpoint.async_save=false": 3, "data.workers=2": 2
    }  # fmt: skip


def test_savings_that_cannot_be_told_come_last() -> None:
    found = advice(["parallel.strategy=fsdp", "activation.policy=selective"], **FULL)
    assert found["activation.policy=full"].saving_bytes is None
    assert list(found)[-1].startswith("activation.")
