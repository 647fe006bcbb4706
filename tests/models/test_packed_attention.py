"""Packed documents give the losses and gradients of the documents one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkit.activation.checkpoint import checkpoint_activations
from shardkit.config.schema import ActivationConfig, RunConfig
from shardkit.data.windows import PackedDocuments, Packing, collate_packed, documents_of
from shardkit.errors import ConfigError
from shardkit.models import packed_attention as module
from shardkit.parallel.blocks import find_blocks
from shardkit.parallel.weights import Weights
from shardkit.tasks.load import load_task

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
MODELS: dict[str, dict[str, Any]] = {
    "reference": {"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 97, "max_seq_len": 40},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 40, **NO_DROPOUT},
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "mistral": {**GROUPED, "sliding_window": 6},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 6},  # caps its scores
    "gpt_oss": {
        **GROUPED,
        "head_dim": 8,
        "sliding_window": 6,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },  # sinks
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
}


class Random:
    """Some documents of a list of random ones, in memory; the first 2 tokens of each are a prompt."""

    def __init__(self, lengths: list[int], chosen: slice = slice(None)) -> None:
        self.lengths = np.array(lengths[chosen])
        draws = torch.Generator().manual_seed(3)
        self.tokens = [torch.randint(0, 97, (length,), generator=draws) for length in lengths][chosen]

    def piece(self, index: int, start: int, stop: int) -> tuple[Any, Any]:
        tokens = self.tokens[index].numpy()
        return tokens[start:stop], np.arange(len(tokens))[start:stop] >= 2


SEQ = 40
LENGTHS = [33, 4, 12, 9, 20, 7, 26, 3, 15]


def config(name: str, packing: str, **sections: Any) -> RunConfig:
    keys = MODELS[name]
    model = (
        keys
        if name == "reference"
        else {"hf": {"model_type": name, **keys}, "loss_chunk_size": 0 if name == "gemma2" else 7}
    )
    task = "causal_lm" if name == "reference" else "hf_causal_lm"
    return RunConfig.model_validate(
        {"task": {"name": task}, "model": model, "train": {"seq_len": 40}, "data": {"packing": packing}, **sections}
    )


def built(name: str, packing: str) -> tuple[Any, nn.Module]:
    task: Any = load_task(config(name, packing))
    weights = Weights(0, task.init_parameter)
    model = weights.build(task.build_model, None)
    weights.materialise(model, torch.device("cpu"))
    with torch.no_grad():  # weights of 0.02 hardly attend: make a leak between documents visible
        for param in model.parameters():
            param.mul_(4)
    return task, model


def batches(packing: str, documents: Random) -> list[dict[str, Any]]:
    if packing == "none":
        targets = [torch.where(torch.arange(1, len(tokens)) >= 2, tokens[1:], -100) for tokens in documents.tokens]
        pairs = zip(documents.tokens, targets, strict=True)
        return [{"tokens": tokens[None, :-1], "targets": wanted[None]} for tokens, wanted in pairs]
    kind: Packing = "packed" if packing == "packed" else "padding_free"
    data = PackedDocuments(documents, SEQ, kind, "the test")
    samples = [data[i] for i in range(len(data))]
    return [collate_packed(samples, SEQ if packing == "packed" else None)]


def trained(name: str, packing: str, policy: str = "none") -> tuple[float, dict[str, torch.Tensor]]:
    """The loss per target over all documents, and its gradients."""
    task, model = built(name, packing)
    chosen = ActivationConfig.model_validate({"policy": policy})
    checkpoint_activations(model, find_blocks(model, task.block_classes), chosen)
    parts = batches(packing, Random(LENGTHS))
    targets = sum(task.n_targets(part) for part in parts)
    loss = sum(task.loss(model, part) for part in parts) / targets
    loss.backward()
    return loss.item(), {key: param.grad for key, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_train_as_each_one_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES", 4)  # several blocks in a document
    want, gradients = trained(name, "none")
    for packing, policy in (("packed", "none"), ("padding_free", "none"), ("packed", "full")):
        loss, packed = trained(name, packing, policy)
        assert loss == pytest.approx(want, abs=1e-5), (packing, policy)
        assert packed.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(packed[key], gradient, rtol=1e-5, atol=1e-5, msg=f"{packing} {policy} {key}")


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"model_type": "mamba"}, "MambaForCausalLM keeps a state"),
        ({"model_type": "bloom"}, "BloomForCausalLM"),
    ],
)
def test_models_that_would_mix_documents_are_refused_by_name(keys: dict[str, Any], cause: str) -> None:
    hf = {**keys, "vocab_size": 97}

    def first_loss() -> None:
        task: Any = load_task(config("llama", "packed", model={"hf": hf, "loss_chunk_size": 0}))
        task.loss(task.build_model(), batches("packed", Random(LENGTHS))[0])

    with pytest.raises(ConfigError, match=cause) as caught:
        first_loss()
    assert "data.packing=none" in caught.value.fix


def test_a_layer_that_drops_the_documents_is_refused() -> None:
    task, model = built("llama", "packed")
    layer: Any = model.get_submodule("model.layers.1.self_attn")
    own = layer.forward
    layer.forward = lambda *args, documents, **kwargs: own(*args, **kwargs)
    with pytest.raises(ConfigError, match="2 of the 3 layers of LlamaForCausalLM"):
        task.loss(model, batches("packed", Random(LENGTHS))[0])


def test_a_document_longer_than_the_positions_is_refused() -> None:
    _, model = built("reference", "packed")
    batch = collate_packed(
        [{"tokens": torch.zeros(41, dtype=torch.long), "targets": torch.zeros(41, dtype=torch.long), "lengths": [41]}],
        None,
    )
    with pytest.raises(ConfigError, match=r"41 tokens, but model\.max_seq_len=40"):
        model(batch["tokens"], batch["targets"], **documents_of(batch))


def test_compiled_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.packing=packed with compile.enabled=true"):
        config("reference", "packed", compile={"enabled": True})
