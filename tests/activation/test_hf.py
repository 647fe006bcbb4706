"""transformers models: `full` is their own gradient checkpointing, and every other policy agrees with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardkit.activation import checkpoint_activations, offload_activations
from shardkit.config.schema import ActivationConfig
from shardkit.parallel.blocks import find_blocks

VOCAB, SEQ = 50, 12
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4}


def build(kind: str) -> nn.Module:
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_layer=4, n_embd=32, n_head=4, n_positions=SEQ)
    elif kind == "llama":
        config = transformers.LlamaConfig(**SIZES, intermediate_size=64, attention_dropout=0.1)
    else:
        config = transformers.BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=SEQ)
    torch.manual_seed(0)
    family: Any = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM"}[kind]
    model: nn.Module = getattr(transformers, family)(config)
    return model.train()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("policy", ["full", "every_k", "selective", "selective_op", "none"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_gradients_are_those_of_gradient_checkpointing_enable(kind: str, policy: str) -> None:
    theirs: Any = build(kind)
    theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    want = gradients(theirs)
    model: Any = build(kind)
    config = ActivationConfig(policy=policy, offload="cpu", offload_min_bytes=0)
    blocks = find_blocks(model)
    assert len(blocks) == 4
    checkpoint_activations(model, blocks, config)
    offload_activations(model, blocks, config, torch.device("cpu"))
    if policy == "none":
        model.config.use_cache = False  # keys and values that went through a cache have another layout, and round so
    assert not getattr(model.config, "use_cache", False), "a layer that runs twice would fill its cache twice"
    got = gradients(model)
    assert len(got) == len(want) > 30
    assert all(map(torch.equal, got, want))
