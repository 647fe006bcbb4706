"""The sizes of models that benchmarks make, as their configs say them."""

from __future__ import annotations

from typing import Any


def llama(
    width: int, inner: int, depth: int, heads: int, kv_heads: int | None = None, vocab: int | None = None,
    positions: int | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Keys of a LlamaConfig, and of those that are like it; what is not named keeps its default.

    Args:
        more: other keys.
    """
    sizes = {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": positions,
    }  # fmt: skip
    return {**{key: value for key, value in sizes.items() if value is not None}, **more}


LLAMA_70B = llama(8192, 28672, depth=80, heads=64, kv_heads=8, vocab=128256, positions=8192)
