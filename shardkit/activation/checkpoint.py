"""Activation checkpointing: keep a region's input, recompute the rest in backward (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..config.schema import ActivationConfig
from ..errors import ConfigError
from ..parallel import compat
from ..parallel.blocks import attention_modules, chosen_blocks
from ..parallel.compat import caller_recomputes
from .buffers import BufferRecord, has_buffers
from .products import contexts, keep_products

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def checkpoint_activations(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    config: ActivationConfig,
    attention_classes: Sequence[type[nn.Module]] = (),
    compiled: bool = False,
) -> None:
    """Make the policy's regions recompute their activations in backward, in place.

    A region's `forward` is replaced and its module is not wrapped, so parameter names do not change and an engine's
    hooks stay outside the recomputed region. Random states are restored: dropout drops the same elements.

    Raises:
        ConfigError: the model has no block or no attention, or fewer blocks than `every_k`; or it has dropout under a
            budget.
    """
    if config.policy == "budget" and config.budget < 1:
        _refuse_dropout(model)
    # The share of activations that torch.compile may keep is process-wide, and read at compile time.
    if compat.set_memory_budget(config.budget if config.policy == "budget" else 1.0):
        torch.compiler.reset()  # code compiled earlier in this process uses the old budget
    if not config.recomputes:
        return
    blocks = chosen_blocks(model, blocks, config)
    _no_cache(model)
    options: dict[str, Any] = {"use_reentrant": False}
    if config.policy == "selective_op" and compat.PRODUCTS.works(instead="everything is recomputed"):
        torchs = partial(create_selective_checkpoint_contexts, keep_products)
        options["context_fn"] = torchs if compiled else contexts
    recompute = _recompute(options)
    for module in _regions(blocks, config, attention_classes):
        if has_buffers(module) and not compiled:  # compiled code takes buffers as inputs, and changes them once
            module.forward = MethodType(_recompute_with_buffers(vars(module).get("forward"), options), module)
        elif "forward" in vars(module):  # replaced before: not the class's method
            module.forward = partial(checkpoint, module.forward, **options)
        else:
            module.forward = MethodType(recompute, module)


def _recompute(options: dict[str, Any]) -> Callable[..., Any]:
    """One recomputing `forward` that all modules share, so torch.compile compiles equal modules once. It would compile
    a separate object for each module, and give up after eight."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(type(self).forward, self, *args, **options, **kwargs)

    return forward


def _recompute_with_buffers(replaced: Callable[..., Any] | None, options: dict[str, Any]) -> Callable[..., Any]:
    """A recomputing `forward` that treats the buffers which it changes as `BufferRecord` says.

    Inside of a region that the model recomputes itself it only runs: that region changes the buffers twice, as without
    a policy.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = replaced or MethodType(type(self).forward, self)
        if caller_recomputes():
            return inner(*args, **kwargs)
        contexts = options.get("context_fn", lambda: None)
        record = BufferRecord(self)
        settings = options | {"context_fn": lambda: record.contexts(contexts())}
        return checkpoint(inner, *args, **settings, **kwargs)

    return forward


def _regions(
    blocks: Sequence[nn.Module], config: ActivationConfig, attention_classes: Sequence[type[nn.Module]]
) -> Sequence[nn.Module]:
    if config.policy == "selective":
        return attention_modules(blocks, attention_classes, config.policy)
    if config.policy == "every_k":
        if config.every_k > len(blocks):
            raise ConfigError(
                f"activation.every_k={config.every_k}, but the model has {len(blocks)} blocks "
                f"({type(blocks[0]).__name__})",
                f"set activation.every_k to 1..{len(blocks)}, or activation.policy=none",
            )
        # Start at the first block: a checkpointed last block would be recomputed at once, at the peak it should lower.
        return blocks[:: config.every_k]
    return blocks


def _refuse_dropout(model: nn.Module) -> None:
    """Compiled code that recomputes dropout under a budget drops different elements (torch 2.13 on CPU: a directional
    derivative is 2 to 8 % off): https://github.com/pytorch/pytorch/issues/190758, open."""
    for name, module in model.named_modules():
        rates = {"p": module.p} if isinstance(module, _DROPOUTS) else dict(vars(module))
        for key, rate in rates.items():
            if isinstance(rate, float) and 0 < rate < 1 and (key == "p" or "drop" in key):
                raise ConfigError(
                    f"activation.policy=budget, but {name or 'the model'} has {key}={rate:g}: torch.compile would draw "
                    "other random numbers when it recomputes, and gradients would be wrong",
                    "set model.dropout=0 (or the model's own key), activation.budget=1, or activation.policy=selective",
                )


def _no_cache(model: nn.Module) -> None:
    """Turn off the key/value caches of transformers models: computing a layer twice would fill them twice."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]
