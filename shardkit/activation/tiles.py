"""Tiled MLPs: the hidden activations of a part of the positions exist at once, in forward and in backward.

ALST (Bekman et al. 2025, section 3.1). Each tile is a checkpointed call of the MLP's own forward, and autograd adds a
weight's gradients of all tiles up before any hook sees them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError
from ..parallel.blocks import holds_experts
from ..parallel.context import BATCH_NORMS

ATTRIBUTE = "positionwise"
"""A module that sets this attribute to True takes one tensor [..., width] and works on each position alone."""


def tile_mlps(model: nn.Module, blocks: Sequence[nn.Module], n_tiles: int) -> None:
    """Make the MLPs of all blocks compute `n_tiles` parts of the positions one after another, in place.

    These are the modules that declare `ATTRIBUTE`, or else the `mlp` of each block of a transformers model.
    """
    mlps = {name: module for name, module in model.named_modules() if getattr(module, ATTRIBUTE, False)}
    if not mlps:
        names = {module: name for name, module in model.named_modules()}
        for block in blocks:
            mlp = getattr(block, "mlp", None)
            if not isinstance(mlp, nn.Module) or not type(mlp).__module__.startswith("transformers."):
                raise _refused(n_tiles, f"{names[block]} ({type(block).__name__}) has no module `mlp` of transformers")
            mlps[names[mlp]] = mlp
            if (cause := _other_parts(mlp)) is not None:
                raise _refused(n_tiles, f"{names[mlp]} ({type(mlp).__name__}) {cause}")
    if not mlps:
        raise _refused(n_tiles, f"{type(model).__name__} has no blocks with an MLP")
    for mlp in mlps.values():
        mlp.forward = partial(_tiled, mlp.forward, n_tiles)


def is_tiled(module: nn.Module) -> bool:
    """Whether `tile_mlps` has changed a module."""
    return getattr(vars(module).get("forward"), "func", None) is _tiled


def _tiled(forward: Callable[[torch.Tensor], torch.Tensor], n_tiles: int, x: torch.Tensor) -> torch.Tensor:
    """The MLP's output, tile by tile.

    There are `n_tiles` calls even if some have no rows: ranks with fewer positions than others, as padding-free batches
    have, must join the same gathers.
    """
    rows = x.flatten(0, -2)
    sizes = [len(range(tile, len(rows), n_tiles)) for tile in range(n_tiles)]
    # `torch.split` is one node in the graph, which joins the tiles' gradients; each slice, and each part of
    # `tensor_split`, would have a gradient of the whole input's size.
    tiles = [checkpoint(forward, tile, use_reentrant=False) for tile in torch.split(rows, sizes)]
    return torch.cat(tiles).view(*x.shape[:-1], -1)


def _other_parts(mlp: nn.Module) -> str | None:
    """Why an MLP of transformers may be more than linear layers and activations of each position alone."""
    arguments = inspect.signature(mlp.forward).parameters.values()
    required = [p.name for p in arguments if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(required) != 1:
        return f"takes {', '.join(required)} instead of one tensor"
    for name, module in mlp.named_modules():
        if holds_experts(name) or isinstance(module, BATCH_NORMS):
            return f"holds {name} ({type(module).__name__})"
    for module in mlp.modules():
        # Under ZeRO-3 a parameter is empty, and has its shape beside it.
        shapes: list[Any] = [getattr(p, "ds_shape", p.shape) for p in module.parameters(recurse=False)]
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's linear layer
        if not is_linear and any(len(shape) > 1 for shape in shapes):
            return f"holds weights of {type(module).__name__}, which is no linear layer"
    return None


def _refused(n_tiles: int, cause: str) -> ConfigError:
    return ConfigError(f"model.mlp_chunks={n_tiles}: {cause}", "remove model.mlp_chunks")
