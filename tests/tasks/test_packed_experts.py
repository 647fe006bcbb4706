"""`model.quantize.experts`: 3-D parameters of experts, packed one by one and computed as the model computes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.checkpoint.formats.convert import convert
from shardkit.config.schema import AdapterConfig, QuantizeConfig
from shardkit.errors import ConfigError
from shardkit.models.quantized import WEIGHTS, BaseQuantizer, PackedWeight, pack_layers
from tests.ranks import run_ranks
from tests.tasks import quantized
from tests.tasks.quantized import PARTITIONED

MIXTRAL: dict[str, Any] = {key: size for key, size in quantized.MODEL.items() if key != "attention_bias"} | {
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
N_PACKED = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 4 * 3 * 64 * 128)


def small(model_type: str, **sizes: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **{**MIXTRAL, "vocab_size": 64, **sizes})
    return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def over_the_same_numbers(model: nn.Module, **settings: Any) -> tuple[BaseQuantizer, Any, Any]:
    """A copy whose weights are packed, and another one that has what they are when they are unpacked."""
    quantizer = BaseQuantizer(model, QuantizeConfig(experts=True, **settings))
    packed, unpacked = copy.deepcopy(model), copy.deepcopy(model)
    pack_layers(packed, quantizer)
    for name, weight in quantizer.weights.items():
        layer: Any = packed.get_submodule(name)
        content, scales = quantizer.pack(model.get_parameter(weight).flatten())
        for part, values in {"packed": content, **quantizer.state(scales)}.items():
            getattr(layer, part).copy_(values.view(getattr(layer, part).shape))
        state = [layer.absmax, layer.nested] if layer.doubled else [layer.absmax]
        target = unpacked.get_parameter(weight)
        if isinstance(layer, PackedWeight):
            for expert in range(layer.n_experts):
                target[expert] = layer.unpacked(expert, torch.float32, layer.packed, *state)
        else:
            target.copy_(layer.unpacked(torch.float32, layer.packed, *state))
    unpacked.set_experts_implementation("eager")
    return quantizer, packed, unpacked


def stepped(net: Any) -> float:
    """The loss of one batch, whose gradients the model then has."""
    tokens = torch.randint(64, (3, 7), generator=torch.Generator().manual_seed(5))
    net.zero_grad()
    loss = net(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("mixtral", {}), ("qwen3_moe", {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 3})],
)
@pytest.mark.parametrize("settings", [{}, {"double": True}, {"type": "fp4", "double": True, "block_size": 64}])
def test_packed_experts_compute_as_the_models_own_over_the_same_numbers(
    model_type: str, sizes: dict[str, Any], settings: dict[str, Any]
) -> None:
    quantizer, packed, unpacked = over_the_same_numbers(small(model_type, **sizes), **settings)
    assert quantizer.experts == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    (first, first_grad), (second, second_grad), (right, right_grad) = (
        (stepped(net), net.get_parameter("model.embed_tokens.weight").grad.clone())
        for net in (packed, packed, unpacked)
    )
    assert first == second and torch.equal(first_grad, second_grad)
    assert first == pytest.approx(right, rel=1e-6)
    torch.testing.assert_close(first_grad, right_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("names", [WEIGHTS, WEIGHTS[1:]])
def test_lora_of_experts_computes_as_pefts_over_the_same_numbers(names: tuple[str, ...]) -> None:
    import peft

    quantizer, packed, unpacked = over_the_same_numbers(small("mixtral"))
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=[], target_parameters=[f"experts.{name}" for name in names]
    )
    peft.inject_adapter_in_model(config, unpacked)
    pairs = []
    for prefix in quantizer.experts:
        for place, name in enumerate(names):
            ours: Any = packed.get_submodule(f"{prefix}.{name}")
            ours.adapt(AdapterConfig(type="lora", r=2, alpha=6))
            theirs: Any = unpacked.get_submodule(prefix + ".base_layer" * (len(names) - 1 - place))
            assert theirs.parameter_name == name
            a, b = theirs.lora_A["default"].weight, theirs.lora_B["default"].weight
            with torch.no_grad():
                ours.lora_A().copy_(a.view(ours.lora_A().shape))
                ours.lora_B().copy_(torch.randn(ours.lora_B().shape) / 8)
                b.copy_(ours.lora_B().permute(1, 2, 0).reshape(b.shape))
            pairs += [(ours.lora_A(), lambda grad=a: grad.grad), (ours.lora_B(), lambda grad=b: grad.grad)]
    losses = [stepped(net) for net in (packed, packed, unpacked)]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)
    for param, grad_of in pairs:
        right = grad_of()
        if param.shape[1] != 2:  # B: peft counts experts last
            right = right.view(*param.shape[1:], -1).permute(2, 0, 1)
        assert right.abs().max() > 0
        torch.testing.assert_close(param.grad, right.reshape(param.shape), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("model_type", "cause"),
    [("llama", "has no experts that are 3-D parameters"), ("gpt_oss", "stores its weights transposed and has biases")],
)
def test_models_whose_experts_cannot_be_packed_are_refused(model_type: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BaseQuantizer(small(model_type), QuantizeConfig(experts=True))
    assert cause in caught.value.cause and "remove experts" in (caught.value.fix or "")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    quantized.write_model(folder)
    small("mixtral", vocab_size=256).save_pretrained(folder / "mixtral")
    return folder


def experts(root: Path, **extra: Any) -> dict[str, Any]:
    return {
        "model.hf_config": f"{root}/mixtral", "model.init_from": f"{root}/mixtral",
        "model.quantize": {"bits": 4, "experts": True}, "adapter.targets": ["q_proj", "v_proj"], **extra,
    }  # fmt: skip


def test_a_run_packs_the_experts_of_a_folder(root: Path) -> None:
    (run,) = run_ranks(1, "tests.tasks.quantized:trained", root=str(root), strategy="single", **experts(root))
    assert run["state"]["quantized"] == N_PACKED // 2 + N_PACKED // 16
    assert run["digests"][0] == run["digests"][1]
    assert run["curve"][-1][0] < run["curve"][0][0]


@pytest.mark.slow
@pytest.mark.parametrize(("double", "targets"), [(False, ["q_proj", "v_proj"]), (True, "all-linear")])
def test_every_engine_equals_one_process_over_the_same_experts(root: Path, double: bool, targets: Any) -> None:
    keys = experts(root) | {
        "model.quantize": {"bits": 4, "experts": True, "double": double}, "adapter.targets": targets,
    }  # fmt: skip
    (alone,) = run_ranks(1, "tests.tasks.quantized:trained", root=str(root), strategy="single", **keys)
    cases = dict.fromkeys(("ddp", "fsdp", "zero1", "zero2", "zero3"), keys)
    cases["zero3 full"] = keys | PARTITIONED | {"activation.policy": "full"}
    cases["fsdp full"] = keys | {"activation.policy": "full"}
    cases["fsdp offload"] = keys | {"parallel.offload_param": "cpu"}
    drawn = keys | {"model.init_from": None}
    (drawn_alone,) = run_ranks(1, "tests.tasks.quantized:trained", root=str(root), strategy="single", **drawn)
    cases["fsdp drawn"] = drawn
    for rank in run_ranks(2, "tests.tasks.quantized:under", root=str(root), cases=cases):
        for name, run in rank.items():
            right = drawn_alone if name == "fsdp drawn" else alone
            assert run["digests"][0]["packed"] == right["digests"][0]["packed"], name
            for got, expected in zip(run["curve"], right["curve"], strict=True):
                assert got == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "targets"),
    [(1, ["q_proj", "v_proj"]), (1, "all-linear"), (1, ["gate_up_proj"]), (4, "all-linear"), (2, ["down_proj"])],
)
def test_a_run_over_packed_experts_is_exported_and_resumed(
    root: Path, tmp_path: Path, ranks: int, targets: Any
) -> None:
    """Several ranks: two of them share the experts."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens, run, keys = torch.arange(16).view(1, 16), tmp_path / "run", experts(root) | {"adapter.targets": targets}
    split = {"strategy": "fsdp", "parallel.ep": 2, "train.micro_batch_size": 8 // ranks} if ranks > 1 else {}
    want = run_ranks(
        ranks, "tests.tasks.quantized:logits", root=str(root), run=str(run), tokens=tokens, **keys, **split
    )[0]
    convert(run, "safetensors", tmp_path / "merged", merge=True)
    convert(run, "peft", tmp_path / "adapter")
    source = AutoModelForCausalLM.from_pretrained(root / "mixtral")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(root / "mixtral")
    with torch.no_grad():
        errors = {
            name: quantized.packing_error(param.data)
            for name, param in source.named_parameters()
            if name.endswith(("_proj.weight", *WEIGHTS))
        }
        for model in (merged, base):
            for name, error in errors.items():
                model.get_parameter(name).data += error
        for model in (merged, PeftModel.from_pretrained(base, tmp_path / "adapter")):
            assert (model(tokens).logits.view(-1, 256) - want).abs().max() < 1e-5
    cases = {"fsdp": keys, "ddp": keys | {"model.quantize": {"bits": 4}, "adapter.targets": ["q_proj", "v_proj"]}}
    cases = {name: {**keys, "train.max_steps": quantized.STEPS + 1} for name, keys in cases.items()}
    found = run_ranks(2, "tests.tasks.quantized:resumed", root=str(root), source=str(run), cases=cases)[0]
    assert len(found["fsdp"]) == 1
    assert "experts: true" in found["ddp"][1] or "adapter.targets" in found["ddp"][1]
