"""Plans of a base in 4 bits: the bytes of its formula, what may be changed, the largest batch, and a queue's card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.plan.client import plan
from shardkit.plan.model.estimate import MemoryEstimate
from shardkit.plan.target import choose_target
from tests.commands import python_m

GIB = 2**30
SMALL = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip
LLAMA_70B = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
             "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
PACKED_70B = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
Q4 = "model.quantize={bits: 4}"


def words(sizes: dict[str, Any], *more: str) -> list[str]:
    return [
        "task.name=hf_causal_lm", f"model.hf={json.dumps(sizes)}", "adapter.type=lora", "adapter.r=16",
        "precision.mode=bf16", "activation.policy=full", "train.micro_batch_size=1", *more,
    ]  # fmt: skip


def command(name: str, *more: str, code: int = 0) -> Any:
    return python_m("shardkit.cli", name, "-", *words(SMALL, "train.seq_len=16"), *more, code=code)


def planned(gpus: int, gpu: str, *more: str) -> MemoryEstimate:
    config = load_config(None, words(LLAMA_70B, "train.seq_len=2048", Q4, *more)).config
    return plan(config, choose_target(config, gpus, gpu=gpu))


@pytest.mark.slow
def test_a_llama_of_70b_fits_one_card_of_80_gb() -> None:
    one = planned(1, "h100")
    assert one.verdict == "fits" and 47 < one.needed / GIB < 49
    assert one.categories["quantized"].device == pytest.approx(PACKED_70B * 4.5 / 8, rel=1e-3)


@pytest.mark.slow
def test_a_mixtral_fits_a_third_of_a_card_where_its_experts_are_packed() -> None:
    keys, packs = words({"model_type": "mixtral"}, "train.seq_len=2048"), "{bits: 4, experts: true}"
    packed, adapted, as_it_is = (
        plan(config, choose_target(config, 1, gpu="h100"))
        for quantize, targets in ((packs, "[q_proj, v_proj]"), (packs, "all-linear"), ("{bits: 4}", "[q_proj, v_proj]"))
        for config in [load_config(None, [*keys, f"model.quantize={quantize}", f"adapter.targets={targets}"]).config]
    )
    assert adapted.verdict == "fits" and 29.7 < adapted.needed / GIB < 30.9
    assert adapted.n_params - packed.n_params == 216_530_944
    assert packed.verdict == "fits" and 26.5 < packed.needed / GIB < 27.7
    assert packed.categories["quantized"].device == pytest.approx(46.70e9 * 0.994 * 4.5 / 8, rel=2e-3)
    assert as_it_is.verdict != "fits"


@pytest.mark.slow
def test_a_llama_of_70b_fits_two_cards_of_24_gb_with_its_base_on_the_host() -> None:
    both = planned(2, "rtx4090", "parallel.strategy=fsdp", "parallel.offload_param=cpu")
    assert both.verdict == "fits" and 9 < both.needed / GIB < 10.5
    bytes_here = PACKED_70B * 4.5 / 8 / 2
    assert 1 < both.categories["quantized"].host / bytes_here < 1.2, "torch pins powers of two"
    assert 23 < both.host_peak / GIB < 25


@pytest.mark.slow
def test_a_misfit_is_offered_a_base_in_4_bits_that_fits() -> None:
    done = command("plan", "parallel.strategy=single", "--gpu-memory", "750MiB", "--json", code=4)
    said = json.loads(done.stdout)
    (change,) = (change for change in said["changes"] if change["settings"] == "model.quantize.bits=4")
    packed = 4 * (2 * 2048**2 + 2 * 2048 * 1024 + 3 * 2048 * 4096)
    assert change["verdict"] == "fits" and change["saving"] == pytest.approx(packed * (2 - 4.5 / 8), rel=0.2)
    assert "unpacks a layer" in change["cost"]


@pytest.mark.slow
def test_the_largest_batch_over_a_base_in_4_bits_is_larger() -> None:
    batches = []
    for more in ([], [Q4]):
        done = command("max-model", *more, "--find", "batch", "--gpu-memory", "950MiB")
        batches.append(int(done.stdout.partition("train.micro_batch_size=")[2].split()[0]))
    assert batches[1] > batches[0] > 0


@pytest.mark.slow
def test_a_search_over_a_base_in_4_bits_plans_every_engine(tmp_path: Path) -> None:
    done = command("plan", Q4, "--gpu", "l4", "--gpus", "2", "--auto", "--out", str(tmp_path), "--json")
    search = json.loads(done.stdout)
    strategies = {combination["engine"].split(",")[0] for combination in search["fitting"]}
    assert strategies == {"ddp", "fsdp", "zero1", "zero2", "zero3"} and not search["refused"]
    assert load_config(tmp_path / "config.yaml", []).config.model.quantize is not None
