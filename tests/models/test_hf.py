"""Transformers models: their own initialisation parameter by parameter, and their loss in chunks."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardkit.config.schema import ModelConfig
from shardkit.errors import ConfigError
from shardkit.models.cross_entropy import attach_loss, check_loss_fits
from shardkit.models.hf import HFModel, hf_flops_per_token
from shardkit.models.transformer import transformer_flops_per_token
from shardkit.parallel.weights import Weights

DEBUG = [
    ("hf_causal_lm", "gpt2-debug"), ("hf_causal_lm", "llama-debug"), ("hf_masked_lm", "bert-debug"),
    ("image_classification", "vit-debug"), ("super_resolution", "swin2sr-debug"),
]  # fmt: skip


def model(task: str = "hf_causal_lm", **keys: Any) -> HFModel:
    return HFModel(ModelConfig.model_validate(keys), task)


def real(hf: HFModel, chunk: int) -> torch.nn.Module:
    weights = Weights(0, hf.init_parameter)
    built = weights.build(lambda: attach_loss(hf.build(), chunk), None)
    weights.materialise(built, torch.device("cpu"))
    return built


@pytest.mark.parametrize(("task", "preset"), DEBUG)
def test_each_parameter_is_drawn_as_the_model_draws_it(task: str, preset: str) -> None:
    hf = model(task, preset=preset)
    torch.manual_seed(0)
    own = type(hf.reference)(hf.config)
    for fqn, param in own.named_parameters():
        drawn = [torch.empty(param.shape) for _ in range(2)]
        for full in drawn:
            hf.init_parameter(fqn, full, torch.Generator().manual_seed(7))
        assert torch.equal(*drawn), f"{fqn} is a function of the generator alone"
        # Constants exactly; random ones have the same mean and spread within 6 standard errors.
        if param.std(unbiased=False) == 0:
            assert torch.equal(drawn[0], param), fqn
        else:
            error = 6 / param.numel() ** 0.5
            assert drawn[0].std().item() == pytest.approx(param.std().item(), rel=error), fqn
            assert abs(drawn[0].mean() - param.mean()) < error * 2 * param.std(), fqn
    assert all(p.is_meta for p in hf.reference.parameters())


@pytest.mark.parametrize(("task", "preset"), DEBUG)
def test_built_models_have_the_buffers_of_the_models_own_code(task: str, preset: str) -> None:
    hf = model(task, preset=preset)
    own = dict(type(hf.reference)(hf.config).named_buffers())
    built = dict(real(hf, 8).named_buffers() if "lm" in task else hf.build().named_buffers())
    assert built.keys() == own.keys()
    assert all(torch.equal(built[name], own[name]) for name in own)


def test_a_cast_does_not_touch_rotary_frequencies() -> None:
    built = real(model(preset="llama-debug"), 0)
    frequencies = built.model.rotary_emb.inv_freq.clone()
    built.bfloat16()
    built(torch.zeros(1, 4, dtype=torch.long))
    assert built.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(built.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("preset", ["gpt2-debug", "llama-debug"])
def test_the_loss_in_chunks_is_the_models_own(preset: str) -> None:
    hf = model(preset=preset)
    tokens = torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[1, 5:] = -100  # a ragged row
    chunked, whole = real(hf, 7), real(hf, 0)
    torch.manual_seed(0)
    own = type(hf.reference)(hf.config)
    own.load_state_dict(whole.state_dict())
    want = F.cross_entropy(own(input_ids=tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    losses = chunked(tokens, targets), whole(tokens, targets)
    torch.testing.assert_close(losses[0], want)
    torch.testing.assert_close(losses[1], want)
    for loss in (*losses, want):
        loss.backward()
    for (name, a), (_, b), (_, c) in zip(*(m.named_parameters() for m in (chunked, whole, own)), strict=True):
        torch.testing.assert_close(a.grad, c.grad, msg=name)
        torch.testing.assert_close(b.grad, c.grad, msg=name)
    if preset == "gpt2-debug":
        assert chunked.lm_head.weight is chunked.transformer.wte.weight


@pytest.mark.parametrize("chunk", [0, 5])
def test_a_masked_loss_makes_logits_where_they_are_wanted_only(chunk: int) -> None:
    hf = model("hf_masked_lm", preset="bert-debug")
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([1, 4, 13, 20])
    built = real(hf, chunk)
    logits = built(tokens).flatten(0, 1)
    assert logits.shape == (24, 257)
    rows: list[int] = []
    built.cls.predictions.decoder.register_forward_hook(lambda m, i, o: rows.append(o.numel()))
    loss = built(tokens, tokens.flatten()[positions], positions)
    want = F.cross_entropy(logits[positions], tokens.flatten()[positions], reduction="sum")
    torch.testing.assert_close(loss, want)
    assert rows == [1], "the head gives the loss, never [batch, seq, vocab] logits"
    (bias,) = torch.autograd.grad(loss, built.cls.predictions.decoder.bias, retain_graph=True)
    torch.testing.assert_close(bias, torch.autograd.grad(want, built.cls.predictions.decoder.bias)[0])


@pytest.mark.parametrize("model_type", ["gemma2", "granite", "cohere"])
def test_models_that_change_their_logits_are_refused_chunks(model_type: str) -> None:
    hf = model(hf={"model_type": model_type, "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match="changes the logits after the output projection") as caught:
        check_loss_fits(hf.reference, "set model.loss_chunk_size=0")
    assert caught.value.fix == "set model.loss_chunk_size=0"
    for usual in ("gpt2", "llama", "qwen2", "qwen3", "mistral", "phi", "gpt_neox", "opt", "mixtral"):
        check_loss_fits(model(hf={"model_type": usual, "num_hidden_layers": 1}).reference, "")


def test_keys_win_over_the_file_and_the_file_over_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "dtype": "bfloat16"})
    )
    hf = model(hf_config=str(tmp_path), hf={"n_layer": 2})
    assert (hf.config.n_layer, hf.config.n_embd) == (2, 48)
    assert {p.dtype for p in hf.reference.parameters()} == {torch.float32}, "master weights, whatever the file says"
    assert model(preset="bert-debug", hf={"num_hidden_layers": 1}, task="hf_masked_lm").config.hidden_size == 64


@pytest.mark.parametrize(
    ("keys", "cause", "fix"),
    [
        ({}, "model.hf has no model_type", "model.preset"),
        ({"init_from": "nowhere"}, "model.init_from=nowhere does not exist", "folder"),
        ({"hf": {"model_type": "gpt-2"}}, "model.hf.model_type=gpt-2 is not a model", "gpt2"),
        ({"hf": {"model_type": "gpt2", "n_layers": 2}}, "unknown key model.hf.n_layers", "mean model.hf.n_layer?"),
        ({"hf": {"model_type": "vit"}}, "model_type=vit has no model for task.name=hf_causal_lm", "model_type"),
        ({"hf": {"model_type": "wilt", "auto_map": {"AutoConfig": "wilt.Config"}}}, "auto_map", "task of your own"),
        ({"hf": {"model_type": "llama", "num_hidden_layers": -1}}, "has num_hidden_layers=-1", "1 or more"),
        ({"hf_config": "/nowhere"}, "model.hf_config=/nowhere cannot be read", "nothing is downloaded"),
    ],
)
def test_what_is_wrong_with_a_config_is_one_line(keys: dict[str, Any], cause: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(**keys)
    assert cause in caught.value.cause
    assert fix in caught.value.fix
    assert "\n" not in caught.value.cause + caught.value.fix


def test_flops_are_those_of_the_reference_transformer_of_the_same_size() -> None:
    # Both count matrices only; GPT-2's own has no other shape.
    want = transformer_flops_per_token(ModelConfig(preset="124m"), 512)
    assert hf_flops_per_token(model(preset="gpt2").reference, 512) == want
    assert hf_flops_per_token(model(hf={"model_type": "mixtral", "num_hidden_layers": 1}).reference, 512) is None


def test_a_config_file_cannot_name_code_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers import modeling_utils

    setters = {
        name for name, value in inspect.getmembers(transformers.PreTrainedConfig)
        if isinstance(value, property) and value.fset is not None and "implementation" in name
    }  # fmt: skip
    assert setters == {"_attn_implementation", "_experts_implementation"}, "transformers has a new key like these"
    fetched: list[str] = []
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda name, *_, **__: fetched.append(name))
    for prefix in ("", "_"):
        for suffix in ("", "_internal"):
            keys = {f"{prefix}{part}_implementation{suffix}": "stranger/kernel" for part in ("attn", "experts")}
            keys["checkpoint_path"] = "stranger/kernel"  # timm reads a pickle there
            strange = {"model_type": "llama", "task_specific_params": keys, "model_args": keys, **keys}
            (tmp_path / "config.json").write_text(json.dumps(strange))
            small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            hf = model(hf_config=str(tmp_path), hf=small)
            config = hf.config
            assert config._attn_implementation != "stranger/kernel"
            assert "stranger/kernel" not in json.dumps(config.to_dict(), default=str)
            with pytest.raises(ConfigError, match="names code or a file to load"):
                model(hf_config=str(tmp_path), hf={**small, "task_specific_params": keys})
    assert not fetched
