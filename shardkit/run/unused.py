"""Parameters that the loss does not depend on: refused where an engine would go wrong with them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..config.capability import CAPABILITIES
from ..config.schema import StrategyName
from ..errors import ConfigError

SHOWN = 4


def refuse_unused(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: StrategyName) -> None:
    """Before the first update, raise if a parameter that requires a gradient got none in that step.

    Does nothing for strategies that leave such parameters alone.

    Raises (from the optimizer's first step):
        ConfigError: names them.
    """
    reason = CAPABILITIES["unused_params"][strategy]
    if reason is True:
        return
    waiting = {fqn.removeprefix("module."): p for fqn, p in model.named_parameters() if p.requires_grad}
    total = len(waiting)
    hooks: list[Any] = [
        p.register_hook(partial(_seen, waiting, fqn))  # type: ignore[no-untyped-call]
        for fqn, p in waiting.items()
    ]

    def check(*_: Any) -> None:
        if len(waiting) == total:  # no backward yet: a resume makes the optimizer's states by such a step
            return
        for hook in hooks:
            hook.remove()
        if waiting:
            names = ", ".join([*waiting][:SHOWN]) + (", …" if len(waiting) > SHOWN else "")
            raise ConfigError(
                f"{len(waiting)} of {total} parameters got no gradient in the first step ({names}), which "
                f"parallel.strategy={strategy} cannot train: {reason}",
                "freeze them (requires_grad_(False)), use them in the loss, or set parallel.strategy=fsdp",
            )

    hooks.append(optimizer.register_step_pre_hook(check))


def _seen(waiting: dict[str, nn.Parameter], fqn: str, grad: torch.Tensor) -> None:
    waiting.pop(fqn, None)
