"""MLPs in parts of the positions (model.mlp_chunks) train as whole ones, with less memory, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.activation.tiles import tile_mlps
from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.memory import TensorTracker
from shardkit.models.hf import HFModel
from shardkit.parallel.blocks import find_blocks
from tests.activation.test_activation import POLICIES, gradients, reference, technique
from tests.parallel.context_runs import MODELS, OPTIMIZERS
from tests.parallel.test_context import compare, settings
from tests.ranks import run_ranks
from tests.strategies.cases import PARTITION_ALL

ADAPTED = {"adapter.type": "lora", "adapter.r": 4, "adapter.alpha": 16, "optim.lr": 0.2}
IN_4_BITS = {"model.quantize": {"bits": 4}, "model.hf": {**MODELS["llama"]["model.hf"], "hidden_size": 64}}
IN_4_BITS["model.hf"]["intermediate_size"] = 128


def tiled(n_tiles: int, **policy: Any) -> nn.Module:
    model = reference()
    tile_mlps(model, find_blocks(model), n_tiles)
    return technique(model, **policy)


@pytest.mark.parametrize("n_tiles", [2, 7, 60])  # of 48 positions: some tiles are empty
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("policy", ["none", "full", "every_k", "selective"])
def test_gradients_are_those_of_whole_mlps(policy: str, offload: str, n_tiles: int) -> None:
    policies = POLICIES.get(policy, {}) | {"offload": offload, "offload_min_bytes": 0}
    loss, found = gradients(tiled(n_tiles, **policies))
    want_loss, want = gradients(reference())
    assert abs(float(loss - want_loss)) <= 1e-5 and found.keys() == want.keys()
    for name, gradient in want.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-6 * float(gradient.abs().max()), name


@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_hidden_activations_of_one_tile_exist_at_once(policy: str) -> None:
    def peak(model: nn.Module) -> int:
        tokens = torch.zeros(8, 32, dtype=torch.long)
        with TensorTracker() as tracker:
            tracker.see([model, tokens])
            model(tokens, tokens).backward()
            return tracker.peak("cpu") - tracker.current("cpu")

    hidden = 8 * 32 * 4 * 32 * 4
    saved = peak(technique(reference(), policy=policy)) - peak(tiled(8, policy=policy))
    layers = 1 if policy == "full" else 5
    assert saved >= 1.5 * layers * hidden, saved / hidden


@pytest.mark.dist
@pytest.mark.deepspeed
def test_two_ranks_train_as_one_process_with_whole_mlps() -> None:
    case = settings("llama", "padding_free", "sgd")  # a micro-batch has another number of positions on each rank
    compare(2, 1, ["ddp", "fsdp", "zero3"], case, **{"model.mlp_chunks": 3})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_engine_trains_as_one_process_with_whole_mlps(optimizer: str) -> None:
    case, chunks = settings("reference", "packed", optimizer), {"model.mlp_chunks": 5}
    if optimizer == "adamw":  # rounding of weights whose gradients are near zero grows with the step
        case["optim.lr"] = 2e-3
    compare(1, 1, ["single"], case, **chunks)
    compare(2, 1, ["ddp", "zero1", "zero2"], case, **chunks)
    compare(2, 1, ["zero2"], case, **chunks, **{"parallel.offload_optimizer": "cpu"})
    compare(2, 2, ["fsdp", "zero3"], case, **chunks, **{"parallel.offload_param": "cpu", "activation.offload": "cpu"})
    compare(4, 2, ["hsdp", "zero3"], case, **chunks, **{"activation.policy": "full"})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("tied", "gpt-oss with sinks")])
def test_every_model_trains_as_one_process_with_whole_mlps(model: str) -> None:
    compare(2, 2, ["fsdp", "zero3"], settings(model, "padding_free", "adamw"), **{"model.mlp_chunks": 3})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("base", ["16 bits", "4 bits"])
def test_adapters_train_as_one_process_with_whole_mlps(base: str) -> None:
    case = {**settings("llama", "packed", "sgd"), **(IN_4_BITS if base == "4 bits" else {}), **ADAPTED}
    compare(2, 1, ["ddp", "fsdp", "zero3"], case, **{"model.mlp_chunks": 3, "activation.policy": "full"})


@pytest.mark.dist
@pytest.mark.deepspeed
def test_weights_are_gathered_once_for_all_tiles() -> None:
    cases = {
        f"{engine} {n_tiles}": {
            "parallel.strategy": engine, "model.mlp_chunks": n_tiles, "activation.policy": "full",
            "parallel.ds_config": PARTITION_ALL if engine == "zero3" else {},
        }
        for engine in ("fsdp", "zero3") for n_tiles in (1, 2, 6)
    }  # fmt: skip
    for gathers in run_ranks(2, "tests.activation.tiled_runs:gathers", cases=cases):
        for engine in ("fsdp", "zero3"):
            assert gathers[f"{engine} 6"] == gathers[f"{engine} 2"] <= gathers[f"{engine} 1"], gathers


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))


@pytest.mark.parametrize(
    ("model_type", "cause"),
    [
        ("gpt_oss", "model.layers.0.mlp (GptOssMLP) holds experts"),
        ("mixtral", "model.layers.0.mlp (MixtralSparseMoeBlock) holds experts"),
        ("bert", "(BertLayer) has no module `mlp` of transformers"),
        ("bloom", "(BloomMLP) takes hidden_states, residual instead of one tensor"),
        ("jetmoe", "(JetMoeMoE) holds weights of JetMoeParallelExperts, which is no linear layer"),
        ("own", "blocks.0 (Sequential) has no module `mlp` of transformers"),
    ],
)  # fmt: skip
def test_a_model_without_plain_mlps_is_refused(model_type: str, cause: str) -> None:
    if model_type == "own":
        model, classes = Mixer(), ()
    else:
        config = load_config(None, {"task.name": "hf_causal_lm", "model.hf": {"model_type": model_type}}).config.model
        source = HFModel(config, "hf_masked_lm" if model_type == "bert" else "hf_causal_lm")
        model, classes = source.reference, source.block_classes
    with pytest.raises(ConfigError) as caught:
        tile_mlps(model, find_blocks(model, classes), 4)
    assert caught.value.cause.startswith("model.mlp_chunks=4: ") and cause in caught.value.cause, caught.value
    assert caught.value.fix == "remove model.mlp_chunks"


@pytest.mark.parametrize(
    ("key", "value"),
    [("compile.enabled", True), ("activation.policy", "selective_op"), ("precision.mode", "fp8")],
)
def test_settings_beside_which_parts_make_no_sense_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"model.mlp_chunks=2 with {key}="):
        load_config(None, {"model.mlp_chunks": 2, key: value})
