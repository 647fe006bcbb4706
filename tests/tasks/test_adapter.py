"""LoRA: the losses of peft under every engine; checkpoints of the adapter alone; exports that peft loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.formats.convert import convert
from shardkit.config.load import load_config
from shardkit.errors import CheckpointError, ConfigError, ShardkitError
from shardkit.tasks.load import load_task
from tests.commands import environment
from tests.ranks import run_ranks
from tests.tasks import adapters

Curve = list[tuple[float, float]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    adapters.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Curve]:
    """By peft and torch, without shardkit."""
    return {model: adapters.peft_alone(model, str(root)) for model in adapters.MODELS}


def compare(found: dict[tuple[str, str], Curve], alone: dict[str, Curve]) -> None:
    """Losses of about 5.5 within 1e-6, two units in the last place of an fp32 number; norms within 1e-5 of theirs."""
    for (model, strategy), curve in found.items():
        for (loss, norm), (want_loss, want_norm) in zip(curve, alone[model], strict=True):
            assert abs(loss - want_loss) <= 1e-6, f"{model} {strategy}: {curve} instead of {alone[model]}"
            assert abs(norm - want_norm) <= 1e-5 * want_norm, f"{model} {strategy}: {curve} instead of {alone[model]}"


@pytest.mark.slow
def test_every_model_under_every_engine_has_the_losses_of_peft_alone(root: Path, alone: dict[str, Curve]) -> None:
    """Separate, packed (Phi3) and transposed (GPT-2) projections, tied embeddings."""
    for curve in alone.values():
        assert curve[0][0] - curve[-1][0] > 0.1, "the loss must fall, or parity says nothing"
    for world, engines in ((1, ["single"]), (2, ["ddp", "fsdp", "zero1", "zero2", "zero3"]), (4, ["hsdp"])):
        cases = [(model, name) for model in adapters.MODELS for name in engines]
        found, *others = run_ranks(world, "tests.tasks.adapters:curves", cases=cases, root=str(root))
        assert others == [found] * (world - 1)
        compare(found, alone)


@pytest.mark.slow
def test_under_bf16_the_base_takes_two_bytes_a_value_and_nothing_else(root: Path) -> None:
    strategies = ["ddp", "fsdp", "zero2", "zero3"]
    found, _ = run_ranks(2, "tests.tasks.adapters:in_bf16", strategies=strategies, root=str(root))
    task: Any = load_task(load_config(None, adapters.settings("llama", str(root))).config)
    base, adapter = sum(p.numel() for p in task.hf.reference.parameters()), task.adapter.trained
    steps = 4 * 2 * len(task.adapter.targets)  # AdamW's count of steps, for each tensor
    masters = {"master_params": 2 * adapter, "optimizer": 4 * adapter + 4}
    states = {name: state for name, (_, state) in found.items()}
    assert all(state.pop("buffers") == 32 for state in states.values())  # rotary frequencies
    whole = states["zero2"].pop("grads") - adapter  # DeepSpeed keeps a gradient whole that the partition's edge cuts
    assert 0 <= whole <= 2 * 4 * 64
    assert states == {
        "ddp": {"params": 2 * base + 4 * adapter, "grads": 4 * adapter, "optimizer": 8 * adapter + steps},
        "fsdp": {"params": base + 2 * adapter, "grads": 2 * adapter, "optimizer": 4 * adapter + steps},
        "zero2": {"params": 2 * base + 2 * adapter, **masters},
        "zero3": {"params": base + adapter, "grads": adapter, **masters},
    }
    for curve, _ in found.values():
        for (loss, _), (want, _) in zip(curve, found["ddp"][0], strict=True):
            assert abs(loss - want) <= 1e-3


@pytest.mark.slow
def test_zero3_keeps_base_and_adapter_on_the_host(root: Path, alone: dict[str, Curve]) -> None:
    """The losses stay those of peft alone, and the frozen base has neither gradients nor optimizer state."""
    curve, state = run_ranks(2, "tests.tasks.adapters:offloaded", root=str(root))[0]
    compare({("llama", "zero3 offloaded"): curve}, alone)
    task: Any = load_task(load_config(None, adapters.settings("llama", str(root))).config)
    base, adapter = sum(p.numel() for p in task.hf.reference.parameters()), task.adapter.trained
    state.pop("buffers")
    assert state == {  # DeepSpeed keeps gradients twice: as they arrive, and beside the masters on the host
        "params": 2 * (base + adapter), "grads": 4 * adapter, "master_params": 2 * adapter, "optimizer": 4 * adapter,
    }  # fmt: skip


@pytest.mark.slow
def test_rslora_is_pefts(root: Path, alone: dict[str, Curve]) -> None:
    want = adapters.peft_alone("llama", str(root), use_rslora=True)
    assert want[0] != alone["llama"][0] or want[1:] != alone["llama"][1:]
    rslora = {"adapter.use_rslora": True}
    cases = [("llama", "ddp"), ("llama", "fsdp")]
    found = run_ranks(2, "tests.tasks.adapters:curves", cases=cases, root=str(root), **rslora)[0]
    compare(found, {"llama": want})


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [["zero3"], ["ddp", "fsdp", "zero2"]])
def test_policies_give_the_same_gradients(strategies: list[str], root: Path, alone: dict[str, Curve]) -> None:
    found = run_ranks(2, "tests.tasks.adapters:under_policies", strategies=strategies, root=str(root))[0]
    assert len(found) == len(strategies) * len(adapters.POLICIES)
    compare({("llama", f"{name} {policy}"): curve for (name, policy), curve in found.items()}, alone)


@pytest.mark.parametrize(
    ("targets", "cause", "fix"),
    [
        (["q_prj"], "q_prj matches no layer", "did you mean q_proj"),
        (["w1"], "w1 matches no layer", "name some of q_proj, k_proj"),
        ("q_proj", "q_proj matches no layer", "adapter.targets=[q_proj]"),
        (["lm_head"], "the output head lm_head", "leave it out"),
        (["embed_tokens"], "Embedding", "q_proj"),
        ("((", "not a regular expression", "list of names"),
    ],
)
def test_targets_that_cannot_be_adapted_are_named(targets: Any, cause: str, fix: str, root: Path) -> None:
    config = load_config(None, {**adapters.settings("llama", str(root)), "adapter.targets": targets}).config
    with pytest.raises(ConfigError, match=cause) as found:
        load_task(config)
    assert fix in found.value.fix


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("adapter.quantization", "nf4", "is written model.quantize here"),
        ("adapter.type", "qlora", "is written adapter.type=lora with model.quantize here"),
        ("adapter.use_dora", True, "DoRA"),
        ("adapter.modules_to_save", ["lm_head"], "whole modules"),
        ("adapter.lora_alpha", 3, "unknown key adapter.lora_alpha"),
        ("train.ema_decay", 0.9, "averaged"),
        ("precision.mode", "fp8", "torchao"),
        ("task.name", "causal_lm", "adapters"),
    ],
)
def test_settings_that_adapters_do_not_have_are_refused_by_name(key: str, value: Any, cause: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=cause) as found:
        load_config(None, {**adapters.settings("llama", str(root)), key: value})
    assert found.value.fix


MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 224,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "num_local_experts": 8,
}  # fmt: skip


def test_experts_that_all_linear_would_leave_out_are_refused_with_their_share(tmp_path: Path) -> None:
    """transformers holds a Mixtral's experts as 3-D parameters; attention alone can be adapted by name."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    keys = {"task.name": "hf_causal_lm", "model.hf_config": str(tmp_path), "adapter.type": "lora"}
    with pytest.raises(ConfigError) as caught:
        load_task(load_config(None, keys).config)
    experts = 2 * 8 * 3 * 64 * 224
    model: Any = load_task(load_config(None, {**keys, "adapter.type": "none"}).config)
    every = sum(param.numel() for param in model.hf.reference.parameters())
    assert f"{experts / every:.1%} of the parameters" in caught.value.cause
    assert "gate_up_proj, down_proj" in caught.value.cause
    (targets,) = re.findall(r"adapter.targets=\[(.*)\]", caught.value.fix)
    assert targets.split(", ") == ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted: Any = load_task(load_config(None, {**keys, "adapter.targets": targets.split(", ")}).config)
    assert len(adapted.hf.targets) == 2 * 4


@pytest.mark.slow
def test_a_resumed_adapter_goes_on_under_another_engine(root: Path) -> None:
    """The checkpoint holds no weight of the base; another base, another scale and a run without adapter are refused."""
    moved = run_ranks(2, "tests.tasks.adapters:stopped", root=str(root), strategy="fsdp")[0]
    saved = root / "stopped" / "checkpoints" / "step_00000002"
    manifest = json.loads((saved / "manifest.json").read_text())["manifest"]
    names = [name for name in manifest["tensors"] if not name.startswith("rng.")]
    assert names and all(".lora_" in name for name in names)
    assert manifest["run"]["extra"]["adapter"]["base"]["source"] == str(root / "llama")
    body = "tests.tasks.adapters:resumed"
    rest = run_ranks(2, body, root=str(root), strategies=["zero3", "ddp"], source=str(saved))[0]
    alone = run_ranks(1, body, root=str(root), strategies=["single"], source=str(saved), others=True)[0]
    for strategy in ("zero3", "ddp", "single"):
        found = (alone if strategy == "single" else rest)[strategy]
        assert [step for step, _ in found] == [3, 4]
        for (_, loss), (_, want) in zip(found, moved[2:], strict=True):
            assert abs(loss - want) <= 1e-6, (strategy, found, moved)
    assert "not the one that the saved adapter was trained on" in alone["base"][0]
    assert str(root / "llama") in alone["base"][1]
    assert "adapter.alpha=5" in alone["alpha"][0]
    assert "adapter.targets=[q_proj]" in alone["targets"][0]
    assert "holds an adapter" in alone["none"][0]
    assert "float32" in alone["bf16"][0]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["parallel.tp", "parallel.ep"])
def test_an_adapter_over_split_layers_is_saved_whole_and_goes_on_elsewhere(
    axis: str, root: Path, tmp_path: Path
) -> None:
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    base, keys = root / "llama", dict[str, Any]()
    if axis == "parallel.ep":
        base = tmp_path / "mixtral"
        config = AutoConfig.for_model(**MIXTRAL)
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
        keys = {"model.hf_config": str(base), "model.init_from": str(base), "adapter.targets": ["q_proj", "o_proj"]}
    run, split = "tests.tasks.adapters:stopped", {axis: 2, "run.dir": str(tmp_path / "split")}
    size = {"train.micro_batch_size": 4} if axis == "parallel.tp" else {}  # both ranks have the same samples
    moved = run_ranks(2, run, root=str(root), strategy="fsdp", **keys, **split, **size)[0]
    want = run_ranks(1, run, root=str(root), strategy="single", **keys, **{"run.dir": str(tmp_path / "alone")})[0]
    saved = tmp_path / "split" / "checkpoints" / "step_00000002"
    body = "tests.tasks.adapters:resumed"
    rest = run_ranks(2, body, root=str(root), strategies=["ddp"], source=str(saved), **keys)[0]["ddp"]
    for found, wanted in ((moved, want), (rest, want[2:])):
        assert found == [(step, pytest.approx(loss, abs=1e-5)) for step, loss in wanted]
    logits = []
    for name in ("split", "alone"):
        convert(tmp_path / name / "checkpoints" / "step_00000004", "peft", tmp_path / f"{name}-peft")
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / f"{name}-peft")
        with torch.no_grad():
            logits.append(model(adapters.some_tokens()).logits)
    assert (logits[0] - logits[1]).abs().max() <= 1e-5


@pytest.mark.slow
def test_an_adapter_of_version_02_goes_on_and_is_merged(root: Path, tmp_path: Path) -> None:
    """Its base is identified by checksums that were taken otherwise; another base is refused as ever."""
    first = run_ranks(2, "tests.tasks.adapters:stopped_by_version_02", root=str(root), strategy="fsdp")[0]
    saved = root / "stopped" / "checkpoints" / "step_00000002"
    extra = json.loads((saved / "manifest.json").read_text())["manifest"]["run"]["extra"]
    assert extra["adapter"]["base"]["checksum"] == 1
    body = "tests.tasks.adapters:resumed"
    rest = run_ranks(2, body, root=str(root), strategies=["fsdp"], source=str(saved))[0]["fsdp"]
    alone = run_ranks(1, body, root=str(root), strategies=["single"], source=str(saved), others=True)[0]
    for curve in (rest, alone["single"]):
        assert curve == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in first[2:]]
    assert "not the one that the saved adapter was trained on" in alone["base"][0]
    convert(saved, "safetensors", tmp_path / "merged", merge=True)
    with pytest.raises(CheckpointError, match="is not the model that the adapter"):
        convert(saved, "safetensors", tmp_path / "wrong", merge=True, base=root / "other")


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_exports_give_the_logits_of_the_run(model: str, root: Path, tmp_path: Path) -> None:
    """As a folder of peft, and merged, in one file and in several."""
    import peft
    from transformers import AutoModelForCausalLM

    run = root / f"exported-{model}"
    want = run_ranks(1, "tests.tasks.adapters:trained_logits", root=str(root), model=model, run=str(run))[0]
    tokens = adapters.some_tokens()
    convert(run, "peft", tmp_path / "peft")
    base = AutoModelForCausalLM.from_pretrained(root / model)
    with torch.no_grad():
        plain = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")(tokens).logits
        assert (plain - want).abs().max() > 1e-2
        assert torch.equal(adapted, want)
        for size in ("5GB", "20KB"):
            convert(run, "safetensors", tmp_path / size, merge=True, max_shard_size=size)
            merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / size, output_loading_info=True)
            assert not any(info.values()), info
            assert (merged(tokens).logits - want).abs().max() < 1e-5
    if model == "llama":  # as a user does, in an interpreter of its own: libraries' warnings are not shown
        command = [sys.executable, "-m", "shardkit.cli", "convert", str(run), "--to", "peft", "--out"]
        done = subprocess.run([*command, str(tmp_path / "quiet")], env=environment(), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(ShardkitError, match="holds an adapter") as found:
        convert(run, "safetensors", tmp_path / "alone")
    assert "--merge" in (found.value.fix or "")
    other = "gpt2" if model == "llama" else "llama"
    with pytest.raises(ShardkitError, match=r"has no|not the model"):
        convert(run, "safetensors", tmp_path / "wrong", merge=True, base=root / other)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.slow
def test_conversations_are_packed_learned_and_exported_with_their_tokenizer(root: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapters.write_chat(root)
    found = run_ranks(2, "tests.tasks.adapters:chatting", strategies=["fsdp", "zero3"], root=str(root))[0]
    assert found["fsdp"][-1] < found["fsdp"][0] - 0.05
    assert found["zero3"] == pytest.approx(found["fsdp"], abs=1e-6)
    convert(root / "chat-fsdp", "safetensors", tmp_path / "merged", merge=True, dtype="bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ask 3"}], return_tensors="pt", return_dict=False)
    assert model.dtype == torch.bfloat16 and model(ids).logits.isfinite().all()
    sample = json.loads((root / "chat-fsdp" / "samples.jsonl").read_text().splitlines()[-1])
    full = tmp_path / "fp32"
    convert(root / "chat-fsdp", "safetensors", full, merge=True)
    ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
    written = AutoModelForCausalLM.from_pretrained(full).generate(ids, do_sample=False, max_new_tokens=4)
    assert sample["text"] == tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
