"""Refuse a model with trained parameters that get no gradient, where the strategy cannot leave them alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..config.capability import CAPABILITIES
from ..config.schema import ParallelConfig
from ..errors import ConfigError
from .block_calls import plain
from .not_finite import listed


def refuse_unused(model: nn.Module, optimizer: torch.optim.Optimizer, config: ParallelConfig, chosen: set[str]) -> None:
    """Before each update, raise if a trained parameter got no gradient and the strategy cannot leave it alone.

    Args:
        chosen: names of the parameters that a rank may skip in a step. Unless `parallel.find_unused` is false, they
            are left out of the check, and DDP, which then looks for unused parameters, is not checked at all.

    Raises (from the optimizer's step):
        ConfigError: parameters got no gradient; names them.
    """
    strategy = config.strategy
    is_ddp = strategy == "ddp"  # the rules and words of this check differ by the name of the strategy, not by an engine
    reason = CAPABILITIES["unused_params"].reasons.get(strategy)
    may_skip = set[str]() if config.find_unused is False else {plain(name) for name in chosen}
    if reason is None or config.find_unused or (is_ddp and may_skip):
        return
    named = ((plain(fqn), p) for fqn, p in model.named_parameters())
    trained = {fqn: p for fqn, p in named if p.requires_grad and fqn not in may_skip}
    waiting = dict(trained)
    hooks: list[Any] = []
    for fqn, param in trained.items():
        hooks.append(param.register_hook(partial(_seen, waiting, fqn)))  # type: ignore[no-untyped-call]
    names = {id(param): fqn for fqn, param in trained.items()}
    steps = 0

    def check(*_: Any) -> None:
        nonlocal steps
        if is_ddp and steps:  # gradients can be looked at, which costs less than hooks
            updated = (param for group in optimizer.param_groups for param in group["params"])
            lacking = [names[id(param)] for param in updated if param.grad is None and id(param) in names]
        elif len(waiting) == len(trained):  # no backward: a resume creates the optimizer's state by such a step
            return
        else:
            lacking = [*waiting]
        if lacking:
            when = "this step" if steps else "the first step"
            raise ConfigError(
                f"{len(lacking)} of {len(trained)} parameters got no gradient in {when} ({listed(lacking)}), which "
                f"parallel.strategy={strategy} cannot train: {reason}",
                "freeze them (requires_grad_(False)), use them in the loss, or "
                + ("set parallel.find_unused=true" if is_ddp else "set parallel.strategy=fsdp"),
            )
        steps += 1
        waiting.update(trained)
        if is_ddp:
            while hooks:
                hooks.pop().remove()

    optimizer.register_step_pre_hook(check)


def _seen(waiting: dict[str, nn.Parameter], fqn: str, grad: torch.Tensor) -> None:
    waiting.pop(fqn, None)
