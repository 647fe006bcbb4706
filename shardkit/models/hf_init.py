"""Draw one parameter of a transformers model by the model's own rule, without drawing the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import ConfigError


@torch.no_grad()
def init_as_the_model_does(model: nn.Module, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    """Fill `full` as the model's `_init_weights` fills the parameter `fqn`: a function of the generator's state alone.

    transformers calls `_init_weights(module)` for every module, children first; a parent may overwrite what a child's
    rule did (GPT-2's residual projections). So the rule is run for the parameter's module and everything around it,
    with this one parameter real: on the others, which are on meta, it does nothing and draws nothing.

    Args:
        model: a transformers model whose parameters are on meta.

    Raises:
        ConfigError: the rule leaves (part of) the parameter as it was.
    """
    path = fqn.split(".")
    around = [model.get_submodule(".".join(path[:end])) for end in range(len(path))]
    owner, name = around[-1], path[-1]
    placeholder = owner._parameters[name]
    full.fill_(torch.nan)
    owner._parameters[name] = nn.Parameter(full, requires_grad=False)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(generator.get_state())
            for depth in reversed(range(len(around))):
                _rule_of(around[: depth + 1])._init_weights(around[depth])
    finally:
        owner._parameters[name] = placeholder
    if torch.isnan(full).any():
        raise ConfigError(
            f"{type(model).__name__} has no rule to initialise {fqn}",
            "use a model whose _init_weights covers every parameter, or write a task of your own with init_parameter",
        )


def _rule_of(around: list[nn.Module]) -> Any:
    """The innermost transformers model that the last module belongs to: in a composite model each part has its rule."""
    from transformers import PreTrainedModel

    return next(module for module in reversed(around) if isinstance(module, PreTrainedModel))
