"""The load-balancing loss of routers (Fedus et al. 2021, equations 4 to 6), over the micro-batch of all ranks together.

It is E · Σ (share of the choices that fell on an expert) · (the expert's mean probability), a product of two means over
tokens. The mean of the ranks' own losses is another number, and has another gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError


class Balance(NamedTuple):
    """A model's load-balancing loss, which each target's cross-entropy is added to."""

    coefficient: float
    top_k: int

    def loss(
        self,
        router_logits: tuple[torch.Tensor, ...],  # of each layer [tokens, experts]
        n_targets: torch.Tensor,  # of this rank's micro-batch
        real: torch.Tensor | None,  # [rows, positions] whether a token counts; None: all do
    ) -> torch.Tensor:
        """This rank's part of coefficient × targets × loss, with the targets and tokens of all ranks' micro-batches.

        The ranks' parts sum up to it. Gradients go through the probabilities alone, so a rank needs the others' choices
        and numbers of tokens, but not their gradients. Ranks that share a layer have the same tokens: counted several
        times, in each of the three numbers, these leave a part as it is.
        """
        n_chosen, probability, n_tokens = sums(router_logits, self.top_k, real)
        counts = torch.cat([n_chosen, torch.stack([n_tokens, n_targets])])
        if dist.is_initialized():
            dist.all_reduce(counts)
        return self.coefficient * counts[-1] * product(counts[:-2], probability, counts[-2])


def sums(
    router_logits: tuple[torch.Tensor, ...], top_k: int, real: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How often each expert was chosen, the sum of its probabilities, and the number of tokens, over all layers."""
    shape, device = router_logits[0].shape, router_logits[0].device
    n_tokens = torch.full((), shape[0], device=device) if real is None else real.sum()
    n_chosen = torch.zeros(shape[-1], dtype=torch.int64, device=device)
    probability = torch.zeros(shape[-1], device=device)
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.topk(top_k, -1).indices.flatten()
        if real is None:
            counted = torch.ones_like(chosen)
        else:
            counted = real.flatten().to(chosen.dtype).repeat_interleave(top_k)
            probabilities = probabilities * real.flatten()[:, None]
        n_chosen = n_chosen.scatter_add(0, chosen, counted)
        probability = probability + probabilities.sum(0)
    return n_chosen, probability, n_tokens * len(router_logits)


def product(n_chosen: torch.Tensor, probability: torch.Tensor, n_tokens: torch.Tensor) -> torch.Tensor:
    """The loss of these sums."""
    n_tokens = n_tokens.clamp(min=1)
    return len(n_chosen) * (n_chosen / n_tokens * (probability / n_tokens)).sum()


def balance_of(model: nn.Module) -> Balance | None:
    """The load-balancing loss that a model's config asks for (`output_router_logits`), if any."""
    wrapped: Any = model
    if not getattr(wrapped.config, "output_router_logits", False):
        return None
    return Balance(float(wrapped.router_aux_loss_coef), int(wrapped.num_experts_per_tok))


def check_balance(model: nn.Module, loss_of: Callable[[tuple[torch.Tensor, ...]], Any]) -> None:
    """Refuse a model whose load-balancing loss is not that of transformers' `load_balancing_loss_func`.

    `loss_of`: returns the model's own loss of its routers' logits.
    """
    wrapped: Any = model
    needed = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    if missing := [name for name in needed if not hasattr(wrapped, name)]:
        problem = f"it has no {' or '.join(missing)}"
    else:
        # Two layers, whose mean loss differs from the loss of all their tokens.
        noise = torch.Generator().manual_seed(0)
        shape = 2, 8, wrapped.num_experts
        logits = tuple(torch.randn(shape, generator=noise) * torch.tensor([1.0, 4.0])[:, None, None])
        expected = product(*sums(logits, wrapped.num_experts_per_tok))
        try:
            model_loss = loss_of(logits)
        except Exception:  # another loss may want other logits, and raise anything
            model_loss = None
        if isinstance(model_loss, torch.Tensor) and torch.allclose(model_loss, expected, rtol=1e-5):
            return
        problem = "it is not that of transformers' load_balancing_loss_func"
    raise ConfigError(
        f"model.hf.output_router_logits=true: the load-balancing loss of {type(model).__name__} cannot be summed over "
        f"ranks: {problem}",
        "set model.hf.output_router_logits=false, or write a task of your own",
    )
