"""Which modules of a model are sharded, checkpointed and compiled as one unit; and compiling them."""

from __future__ import annotations

import logging
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..config.schema import ActivationConfig, CompileConfig
from ..errors import ConfigError

_LOG = logging.getLogger(__name__)


def find_blocks(model: nn.Module, classes: Sequence[type[nn.Module]] = ()) -> list[nn.Module]:
    """The repeated blocks of a model in its order, none inside another; empty when it has none.

    With `classes`: every module of one of these types. Without: of every `ModuleList` and `Sequential` the members
    whose type occurs twice in it, an encoder's and a decoder's alike. A list inside a list's member never counts: ranks
    may call different members of it (experts), and what ranks call apart cannot be gathered together. Lists of single
    layers (`Linear`) count only where they are all of a list, in a model that has no other list: the longest.
    """
    if classes:
        return outermost([m for m in model.modules() if isinstance(m, tuple(classes))])
    stacks = list(_stacks(model))
    composite = {id(m) for stack in stacks for m in stack if any(True for _ in m.children())}
    return [m for m in model.modules() if id(m) in composite] or max(stacks, key=len, default=[])


def _stacks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Members of one type with parameters, for each list that lies in no member of another."""
    inside = [*module.children()]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        counted = Counter(type(m) for m in module)
        for repeated in (kind for kind, count in counted.items() if count > 1):
            members = [m for m in inside if type(m) is repeated]
            is_layer = not any(True for _ in members[0].children())
            # A list in a list is called by nobody: it has no forward.
            called = repeated.forward is not nn.Module.forward
            if any(True for _ in members[0].parameters()) and called and not (is_layer and len(members) < len(inside)):
                yield members
        # A Sequential calls each member, so one that occurs once is a part like any other.
        inside = [m for m in inside if counted[type(m)] == 1] if isinstance(module, nn.Sequential) else []
    for child in inside:
        yield from _stacks(child)


def chosen_by_data(model: nn.Module, blocks: Sequence[nn.Module]) -> set[str]:
    """Names of the trained parameters that a rank may leave out in a step: in lists (experts) that are no blocks.

    Such a list has two members of one type at least; every member of a `Sequential` is called.
    """
    whole = {id(block) for block in blocks}
    found: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            counted = Counter(type(m) for m in module.children())
            for name, member in module.named_children():
                if counted[type(member)] > 1 and id(member) not in whole:
                    found |= {f"{prefix}.{name}.{fqn}" for fqn, p in member.named_parameters() if p.requires_grad}
    return found


def describe_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """One line: `12 T5Block in encoder.block, 12 in decoder.block; 38 % of the parameters are in none: shared, …`."""
    if not blocks:
        return f"{type(model).__name__} has no blocks: it is one unit"
    names = {id(module): name.removeprefix("module.") for name, module in model.named_modules()}  # DDP's
    stacks = Counter((names[id(b)].rpartition(".")[0] or "the model", type(b).__name__) for b in blocks)
    listed = ", ".join(f"{count} {kind} in {where}" for (where, kind), count in stacks.items())
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside: Counter[str] = Counter()
    total = 0
    for name, param in model.named_parameters():
        numel = getattr(param, "ds_numel", param.numel())  # ZeRO-3 leaves none in the tensor itself
        total += numel
        if id(param) not in inside:
            outside[name.removeprefix("module.").rpartition(".")[0] or name] += numel
    shown = ", ".join(name for name, _ in outside.most_common(3)) + (", …" if len(outside) > 3 else "")
    rest = f"{sum(outside.values()) / max(total, 1):.0%} of the parameters are in none: {shown}"
    return f"{listed}; {rest if outside else 'every parameter is in one'}"


def refuse_ties_across_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Sharding a block replaces its parameters, which would silently untie them from the same ones elsewhere.

    Raises:
        ConfigError: a parameter belongs to a block and to another one, or to the rest of the model.
    """
    owner = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    first: dict[int, tuple[str, int]] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
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


ATTENTION = ("attention", "attn")


def chosen_blocks(model: nn.Module, blocks: Sequence[nn.Module], config: ActivationConfig) -> list[nn.Module]:
    """The blocks that `activation.block_classes` names, else the model's own.

    Raises:
        ConfigError: there are none.
    """
    names = set(config.block_classes)
    setting = f"activation.policy={config.policy}" if config.recomputes else f"activation.offload={config.offload}"
    if missing := names - {type(module).__name__ for module in model.modules()}:
        raise ConfigError(
            f"activation.block_classes names {', '.join(sorted(missing))}, of which {type(model).__name__} has none",
            f"name classes that it has: {_classes(model)}",
        )
    found = outermost([m for m in model.modules() if type(m).__name__ in names]) if names else list(blocks)
    if not found:
        raise ConfigError(
            f"{setting}, but {type(model).__name__} has no list of equal blocks",
            f"set activation.block_classes to one of its classes: {_classes(model)}",
        )
    return found


def attention_modules(blocks: Sequence[nn.Module], classes: Sequence[type[nn.Module]], policy: str) -> list[nn.Module]:
    """The attention inside each block, outermost: modules of `classes`, or whose class is named like attention.

    Raises:
        ConfigError: a block has none.
    """
    found = []
    for block in blocks:
        inside = outermost([m for m in block.modules() if m is not block and _is_attention(m, classes)])
        if not inside:
            wanted = ", ".join(c.__name__ for c in classes) or "named *attention* or *attn*"
            raise ConfigError(
                f"activation.policy={policy}, but {type(block).__name__} has no module {wanted} "
                f"among {_classes(block)}",
                "give the task an attention_classes attribute, or set activation.policy=selective_op",
            )
        found += inside
    return found


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], config: CompileConfig, device: torch.device) -> None:
    """Compile each block in place, or the whole model (by config, or when it has no blocks).

    One at a time: equal blocks share one compilation, and an engine's wrapping stays outside.

    Raises:
        ConfigError: no C++ compiler for code on CPU.
    """
    if not config.enabled:
        return
    if device.type == "cpu" and sys.platform != "win32" and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "compile.enabled=true, but no C++ compiler (g++ or clang++) is on PATH", "apt-get install g++"
        )
    if config.mode == "reduce-overhead" and device.type == "cuda":
        _LOG.warning("compile.mode=reduce-overhead keeps CUDA graphs, whose private memory pools raise the peak")
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        _LOG.warning("SyncBatchNorm layers communicate: each breaks the compiled graph in two")
    for module in (blocks if config.scope == "block" else ()) or [model]:
        module.compile(mode=None if config.mode == "default" else config.mode)


def outside_compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` run in Python where its module is compiled; what it calls is compiled."""
    disabled: Callable[..., Any] = torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call]
    return disabled


def _is_attention(module: nn.Module, classes: Sequence[type[nn.Module]]) -> bool:
    if classes:
        return isinstance(module, tuple(classes))
    return any(part in type(module).__name__.lower() for part in ATTENTION)


def _classes(module: nn.Module) -> str:
    """`Block ×4, LayerNorm ×9`: what can be named, in the order of its appearance."""
    inside = [m for m in module.modules() if m is not module and any(True for _ in m.parameters())]
    counted = Counter(type(m).__name__ for m in inside)
    return ", ".join(f"{name} ×{count}" for name, count in counted.items()) or "none with parameters"
