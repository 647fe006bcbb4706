"""Causal attention inside each document of a packed batch, without a mask of all positions by all positions.

The reference implementation calls `scaled_dot_product_attention` once per document and works on every device and type.
In half precision on GPUs, torch's variable-length flash attention handles all documents in one kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config.capability import divisors, one_of
from ..errors import ConfigError
from ..parallel.compat import declares_no_masks, flash_by_documents
from ..parallel.context import ATTRIBUTE, ContextParallel

ATTENTION = "shardkit_documents"
"""Name of `attend` in transformers' table of attention functions. Its table of masks has no such name, so models make
no mask."""
QUERIES = 256
"""Queries that a sliding window handles at a time: their mask is small."""
DocumentLayout = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]
"""A batch's documents as tensors that a model can be called with: positions [rows, T], then the bounds and lengths of
`BatchDocuments`."""
_NO_PACKING = "set data.packing=none and parallel.cp=1"


class BatchDocuments:
    """The documents of a batch of [rows, T] tokens. Every layer gets this one object, which no engine looks into."""

    def __init__(self, bounds: torch.Tensor, lengths: Sequence[int]) -> None:
        # int32 [n + 1], the index of each document's first token, and the end; on the tokens' device
        self.bounds = bounds
        # tokens of each document, in the order of the flattened rows, which they cover; on the host
        self.lengths, self.longest = lengths, max(lengths)
        self.seen: set[int] = set()  # ids of the attention modules that have used this object

    @classmethod
    def whole_rows(cls, tokens: torch.Tensor) -> BatchDocuments:
        """The documents of a batch in which every row of [rows, T, …] is one document."""
        rows, length = tokens.shape[:2]
        bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=tokens.device)
        return cls(bounds, [length] * rows)


def document_attention(
    query: torch.Tensor,  # [rows, T, heads, width]
    key: torch.Tensor,  # may have fewer heads, as `value`, each shared by a group of query heads
    value: torch.Tensor,
    documents: BatchDocuments,
    dropout: float = 0.0,
    scale: float | None = None,  # factor of the scores; None = 1 / √width
    window: int | None = None,  # most tokens that a token attends to, itself included; None = no limit
    softcap: float | None = None,  # scores s become softcap · tanh(s / softcap)
    sinks: torch.Tensor | None = None,  # [heads], a score that each query gives to nothing
    context: ContextParallel | None = None,  # the ranks that hold the other positions of these rows
) -> torch.Tensor:
    """Causal attention of tokens to their own document alone; returns [rows, T, heads, width of a value]."""
    if torch.is_autocast_enabled(query.device.type):  # some models normalise queries and keys in fp32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if context is not None:  # after the cast: half the bytes
        query, key, value = context.to_heads(query), context.to_heads(key), context.to_heads(value)
        sinks = None if sinks is None else context.share(sinks)
    rows = query.shape[:2]
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    if window is not None and window >= documents.longest:
        window = None
    width = query.shape[-1]
    has_fitting_sizes = width == value.shape[-1] and width % 8 == 0 and width <= 256
    if (  # what torch's variable-length flash attention supports
        query.is_cuda
        and softcap is None
        and sinks is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and has_fitting_sizes
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    ):
        out = flash_by_documents(query, key, value, documents.bounds, documents.longest, dropout, scale, window)
    else:
        queries, keys, values = (torch.split(tensor, list(documents.lengths)) for tensor in (query, key, value))
        parts = zip(queries, keys, values, strict=True)
        out = torch.cat([_attend_to_itself(q, k, v, dropout, scale, window, softcap, sinks) for q, k, v in parts])
    out = out.view(*rows, *out.shape[1:])
    return out if context is None else context.to_positions(out)


def _attend_to_itself(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scale: float | None,
    window: int | None, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of one document, [L, heads, width]."""
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    length, shared = query.shape[2], query.shape[1] != key.shape[1]
    plain = softcap is None and sinks is None
    if shared and (query.is_cuda or not plain):  # no fused fp32 kernel of CUDA supports shared heads
        groups, shared = query.shape[1] // key.shape[1], False
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if plain and (window is None or window >= length):
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=shared
        )
    else:
        parts = []
        for start in range(0, length, QUERIES):
            stop = min(start + QUERIES, length)
            window_start = 0 if window is None else max(0, start - window + 1)
            positions = torch.arange(window_start, stop, device=query.device)
            ago = positions[start - window_start :, None] - positions
            mask = ago >= 0 if window is None else (ago >= 0) & (ago < window)
            if not plain:
                blocks = query[:, :, start:stop], key[:, :, window_start:stop], value[:, :, window_start:stop]
                # Backward computes the scores again: those of all blocks would be kept, T × T in all.
                parts.append(checkpoint(_scored, *blocks, mask, dropout, scale, softcap, sinks, use_reentrant=False))
                continue
            parts.append(
                F.scaled_dot_product_attention(
                    query[:, :, start:stop], key[:, :, window_start:stop], value[:, :, window_start:stop],
                    attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=shared,
                )
            )  # fmt: skip
        out = torch.cat(parts, 2)
    return out.squeeze(0).transpose(0, 1)


def _scored(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, dropout: float,
    scale: float | None, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention whose scores are capped, or shared with sinks, which torch's fused kernels cannot do."""
    scores = query @ key.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    shares = scores.softmax(-1, torch.float32).to(value.dtype)[..., : key.shape[2]]
    return F.dropout(shares, dropout) @ value


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: BatchDocuments | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' models call: from [rows, heads, T, width] to [rows, T, heads, width].
    Without `documents`, each row is one document."""
    obstacle = "position_bias" if options.get("position_bias") is not None else None
    if attention_mask is not None:
        obstacle = "a mask of its own"
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        obstacle = "attention that is not causal"
    if obstacle is not None:
        cause = f"{type(module).__name__} asks for {obstacle}, which neither data.packing nor parallel.cp can do"
        raise ConfigError(cause, _NO_PACKING)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if documents is None:
        documents = BatchDocuments.whole_rows(query)
    documents.seen.add(id(module))
    context = getattr(module, ATTRIBUTE, None)
    out = document_attention(query, key, value, documents, dropout, scaling, sliding_window, softcap, s_aux, context)
    return out, None


def register() -> str:
    """Add `attend` to transformers' table of attention functions; returns its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def refuse_what_crosses_documents(model: nn.Module) -> None:
    """Refuse transformers models in which information can pass between documents outside of `attend`."""
    config: Any = model.config
    obstacle = None
    if not declares_no_masks(model):
        obstacle = "keeps a state along the sequence, or needs a mask of all positions"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        obstacle = "takes no position_ids: its positions would not restart"
    elif getattr(config.get_text_config(), "attention_chunk_size", None):
        obstacle = "attends in chunks (attention_chunk_size)"
    elif any(isinstance(module, (nn.Conv1d, nn.RNNBase)) for module in model.modules()):
        obstacle = "mixes neighbouring tokens outside attention"
    if obstacle is not None:
        raise ConfigError(f"data.packing and parallel.cp: {type(model).__name__} {obstacle}", _NO_PACKING)


def check_heads(heads: int, size: int, tp: int) -> None:
    """Refuse heads of attention that `parallel.cp` ranks cannot share evenly, where `tp` ranks share them already."""
    if size > 1 and heads % (size * tp):
        fits = [n for n in divisors(heads) if heads % (n * tp) == 0]
        behind = f" for each of parallel.tp={tp} ranks" if tp > 1 else ""
        raise ConfigError(
            f"parallel.cp={size} does not divide num_attention_heads={heads}{behind}: each rank computes attention "
            "for a share of the heads",
            one_of("parallel.cp", fits),
        )


def may_split(model: nn.Module) -> nn.Module:
    """Let every module of a transformers model have a group: whichever calls `attend` finds it there."""
    for module in model.modules():
        setattr(module, ATTRIBUTE, None)
    return model


def check_seen(documents: BatchDocuments, model: nn.Module) -> None:
    """Check after a forward that all layers of the model used the documents."""
    config: Any = model.config
    layers = config.get_text_config().num_hidden_layers
    if len(documents.seen) != layers:
        raise ConfigError(
            f"data.packing and parallel.cp: {len(documents.seen)} of the {layers} layers of {type(model).__name__} "
            "keep to the bounds of documents",
            _NO_PACKING,
        )
