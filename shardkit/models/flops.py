"""Count the FLOPs of a training token, for model FLOPs utilisation (MFU).

MFU = tokens/s × FLOPs per token / peak FLOP/s (PaLM, Chowdhery et al. 2022, appendix B). It counts the FLOPs that the
model needs, not those that were executed, so recomputed activations do not raise it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..config.schema import ModelConfig


def transformer_flops_per_token(config: ModelConfig, seq_len: float) -> float:
    """Training FLOPs per token without recomputation: 6 N_matmul + 12 L d T (PaLM appendix B), one third in forward.

    12 L d T is attention's QKᵀ and its product with V over all T positions: the convention does not discount the causal
    mask. Embedding look-ups, norms and biases do not count.
    """
    # 12 d² per block (qkv 3, projection 1, MLP 8), and vocab × d in the head, even if it is tied to the embedding.
    matmul_params = 12 * config.n_layers * config.d_model**2 + config.vocab_size * config.d_model
    return 6.0 * matmul_params + 12.0 * config.n_layers * config.d_model * seq_len


# Architectures in which each token meets every matrix of a block once, and each layer attends to the whole sequence.
_PLAIN = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "olmo2"})


def hf_flops_per_token(model: nn.Module, seq_len: float, adapter: int | None = None) -> float | None:
    """Training FLOPs per token of a transformers causal LM: 6 N_matmul + 12 L (heads × head width) T.

    `adapter`: number of values of an adapter, if there is one. The frozen model then needs no gradients of its weights:
    4 N_matmul, and 6 for each of the adapter's values. Returns None if the formula does not fit: experts (a token meets
    few of them), state spaces, sliding windows.
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
    frozen_share = 6.0 if adapter is None else 4.0
    return frozen_share * float(matrices + head.weight.numel()) + 6.0 * (adapter or 0) + attention
