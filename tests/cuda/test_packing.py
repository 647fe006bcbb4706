"""Attention by documents on a card: in half precision one kernel for all documents, which equals one at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from shardkit.models.packed_attention import BatchDocuments, document_attention
from tests.emulated_cuda import needs_emulation
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_emulation]

BOUNDS = [0, 70, 71, 84, 128, 192]
"""In two rows of 96 tokens; no document lies in two."""


def attended(device: str, dtype: torch.dtype, window: int | None, dropout: float = 0.0) -> list[torch.Tensor]:
    """The result, and the gradients of query, key and value, in fp32 on the CPU."""
    draws = torch.Generator().manual_seed(0)
    query, key, value, weight = (torch.randn(2, 96, n, 32, generator=draws).bfloat16() for n in (4, 2, 2, 4))
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in (query, key, value)]
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    documents = BatchDocuments(bounds, [end - start for start, end in pairwise(BOUNDS)])
    torch.manual_seed(1)
    out = document_attention(*leaves, documents, dropout, 0.3, window)
    kernels, node = [], out.grad_fn
    while node is not None:
        kernels.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert ("FlashAttentionBackward0" in kernels) is (dtype != torch.float32), kernels
    (out * weight.to(out)).sum().backward()
    return [out.detach().float().cpu(), *(leaf.grad.float().cpu() for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_for_all_documents_equals_one_at_a_time(dtype: torch.dtype, window: int | None) -> None:
    step = torch.finfo(dtype).eps
    for name, want, found in zip(
        ["out", "query", "key", "value"],
        attended("cpu", torch.float32, window),
        attended("cuda", dtype, window),
        strict=True,
    ):
        assert (found - want).abs().max() <= 2 * step * want.abs().max(), name


def test_backward_drops_the_same_weights_as_forward() -> None:
    plain, dropped = (attended("cuda", torch.float16, 40, dropout) for dropout in (0.0, 0.25))
    assert (plain[0] - dropped[0]).abs().max() > 0.1
    draws = torch.Generator().manual_seed(0)
    _, _, value, weight = (torch.randn(2, 96, n, 32, generator=draws).bfloat16().float() for n in (4, 2, 2, 4))
    # The result is linear in the values, with the kept weights as factors.
    torch.testing.assert_close((dropped[0] * weight).sum(), (dropped[3] * value).sum(), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(("mode", "error"), [("fp32", 2e-5), ("bf16", 0.03)])
def test_packed_documents_train_on_a_card_as_on_the_cpu(mode: str, error: float) -> None:
    body = "tests.strategies.packed_cases:curves"
    (want,) = run_ranks(1, body, cases=[("mistral", "single", "none")])[0]
    kinds: Any = [("mistral", engine, "packed") for engine in ("ddp", "fsdp", "zero3")]
    for curves in run_ranks(2, body, gpu=True, cases=kinds, **{"run.device": "cuda", "precision.mode": mode}):
        for kind, curve in zip(kinds, curves, strict=True):
            for (loss, _), (want_loss, _) in zip(curve, want, strict=True):
                assert loss == pytest.approx(want_loss, abs=error), kind
