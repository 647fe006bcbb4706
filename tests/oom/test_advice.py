"""What is advised exists, is allowed, is not set yet, and belongs to the memory that is short."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from shardkit.config import capability
from shardkit.config.load import load_config, resolve_batch
from shardkit.config.schema import STRATEGIES
from shardkit.errors import ConfigError
from shardkit.oom import advice
from shardkit.oom.advice import candidates


def changes(overrides: list[str], world: int = 8, device: str = "cuda", **options: Any) -> list[str]:
    config = load_config(overrides=overrides).config
    found = candidates(config, world, world, device, **options)
    assert all(cost and "\n" not in cost for _, cost in found)
    return [settings for settings, _ in found]


def test_a_ddp_run_is_offered_less_activations_and_shards() -> None:
    found = changes(["parallel.strategy=ddp"])
    for change in ("activation.policy=full", "activation.policy=selective", "parallel.strategy=fsdp",
                   "train.micro_batch_size=4 train.grad_accum_steps=2", "precision.mode=bf16"):  # fmt: skip
        assert change in found, change
    assert "activation.policy=selective" not in changes(["parallel.strategy=ddp"], planned=False)
    if find_spec("deepspeed"):
        assert {"parallel.strategy=zero1", "parallel.strategy=zero2"} <= set(found)
        assert "parallel.strategy=zero2 parallel.offload_optimizer=cpu" in found


def test_the_part_that_holds_most_comes_first_and_another_can_be_left_out() -> None:
    of_activations, of_state = "activation.policy=full", "parallel.strategy=fsdp"
    found = changes(["parallel.strategy=ddp"], parts=("state", "activations"))
    assert found.index(of_state) < found.index(of_activations)
    found = changes(["parallel.strategy=ddp"], parts=("state",))
    assert of_state in found and not any(change.startswith(("activation", "train.micro")) for change in found)


def test_the_micro_batch_shrinks_to_half_and_to_one() -> None:
    found = changes(["train.micro_batch_size=12"])
    assert "train.micro_batch_size=6 train.grad_accum_steps=2" in found
    assert "train.micro_batch_size=1 train.grad_accum_steps=12" in found
    assert "train.micro_batch_size=4" in changes(["train.global_batch_size=128"]), "accumulation follows from the batch"
    assert not any("micro_batch" in change for change in changes(["train.micro_batch_size=1"]))


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
    for change in changes(overrides, world, device) + changes(overrides, world, device, short_of="host"):
        changed = load_config(overrides=[*overrides, *change.split(" ")]).config  # as a user would set it
        capability.check(changed, device=device, world_size=world, local_world_size=world)
        resolve_batch(changed, world)
        assert changed != config


def test_offload_is_no_help_where_device_and_host_are_one() -> None:
    assert not any("offload" in change for change in changes(["parallel.strategy=fsdp"], device="cpu"))
    assert "parallel.offload_param=cpu" in changes(["parallel.strategy=fsdp"])


LORA = ["task.name=hf_causal_lm", "model.hf.model_type=llama", "adapter.type=lora", "precision.mode=bf16"]


def test_a_frozen_base_in_16_bits_is_offered_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "find_spec", lambda name: name == "bitsandbytes")
    assert "model.quantize.bits=4" in changes(LORA, packable=(0.75, 0.0))
    assert "model.quantize.bits=4 model.quantize.experts=true" in changes(LORA, packable=(0.03, 0.96))
    for overrides, share in ((LORA, 0.0), ([*LORA, "model.quantize={bits: 4}"], 0.75), ([], 0.75)):
        assert not any("quantize" in change for change in changes(overrides, packable=(share, 0.0)))
    monkeypatch.setattr(advice, "find_spec", lambda name: None)
    assert not any("quantize" in change for change in changes(LORA, packable=(0.75, 0.0)))


def test_whole_logits_are_cut_into_chunks() -> None:
    assert "model.loss_chunk_size=1024" in changes(["model.loss_chunk_size=0"])
    assert not any("loss_chunk" in change for change in changes([]))


@pytest.mark.parametrize(("is_advised", "overrides", "planned"), [
    (True, [], False), (True, ["activation.policy=full"], True), (True, LORA, True),
    (False, LORA, False),  # its MLPs may be experts, which a plan would tell
    (False, ["model.mlp_chunks=2"], True), (False, ["activation.policy=selective_op"], True),
    (False, ["task.name=image_classification"], True),
])  # fmt: skip
def test_mlps_are_cut_into_parts(is_advised: bool, overrides: list[str], planned: bool) -> None:
    assert ("model.mlp_chunks=8" in changes(overrides, planned=planned)) is is_advised


def test_a_full_host() -> None:
    overrides = ["parallel.strategy=zero2", "parallel.offload_optimizer=cpu", "data.workers=4",
                 "checkpoint.async_save=true"]  # fmt: skip
    assert changes(overrides, short_of="host") == [
        "data.workers=2", "checkpoint.async_save=false", "parallel.offload_optimizer=none"
    ]  # fmt: skip
