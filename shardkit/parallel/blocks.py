"""Which modules of a model are sharded, checkpointed and compiled as one unit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import ConfigError


def find_blocks(model: nn.Module, classes: Sequence[type[nn.Module]] = ()) -> list[nn.Module]:
    """The repeated blocks of a model, outermost first, none inside another.

    With `classes`: every module of one of these types. Without: the members of the longest `ModuleList` or
    `Sequential` whose members share one type (and have parameters). Empty when the model has no such list.
    """
    if classes:
        return outermost([m for m in model.modules() if isinstance(m, tuple(classes))])
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


def refuse_ties_across_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Sharding a block replaces its parameters, which would silently untie them from the same ones elsewhere.

    Raises:
        ConfigError: a parameter belongs to a block and to another one, or to the rest of the model.
    """
    owner = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    first: dict[int, tuple[str, int]] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            fqn, block = f"{prefix}.{name}".lstrip("."), owner.get(id(module), -1)
            seen_fqn, seen_block = first.setdefault(id(param), (fqn, block))
            if seen_block != block:
                raise ConfigError(
                    f"{seen_fqn} and {fqn} are one tied parameter in two blocks that are sharded apart",
                    "name block_classes that hold both, or neither; or set parallel.strategy to ddp or a ZeRO stage",
                )


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those that lie inside no other of them."""
    inner = {id(child) for m in modules for child in m.modules() if child is not m}
    return [m for m in modules if id(m) not in inner]
