"""Notice the parts of a block that the data choose rows for, before ranks first use them differently."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


class RowChoice:
    """Notes modules inside blocks that are called with fewer rows than their block, and otherwise with its shape.

    Such a module is a branch for some rows: in another step a rank may have none for it.

    Args:
        blocks: by name.

    Attributes:
        modules: names of the modules → names of their blocks.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.modules: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._hooks: list[Any] = []
        for name, block in blocks.items():
            self._hooks.append(block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            for inner, module in block.named_modules():
                if module is not block and any(True for _ in module.parameters()):
                    look = partial(self._look, name, f"{name}.{inner}")
                    self._hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))

    def _enter(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = _first_tensor((args, kwargs))
        if tensor is not None:
            self._shapes[name] = tensor.shape

    def _look(self, block: str, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        shape, tensor = self._shapes.get(block), _first_tensor((args, kwargs))
        if not shape or tensor is None or tensor.dim() != len(shape):
            return
        if tensor.shape[1:] == shape[1:] and tensor.shape[0] < shape[0]:
            self.modules[name] = block

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _first_tensor(tree: Any) -> torch.Tensor | None:
    if isinstance(tree, torch.Tensor):
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = vars(tree)
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return next((tensor for branch in branches if (tensor := _first_tensor(branch)) is not None), None)
