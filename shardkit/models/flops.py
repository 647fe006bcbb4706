"""Model FLOPs of a training token and peak FLOP/s of known GPUs, for model FLOPs utilisation (MFU).

MFU = tokens/s × FLOPs per token / peak FLOP/s (PaLM, Chowdhery et al. 2022, appendix B): what the model needs, not what
was executed, so that recomputed activations do not raise it.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..config.schema import ModelConfig

_COLUMNS = {"fp32": 0, "tf32": 1, "bf16": 2, "pure_bf16": 2, "fp16": 3}  # fp8: the table has no peak for it


def transformer_matmul_params(config: ModelConfig) -> int:
    """Weights that multiply every token: 12 d² per block (qkv 3, projection 1, MLP 8) and the head's vocab × d.

    The head counts also when tied to the token embedding. Embedding look-ups, norms and biases do not count.
    """
    return 12 * config.n_layers * config.d_model**2 + config.vocab_size * config.d_model


def transformer_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Training FLOPs per token: 6 N_matmul + 12 L d T (PaLM appendix B), forward 1/3 and backward 2/3, no recompute.

    12 L d T is attention's QKᵀ and its product with V over all T positions: the convention does not discount the causal
    mask.
    """
    return 6.0 * transformer_matmul_params(config) + 12.0 * config.n_layers * config.d_model * seq_len


# Every token multiplies every matrix of a block once, and every layer attends over the whole sequence.
_PLAIN = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "olmo2"})


def hf_flops_per_token(model: nn.Module, seq_len: int) -> float | None:
    """Training FLOPs per token of a transformers causal LM, the same formula: 6 N_matmul + 12 L (heads × head width) T.

    None for architectures it is not right for: experts (a token meets few of them), state spaces, sliding windows.
    """
    config: Any = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if config.model_type not in _PLAIN or layer_types != {"full_attention"} or (window and window < seq_len):
        return None
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(head.weight)}
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention: float = 12.0 * config.num_hidden_layers * config.num_attention_heads * width * seq_len
    return 6.0 * float(matrices + head.weight.numel()) + attention


# Dense peaks in TFLOP/s without sparsity, from NVIDIA's data sheets and architecture white papers: fp32 outside tensor
# cores, TF32, and bf16/fp16 with fp32 accumulation. None = the chip has no such unit. The first pattern found in the
# device name wins, so that variants stand before their family.
_PEAKS: tuple[tuple[str, float, float | None, float | None, float | None], ...] = (
    # pattern                     fp32   tf32    bf16    fp16
    (r"\bGB200\b", 80.0, 1250.0, 2500.0, 2500.0),
    (r"\bB200\b", 75.0, 1100.0, 2250.0, 2250.0),
    (r"\bGH200\b", 67.0, 494.7, 989.4, 989.4),
    (r"\bH200 NVL\b", 60.0, 417.5, 835.5, 835.5),
    (r"\bH200\b", 67.0, 494.7, 989.4, 989.4),
    (r"\bH100 NVL\b", 60.0, 417.5, 835.5, 835.5),
    (r"\bH100 PCIe\b", 51.2, 378.0, 756.0, 756.0),
    (r"\bH100( 80GB HBM3|[ -]SXM)", 66.9, 494.7, 989.4, 989.4),
    (r"\bA100\b", 19.5, 156.0, 312.0, 312.0),
    (r"\bA40\b", 37.4, 74.8, 149.7, 149.7),
    (r"\bA30\b", 10.3, 82.0, 165.0, 165.0),
    (r"\bA10G\b", 35.0, 35.0, 70.0, 70.0),
    (r"\bA10\b", 31.2, 62.5, 125.0, 125.0),
    (r"\bL40S\b", 91.6, 183.0, 362.0, 362.0),
    (r"\bL40\b", 90.5, 90.5, 181.0, 181.0),
    (r"\bL4\b", 30.3, 60.0, 121.0, 121.0),
    (r"\bRTX 6000 Ada\b", 91.1, 182.1, 364.2, 364.2),
    (r"\bRTX A6000\b", 38.7, 77.4, 154.8, 154.8),
    (r"\bRTX 4090(?! D| Laptop)\b", 82.6, 82.6, 165.2, 165.2),
    (r"\bRTX 3090(?! Ti)\b", 35.6, 35.6, 71.0, 71.0),
    (r"\bV100S-PCIE\b", 16.4, None, None, 130.0),
    (r"\bV100-SXM[23]\b", 15.7, None, None, 125.0),
    (r"\bV100-PCIE\b", 14.0, None, None, 112.0),
    (r"\bT4\b", 8.1, None, None, 65.0),
)


def gpu_peak_flops(device_name: str, mode: str) -> float | None:
    """Dense peak FLOP/s of a GPU by the name `torch.cuda.get_device_name` gives; None when it is not known.

    `mode` is the matmul type (`precision.mode`). A chip without such a unit (bf16 on V100) gives None too, and so
    does a MIG slice, which has only a part of the chip, and fp8.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    column = _COLUMNS.get(mode)
    if column is None:
        return None
    for pattern, *peaks in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            peak = peaks[column]
            return None if peak is None else peak * 1e12
    return None
