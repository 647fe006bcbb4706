from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardkit.config.schema import ModelConfig
from shardkit.hardware.cards import gpu_peak_flops
from shardkit.models.transformer import Transformer, transformer_flops_per_token


def test_formula_by_hand() -> None:
    config = ModelConfig.model_validate({"d_model": 8, "n_layers": 3, "n_heads": 2, "vocab_size": 11})
    assert transformer_flops_per_token(config, 16) == 6 * (3 * 12 * 64 + 11 * 8) + 12 * 3 * 8 * 16


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
