"""Causal attention inside each document of a packed batch, without a mask of all positions by all positions.

The reference runs `scaled_dot_product_attention` once per document, on every device and for every type. On GPUs half
precision takes torch's variable-length flash attention, one kernel for all documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ConfigError
from ..parallel.compat import declares_no_masks, flash_by_documents

ATTENTION = "shardkit_documents"
"""The name under which transformers knows `attend`; without an entry for it in transformers' table of masks, models
make no mask."""
QUERIES = 256
"""Queries that a sliding window handles at a time, so that its mask is small."""
Places = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]
"""A batch's documents on their way to the model: positions [rows, T], and `Documents`' bounds and lengths."""
_NO_PACKING = "set data.packing=none"


class Documents:
    """The documents of a batch of [rows, T] tokens; passed to every layer as one object that no engine looks into.

    Attributes:
        lengths: tokens of each, in the order of the flattened rows, all of which they cover; on the host.
        bounds: int32 [n + 1], their first places and the end; on the tokens' device.
        seen: the attention modules that have used it.
    """

    def __init__(self, bounds: torch.Tensor, lengths: Sequence[int]) -> None:
        self.bounds, self.lengths, self.longest = bounds, lengths, max(lengths)
        self.seen: set[int] = set()

    @classmethod
    def whole_rows(cls, tokens: torch.Tensor) -> Documents:
        """Every row of [rows, T, …] is one document."""
        rows, length = tokens.shape[:2]
        bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=tokens.device)
        return cls(bounds, [length] * rows)


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of each document to itself.

    Args:
        query: [rows, T, heads, width]; key and value may have fewer heads, each shared by a group of the query's.
        scale: of the scores; None = 1 / √width.
        window: a token attends to this many tokens at most, itself included.

    Returns:
        [rows, T, heads, width of a value].
    """
    if torch.is_autocast_enabled(query.device.type):  # some models normalise queries and keys in fp32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows = query.shape[:2]
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    if window is not None and window >= documents.longest:
        window = None
    if _flash_fits(query, value):
        out = flash_by_documents(query, key, value, documents.bounds, documents.longest, dropout, scale, window)
    else:
        queries, keys, values = (torch.split(tensor, list(documents.lengths)) for tensor in (query, key, value))
        parts = zip(queries, keys, values, strict=True)
        out = torch.cat([_attend_to_itself(q, k, v, dropout, scale, window) for q, k, v in parts])
    return out.view(*rows, *out.shape[1:])


def _flash_fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and width == value.shape[-1]
        and width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_to_itself(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """One document, [L, heads, width]."""
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    length, shared = query.shape[2], query.shape[1] != key.shape[1]
    if shared and query.is_cuda:  # in fp32 no fused kernel there knows shared heads
        groups, shared = query.shape[1] // key.shape[1], False
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if window is None or window >= length:
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=shared
        )
    else:
        parts = []
        for start in range(0, length, QUERIES):
            stop = min(start + QUERIES, length)
            first = max(0, start - window + 1)
            ago = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(
                first, stop, device=query.device
            )
            parts.append(
                F.scaled_dot_product_attention(
                    query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop],
                    attn_mask=(ago >= 0) & (ago < window), dropout_p=dropout, scale=scale, enable_gqa=shared,
                )
            )  # fmt: skip
        out = torch.cat(parts, 2)
    return out.squeeze(0).transpose(0, 1)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' models call it: [rows, heads, T, width] to [rows, T, heads, width].

    Without `documents`, each row is one.

    Raises:
        ConfigError: the layer asks for what this attention does not compute.
    """
    found = next((name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None), None)
    if attention_mask is not None:
        found = "a mask of its own"
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        found = "attention that is not causal"
    if found is not None:
        raise ConfigError(f"data.packing: {type(module).__name__} asks for {found}, which is not packed", _NO_PACKING)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if documents is None:
        documents = Documents.whole_rows(query)
    documents.seen.add(id(module))
    return document_attention(query, key, value, documents, dropout, scaling, sliding_window), None


def register() -> str:
    """Let transformers' models call `attend`; returns its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def refuse_what_crosses_documents(model: nn.Module) -> None:
    """Refuse transformers models with other ways from one document to the next than `attend`.

    Raises:
        ConfigError: the model keeps a state along the sequence, needs masks, or takes no positions.
    """
    config: Any = model.config
    found = None
    if not declares_no_masks(model):
        found = "keeps a state along the sequence, or needs a mask of all positions"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        found = "takes no position_ids: its positions would not restart"
    elif getattr(config.get_text_config(), "attention_chunk_size", None):
        found = "attends in chunks (attention_chunk_size)"
    elif any(isinstance(module, (nn.Conv1d, nn.RNNBase)) for module in model.modules()):
        found = "mixes neighbouring tokens outside attention"
    if found is not None:
        raise ConfigError(f"data.packing: {type(model).__name__} {found}", _NO_PACKING)


def check_seen(documents: Documents, model: nn.Module) -> None:
    """After a forward: refuse a model whose layers did not all use the documents.

    Raises:
        ConfigError: attention of a layer did not come to `attend`, or came without the documents.
    """
    config: Any = model.config
    layers = config.get_text_config().num_hidden_layers
    if len(documents.seen) != layers:
        raise ConfigError(
            f"data.packing: {len(documents.seen)} of the {layers} layers of {type(model).__name__} keep to the bounds "
            "of documents",
            _NO_PACKING,
        )
