"""The reference transformer, and the FLOPs of models and cards."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardkit.config.schema import ModelConfig
from shardkit.errors import ConfigError
from shardkit.hardware.cards import gpu_peak_flops
from shardkit.models.transformer import Transformer, init_parameter, transformer_flops_per_token

SMALL = {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 61, "max_seq_len": 24}


def make(**sizes: object) -> Transformer:
    model = Transformer(ModelConfig.model_validate({**SMALL, **sizes}))
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init_parameter(model.config, fqn, parameter.data, torch.Generator().manual_seed(i))
    return model


def tokens(batch: int = 2, seq: int = 24) -> torch.Tensor:
    return torch.randint(61, (batch, seq), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("tied", "billions"), [(False, 1.417), (True, 1.314)])
def test_parameter_count_of_1_3b(tied: bool, billions: float) -> None:
    config = ModelConfig.model_validate({"preset": "1.3b", "max_seq_len": 1024, "tie_weights": tied})
    with torch.device("meta"):
        model = Transformer(config)
    count = sum(p.numel() for p in model.parameters())
    d, n_layers, vocab = 2048, 24, 50257
    assert count == n_layers * (12 * d * d + 13 * d) + 2 * d + 1024 * d + vocab * d * (1 if tied else 2)
    assert round(count / 1e9, 3) == billions


def test_logits_shape_and_causality() -> None:
    model, x = make(), tokens()
    logits = model(x)
    assert logits.shape == (2, 24, 61)
    changed = x.clone()
    changed[:, 13] = (changed[:, 13] + 1) % 61
    other = model(changed)
    torch.testing.assert_close(other[:, :13], logits[:, :13])
    assert not torch.allclose(other[:, 13:], logits[:, 13:])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [0, 5, 1024])
def test_loss_is_the_sum_of_cross_entropies_in_value_and_gradient(tied: bool, chunk: int) -> None:
    model, x = make(tie_weights=tied, loss_chunk_size=chunk), tokens()
    targets = x.roll(-1, dims=1)
    targets[:, -3:] = -100
    loss = model(x, targets)
    loss.backward()
    grads = {fqn: p.grad.clone() for fqn, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = F.cross_entropy(model(x).flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() == dict(model.named_parameters()).keys()
    for fqn, parameter in model.named_parameters():
        torch.testing.assert_close(grads[fqn], parameter.grad, rtol=1e-4, atol=1e-5, msg=fqn)


def test_initial_weights_follow_gpt2() -> None:
    model = make(d_model=256, n_layers=2, vocab_size=500)
    for fqn, parameter in model.named_parameters():
        if fqn.endswith(".bias"):
            assert not parameter.any(), fqn
        elif "norm" in fqn:
            assert (parameter == 1).all(), fqn
        else:
            std = 0.02 / math.sqrt(4) if fqn.endswith("proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), fqn
    assert model(tokens()).std() < 1


def test_too_long_a_sequence_is_refused_with_both_lengths() -> None:
    with pytest.raises(ConfigError, match=r"25 tokens.*max_seq_len=24"):
        make()(tokens(seq=25))


@pytest.mark.parametrize("tied", [False, True])
def test_formula_is_what_the_model_executes(tied: bool) -> None:
    config = ModelConfig.model_validate(
        {"d_model": 64, "n_layers": 2, "vocab_size": 100, "tie_weights": tied, "loss_chunk_size": 0}
    )
    with torch.device("meta"):
        model = Transformer(config)
        tokens = torch.zeros(4, 32, dtype=torch.long)
    # Attention is counted by its formula; the backward of the fused kernel recomputes, which model FLOPs leave out.
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(
        transformer_flops_per_token(config, 32), rel=0.01
    )


@pytest.mark.parametrize(
    ("device", "mode", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312), ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4), ("NVIDIA H100 PCIe", "bf16", 756), ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4), ("NVIDIA H200 NVL", "bf16", 835.5), ("NVIDIA GH200 480GB", "fp32", 67),
        ("NVIDIA B200", "bf16", 2250), ("NVIDIA GB200", "bf16", 2500), ("NVIDIA A10G", "fp16", 70),
        ("NVIDIA A10", "fp16", 125), ("NVIDIA L4", "fp16", 121), ("NVIDIA L40S", "fp32", 91.6),
        ("NVIDIA RTX A6000", "bf16", 154.8), ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "fp32", 35.6), ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112), ("Tesla T4", "fp32", 8.1),
    ],
)  # fmt: skip
def test_known_gpus(device: str, mode: str, teraflops: float) -> None:
    assert gpu_peak_flops(device, mode) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("NVIDIA GeForce GTX 1080", "fp32"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"), ("NVIDIA A1000", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"), ("Tesla T4", "tf32"), ("", "fp32"),
    ],
)  # fmt: skip
def test_nothing_is_invented(device: str, mode: str) -> None:
    assert gpu_peak_flops(device, mode) is None
