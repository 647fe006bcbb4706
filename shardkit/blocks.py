"""Which modules of a model are sharded, checkpointed and compiled as one unit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def find_blocks(model: nn.Module, classes: Sequence[type[nn.Module]] = ()) -> list[nn.Module]:
    """The repeated blocks of a model, outermost first, none inside another.

    With `classes`: every module of one of these types. Without: the members of the longest `ModuleList` or
    `Sequential` whose members share one type (and have parameters). Empty when the model has no such list.
    """
    if classes:
        return _outermost([m for m in model.modules() if isinstance(m, tuple(classes))])
    best: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        members = list(module)
        if (
            len({type(m) for m in members}) == 1
            and any(True for _ in members[0].parameters())
            and len(members) > len(best)
        ):
            best = members
    return best


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for m in modules for child in m.modules() if child is not m}
    return [m for m in modules if id(m) not in inner]
