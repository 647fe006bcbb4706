"""Sizes of models by name: `model.preset`."""

from __future__ import annotations

from typing import Any

# d_model, n_layers, n_heads, vocab_size, max_seq_len: GPT-2 124M/355M (Radford et al. 2019, table 2) and
# GPT-3 1.3B/6.7B/13B (Brown et al. 2020, table 2.1); 1.3b here uses 32 heads of 64.
MODEL_PRESETS: dict[str, dict[str, int]] = {
    "debug": dict(d_model=128, n_layers=4, n_heads=4, vocab_size=256, max_seq_len=256),
    "124m": dict(d_model=768, n_layers=12, n_heads=12, vocab_size=50257, max_seq_len=1024),
    "355m": dict(d_model=1024, n_layers=24, n_heads=16, vocab_size=50257, max_seq_len=1024),
    "1.3b": dict(d_model=2048, n_layers=24, n_heads=32, vocab_size=50257, max_seq_len=1024),
    "7b": dict(d_model=4096, n_layers=32, n_heads=32, vocab_size=50257, max_seq_len=2048),
    "13b": dict(d_model=5120, n_layers=40, n_heads=40, vocab_size=50257, max_seq_len=2048),
}

_NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

# Keys of transformers' configs. GPT-2 as above; BERT base and large (Devlin et al. 2019, section 3); ViT-B/16 and L/16
# (Dosovitskiy et al. 2021, table 1); Swin2SR for x4 (Conde et al. 2022, section 4), as large as SwinIR (Liang et al.
# 2021). The debug ones take bytes as tokens, or pictures of 32 pixels, and have no dropout.
HF_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": dict(model_type="gpt2"),
    "gpt2-debug": dict(
        model_type="gpt2", n_layer=2, n_embd=64, n_head=4, n_positions=256, vocab_size=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama-debug": dict(
        model_type="llama", num_hidden_layers=2, hidden_size=64, intermediate_size=176, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, vocab_size=256,
    ),
    "bert-base": dict(model_type="bert"),
    "bert-large": dict(
        model_type="bert", num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    ),
    "bert-debug": dict(
        model_type="bert", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=256, vocab_size=257, **_NO_DROPOUT,
    ),
    "vit-b": dict(model_type="vit"),
    "vit-l": dict(
        model_type="vit", num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    ),
    "vit-debug": dict(
        model_type="vit", num_hidden_layers=2, hidden_size=48, num_attention_heads=4, intermediate_size=96,
        image_size=32, patch_size=8,
    ),
    "swin2sr": dict(
        model_type="swin2sr", embed_dim=180, depths=[6] * 6, num_heads=[6] * 6, window_size=8, upscale=4,
        upsampler="pixelshuffle",
    ),
    "swin2sr-debug": dict(
        model_type="swin2sr", embed_dim=24, depths=[2, 2], num_heads=[2, 2], window_size=4, upscale=4, mlp_ratio=1.0,
        upsampler="pixelshuffledirect", drop_path_rate=0.0,
    ),
}  # fmt: skip

TASKS = {
    "ForCausalLM": "hf_causal_lm",
    "LMHeadModel": "hf_causal_lm",
    "ForMaskedLM": "hf_masked_lm",
    "ForImageClassification": "image_classification",
    "ForImageSuperResolution": "super_resolution",
}
"""How a class in a model's `architectures` ends → the built-in task with that head."""
_TASKS = {
    "gpt2": "hf_causal_lm", "llama": "hf_causal_lm", "bert": "hf_masked_lm", "vit": "image_classification",
    "swin2sr": "super_resolution",
}  # fmt: skip


def task_of(preset: str) -> str:
    """The built-in task that a preset is made for."""
    return _TASKS[HF_PRESETS[preset]["model_type"]] if preset in HF_PRESETS else "causal_lm"
