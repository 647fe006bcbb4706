"""Refuse a model with trained parameters that get no gradient, where the strategy cannot leave them alone."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config.capability import CAPABILITIES
from ..config.schema import ParallelConfig
from ..errors import ConfigError, listed
from .block_calls import plain


def refuse_unused(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ParallelConfig,
    chosen: set[str],
    allowed: Collection[str],
) -> None:
    """Before each update, raise if a trained parameter got no gradient and the strategy cannot leave it alone.

    Args:
        chosen: names of the parameters that a rank may skip in a step. Unless `parallel.find_unused` is false, they
            are left out of the check.
        allowed: names that are left out too, of which more may be found in a step (`BlockCalls.allowed`).

    Raises (from the optimizer's step):
        ConfigError: parameters got no gradient; names them.
    """
    strategy = config.strategy
    reason = CAPABILITIES["unused_params"].reasons.get(strategy)
    may_skip = set[str]() if config.find_unused is False else {plain(name) for name in chosen}
    if reason is None:
        return
    named = ((plain(fqn), p) for fqn, p in model.named_parameters())
    trained = {fqn: p for fqn, p in named if p.requires_grad and fqn not in may_skip}
    waiting = dict(trained)
    for fqn, param in trained.items():
        param.register_hook(partial(_seen, waiting, fqn))  # type: ignore[no-untyped-call]
    steps = 0

    def check(*_: Any) -> None:
        nonlocal steps
        if len(waiting) == len(trained):  # no backward: a resume creates the optimizer's state by such a step
            return
        lacking = [fqn for fqn in waiting if fqn not in allowed]
        if lacking:
            when = "this step" if steps else "the first step"
            raise ConfigError(
                f"{len(lacking)} of {len(trained)} parameters got no gradient in {when} ({listed(lacking)}), which "
                f"parallel.strategy={strategy} cannot train: {reason}",
                "freeze them (requires_grad_(False)), use them in the loss, or set parallel.strategy=fsdp",
            )
        steps += 1
        waiting.update(trained)

    optimizer.register_step_pre_hook(check)


def _seen(waiting: dict[str, nn.Parameter], fqn: str, grad: torch.Tensor) -> None:
    waiting.pop(fqn, None)
