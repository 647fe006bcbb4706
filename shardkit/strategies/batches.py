"""Walk through a micro-batch: a tensor, or any nest of containers that hold tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from ..errors import ConfigError

Change = Callable[[torch.Tensor], torch.Tensor]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device` (asynchronously from pinned memory); containers keep their types.

    Raises:
        ConfigError: see `map_tensors`.
    """
    return map_tensors(
        batch, lambda tensor: tensor.to(device, non_blocking=True), convert=lambda holder: holder.to(device)
    )


def map_tensors(batch: Any, change: Change, convert: Callable[[Any], Any] | None = None) -> Any:
    """The batch with `change(tensor)` in place of each tensor, in new containers of the same types.

    Mappings, lists, tuples, named tuples and dataclasses are walked, frozen ones too; a dataclass is copied without a
    call of its constructor. The given batch is not changed.

    Args:
        convert: converts other objects that have a method `to` of their own, such as torch's `PackedSequence`; None
            leaves them as they are.

    Raises:
        ConfigError: a mapping with tensors can neither be copied nor rebuilt.
    """
    within = partial(map_tensors, change=change, convert=convert)
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, type):
        return batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: within(member) for key, member in batch.items()})
    if convert is not None and callable(getattr(batch, "to", None)):
        return convert(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(within, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(within, batch))
    if dataclasses.is_dataclass(batch):
        changed = copy.copy(batch)
        names = {field.name for field in dataclasses.fields(batch)} | set(getattr(batch, "__dict__", ()))
        for name in names:
            if hasattr(batch, name):
                object.__setattr__(changed, name, within(getattr(batch, name)))
        return changed
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors that `map_tensors` would change."""
    held: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    map_tensors(batch, note)
    return held


def _like(mapping: Mapping[Any, Any], members: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type with these members."""
    if type(mapping) is dict:
        return members
    try:
        if isinstance(mapping, MutableMapping):
            changed = copy.copy(mapping)
            for key, member in members.items():
                changed[key] = member
            return changed
        return type(mapping)(members)  # type: ignore[call-arg]
    except Exception as error:  # a user's class may raise anything
        if all(member is mapping[key] for key, member in members.items()):
            return mapping
        raise ConfigError(
            f"a batch holds a {type(mapping).__name__}, which cannot be copied with its tensors on another device: "
            f"{type(error).__name__}: {' '.join(str(error).split())}",
            "return a dict, a tuple or a dataclass from the task's collate",
        ) from error
