"""Reference decoder-only transformer: GPT-2's architecture (Radford et al. 2019, section 2.3), bias-free output head.

Construction leaves parameters uninitialised, and `init_parameter` fills them one by one. So a model can be built on the
meta device or under ZeRO-3, and its weights are the same for every strategy and world size.
"""

from __future__ import annotations

import math
import re
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..config.schema import ModelConfig
from ..errors import ConfigError
from ..parallel.context import ContextParallel
from .cross_entropy import all_logits, chunked_cross_entropy, summed_loss
from .packed_attention import BatchDocuments, DocumentLayout, document_attention

INIT_STD = 0.02


class _Undrawn:
    """Before one of torch's modules: its weights stay as allocated until `init_parameter` fills them."""

    def reset_parameters(self) -> None:
        pass


class Linear(_Undrawn, nn.Linear):
    pass


class Embedding(_Undrawn, nn.Embedding):
    pass


class LayerNorm(_Undrawn, nn.LayerNorm):
    pass


class Attention(nn.Module):
    """Causal multi-head self-attention, from [batch, seq, d_model] to the same shape."""

    context_parallel: ContextParallel | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.d_model // config.n_heads
        self.dropout = config.dropout
        self.qkv = Linear(config.d_model, 3 * config.d_model)
        self.proj = Linear(config.d_model, config.d_model)

    def forward(self, x: torch.Tensor, documents: BatchDocuments | None = None) -> torch.Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, -1, self.head_dim)  # all heads, or this rank's share of them
        dropout = self.dropout if self.training else 0.0
        if documents is not None:
            q, k, v = qkv.unbind(2)
            heads = document_attention(q, k, v, documents, dropout, context=self.context_parallel)
        else:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2)
        out: torch.Tensor = self.proj(heads.reshape(batch, seq, -1))
        return out


class MLP(nn.Module):
    """Two linear layers around a GELU, with hidden width 4 × d_model."""

    positionwise = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc = Linear(config.d_model, 4 * config.d_model)
        self.proj = Linear(4 * config.d_model, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(F.gelu(self.fc(x)))
        return out


class Block(nn.Module):
    """A pre-norm block: the unit that is sharded, checkpointed and compiled."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.norm2 = LayerNorm(config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, **documents: BatchDocuments) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), **documents))
        out: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class Head(Linear):
    """Output projection. With targets it computes the loss itself, so that its weight is gathered where it is used."""

    vocabulary_parallel = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.loss_chunk_size = config.loss_chunk_size

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor | None = None, ignore_index: int = -100
    ) -> torch.Tensor:
        if targets is None:
            return all_logits(hidden, self.weight)
        if self.loss_chunk_size:
            return chunked_cross_entropy(hidden, self.weight, targets, self.loss_chunk_size, ignore_index)
        return summed_loss(all_logits(hidden, self.weight), targets, ignore_index)


class Transformer(nn.Module):
    """Token and learned position embeddings, `n_layers` blocks, final norm, output head."""

    tp_plan: ClassVar[dict[str, str]] = {
        "tok_emb": "embedding_rowwise",
        "blocks.*.attn.qkv": "colwise_stacked_3",
        "blocks.*.attn.proj": "rowwise",
        "blocks.*.mlp.fc": "colwise",
        "blocks.*.mlp.proj": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = Embedding(config.vocab_size, config.d_model)
        self.pos_emb = Embedding(config.max_seq_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = LayerNorm(config.d_model)
        self.head = Head(config)
        if config.tie_weights:
            self.head.weight = self.tok_emb.weight

    def forward(
        self,
        tokens: torch.Tensor,  # [batch, seq] integers below `vocab_size`
        targets: torch.Tensor | None = None,  # [batch, seq]
        ignore_index: int = -100,  # targets that are not counted
        documents: DocumentLayout | None = None,  # those of a packed batch
        positions: torch.Tensor | None = None,  # [n] of the flattened batch × seq; only their logits are computed
    ) -> torch.Tensor:
        """Compute logits [batch, seq, vocab], or with `targets` the sum of their cross-entropies (fp32 scalar)."""
        seq = tokens.shape[1] if documents is None else max(documents[2])
        if seq > self.config.max_seq_len:
            raise ConfigError(
                f"a sequence of {seq} tokens, but model.max_seq_len={self.config.max_seq_len}",
                "raise model.max_seq_len or shorten the sequences",
            )
        if documents is None:
            position_ids, block_options = torch.arange(seq, device=tokens.device), {}
        else:
            position_ids, block_options = documents[0], {"documents": BatchDocuments(*documents[1:])}
        x = self.dropout(self.tok_emb(tokens) + self.pos_emb(position_ids))
        for block in self.blocks:
            x = block(x, **block_options)
        x = self.norm(x)
        if positions is not None:
            x = x.flatten(0, 1).index_select(0, positions)
        out: torch.Tensor = self.head(x, targets, ignore_index)
        return out


# Every parameter of Transformer by its full name: a new layer must be added here before it can be initialised.
_RESIDUAL = re.compile(r"blocks\.\d+\.(attn|mlp)\.proj\.weight")
_NORMAL = re.compile(r"(tok_emb|pos_emb|head|blocks\.\d+\.(attn\.qkv|mlp\.fc))\.weight")
_NORM_WEIGHT = re.compile(r"(blocks\.\d+\.norm[12]|norm)\.weight")


def init_parameter(config: ModelConfig, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    """Fill one whole parameter in place as GPT-2 does (section 2.3), from the generator's state alone.

    Linear layers and embeddings are normal with std 0.02, divided by sqrt(2 × n_layers) for the two projections that
    write to the residual stream. Biases are zero, and norm weights one.
    """
    with torch.no_grad():
        if _RESIDUAL.fullmatch(fqn):
            full.normal_(0.0, INIT_STD / math.sqrt(2 * config.n_layers), generator=generator)
        elif _NORMAL.fullmatch(fqn):
            full.normal_(0.0, INIT_STD, generator=generator)
        elif _NORM_WEIGHT.fullmatch(fqn):
            full.fill_(1.0)
        elif fqn.endswith(".bias"):
            full.zero_()
        else:
            raise KeyError(f"{fqn} is not a parameter of Transformer")


# MFU = tokens/s × FLOPs per token / peak FLOP/s (PaLM, Chowdhery et al. 2022, appendix B). It counts the FLOPs that the
# model needs, not those that were executed, so recomputed activations do not raise it.
def transformer_flops_per_token(config: ModelConfig, seq_len: float) -> float:
    """Training FLOPs per token without recomputation: 6 N_matmul + 12 L d T (PaLM appendix B), one third in forward.

    12 L d T is attention's QKᵀ and its product with V over all T positions: the convention does not discount the causal
    mask. Embedding look-ups, norms and biases do not count.
    """
    # 12 d² per block (qkv 3, projection 1, MLP 8), and vocab × d in the head, even if it is tied to the embedding.
    matmul_params = 12 * config.n_layers * config.d_model**2 + config.vocab_size * config.d_model
    return 6.0 * matmul_params + 12.0 * config.n_layers * config.d_model * seq_len
