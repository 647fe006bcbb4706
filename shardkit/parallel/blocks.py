"""Find the modules that are sharded, checkpointed and compiled as one unit, and compile them."""

from __future__ import annotations

import logging
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..config.schema import ActivationConfig, CompileConfig
from ..errors import ConfigError

_LOG = logging.getLogger(__name__)
Kind = Literal["block", "shared", "tied", "rest"]
_VALUES_A_BYTE = {"packed": 2, "absmax": 0, "nested": 0}
"""Values that a byte stands for in the parameters of a layer in 4 bits (models/quantized.py), by parameter."""
OTHER_EXPERTS = {
    "is_transposed": "stores its weights transposed",
    "has_bias": "has biases",
    "has_post_expert_norm": "normalises what an expert returns",
}
"""Facts of transformers' modules of experts (`use_experts_implementation`) whose weights `model.quantize` does not
pack, in words."""
_PACKED_BLOCK = 64
"""Neighbouring values that share a scale by default (`model.quantize.block_size`)."""


def find_blocks(model: nn.Module, classes: Sequence[type[nn.Module]] = ()) -> list[nn.Module]:
    """The model's repeated blocks, in model order, none inside another; empty if there are none.

    With `classes`: every module of one of these types. Without: the members of every `ModuleList` and `Sequential`
    whose type occurs there more than once, in encoder and decoder alike. A list inside a member never counts: ranks
    may call different members of it (experts), and all ranks must gather a block together; nor does a list that is
    named so (`holds_experts`). A list of single layers (`Linear`) counts only if it holds nothing else and the model
    has no list of blocks; then the longest one does.
    """
    if classes:
        return outermost([m for m in model.modules() if isinstance(m, tuple(classes))])
    stacks = list(_stacks(model))
    composite = {id(m) for stack in stacks for m in stack if any(True for _ in m.children())}
    return [m for m in model.modules() if id(m) in composite] or max(stacks, key=len, default=[])


def holds_experts(name: str) -> bool:
    """Whether a list of modules is named as one of which the data choose members: `experts`, `shared_experts`."""
    return "expert" in name.rpartition(".")[2].lower()


def _stacks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """For each list of modules that is not inside a member of another list, yield its members of each repeated type."""
    lists = (nn.ModuleList, nn.ModuleDict)
    named = module.named_children()
    inside = [child for name, child in named if not (isinstance(child, lists) and holds_experts(name))]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        counted = Counter(plain_type(m) for m in module)
        for repeated in (kind for kind, count in counted.items() if count > 1):
            members = [m for m in inside if plain_type(m) is repeated]
            is_layer = not any(True for _ in members[0].children())
            # Nothing calls a list inside a list: it has no forward.
            called = repeated.forward is not nn.Module.forward
            if any(True for _ in members[0].parameters()) and called and not (is_layer and len(members) < len(inside)):
                yield members
        # A Sequential calls each member, so a type that occurs once is an ordinary part.
        inside = [m for m in inside if counted[plain_type(m)] == 1] if isinstance(module, nn.Sequential) else []
    for child in inside:
        yield from _stacks(child)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class that a module has in the model's code, of which FSDP2 makes a subclass."""
    kind = type(module)
    return kind.__mro__[2] if is_sharded(module) else kind


def is_sharded(module: nn.Module) -> bool:
    """Whether a module is a unit of FSDP2. It does not import FSDP2, which other engines do not need."""
    return type(module).__mro__[1].__name__ == "FSDPModule"


def chosen_by_data(model: nn.Module, blocks: Sequence[nn.Module]) -> set[str]:
    """Names of the trained parameters that a rank may not use in a step, because they are in `chosen_members`.

    A parameter with several names has the first of them, as in `named_parameters`.
    """
    ids = {id(param) for member in chosen_members(model, blocks).values() for param in member.parameters()}
    return {name for name, param in model.named_parameters() if id(param) in ids and param.requires_grad}


def chosen_members(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The members of lists (experts) that a rank may not call in a step, by name. They are no blocks and hold none.

    Such a list has at least two members of one type. A `Sequential` does not count, as it calls every member.
    """
    block_ids = {id(block) for block in blocks}
    members: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            counted = Counter(plain_type(m) for m in module.children())
            for name, member in module.named_children():
                if counted[plain_type(member)] > 1 and not any(id(inner) in block_ids for inner in member.modules()):
                    members[f"{prefix}.{name}" if prefix else name] = member
    return members


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_parts(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The parts of a model with several towers (vision, audio, language), by name; empty for every other model.

    A rank whose micro-batch has no picture skips the vision tower and its projector. A tower is a module that holds a
    stack of blocks and further layers of its own, such as an embedding: stages in a row (`layer1`, `layer2`) hold
    blocks alone, and every forward goes through them. Beside the towers, the parts are what the modules around them
    hold: projectors, a head, stacks of blocks of their own. An encoder-decoder of transformers calls both in every
    forward.
    """
    if any(getattr(getattr(m, "config", None), "is_encoder_decoder", None) is True for m in (model, *model.children())):
        return {}
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    stacks = {_stack_of(names[id(block)], modules) for block in blocks}
    tops = {stack: _top(stack, stacks) for stack in stacks}
    if len(stacks) < 2 or not any(_is_tower(modules[tops[stack]], modules[stack]) for stack in stacks):
        return {}
    around = {""} | {before for top in tops.values() for before in _above(top)}
    parts: dict[str, nn.Module] = {}
    for name, module in modules.items():  # parents come first
        parent = name.rpartition(".")[0]
        if name in around or not any(True for _ in module.parameters()):
            continue
        if parent in around and isinstance(module, (nn.ModuleList, nn.ModuleDict)) and name not in tops.values():
            around.add(name)  # nothing calls a list: its members are called
        elif parent in around:
            parts[name] = module
    return parts


def _above(name: str) -> list[str]:
    """The names of the modules around a module, outermost first, without the model itself."""
    words = name.split(".")
    return [".".join(words[:end]) for end in range(1, len(words))]


def _stack_of(block: str, modules: dict[str, nn.Module]) -> str:
    """The outermost list of equal modules around a block; the module around it if there is none."""
    for name in _above(block):
        module = modules[name]
        repeats = isinstance(module, (nn.ModuleList, nn.Sequential)) and Counter(map(plain_type, module))
        if repeats and max(repeats.values()) > 1:
            return name
    return block.rpartition(".")[0]


def _top(stack: str, stacks: Iterable[str]) -> str:
    """The outermost module around a stack that holds no other one."""
    others = [other for other in stacks if other != stack]
    above = [*_above(stack), stack] if stack else [stack]
    return next(name for name in above if not any(f"{other}.".startswith(f"{name}.") for other in others))


def _is_tower(top: nn.Module, stack: nn.Module) -> bool:
    in_stack = {id(param) for param in stack.parameters()}
    return not isinstance(top, _LISTS) and any(id(param) not in in_stack for param in top.parameters())


@dataclass(frozen=True, eq=False)
class Unit:
    """Modules whose parameters are sharded, gathered and freed together."""

    modules: tuple[nn.Module, ...]  # one module, or several that hold one tied parameter
    # "block"; "shared": a module inside several units; "tied": modules whose tied parameters would belong to several
    # units; "rest": the model with all other parameters
    kind: Kind
    names: tuple[str, ...] = ()  # the names of its parameters, as in `named_parameters`


def find_units(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Unit]:
    """Divide a model's parameters among units, for engines that shard by units; innermost units first, the model last.

    Each block is a unit. A module inside two units becomes a unit of its own. Modules of two units that have a
    parameter in common become one unit together. The model owns the other parameters.
    """
    users = _users(model, blocks)
    heads = {module: kind for module, (kind, _) in users.items() if kind is not None}
    holders: dict[int, list[nn.Module]] = defaultdict(list)
    for module in users:
        for param in module.parameters(recurse=False):
            holders[id(param)].append(module)
    groups: list[set[nn.Module]] = []
    for modules in holders.values():
        homes = {unit for module in modules for unit in ({module} if module in heads else users[module][1])}
        if len(homes) > 1:
            group = set(modules).union(*(earlier for earlier in groups if earlier & set(modules)))
            groups = [earlier for earlier in groups if not earlier & group] + [group]
    for group in groups:
        if any(inner in group for module in group for inner in module.modules() if inner is not module):
            raise _nested_tie(model, group)
    grouped = set().union(*groups)
    units = [Unit(tuple(module for module in users if module in group), "tied") for group in groups]
    units += [Unit((module,), kind) for module, kind in heads.items() if module not in grouped]
    return _innermost_first(model, units)


def _users(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, tuple[Kind | None, set[nn.Module]]]:
    """Map each module to its kind of unit, or None, and to the units that hold it; parents come before children."""
    parents: dict[nn.Module, list[nn.Module]] = {model: []}
    for module in model.modules():
        for child in module.children():
            parents.setdefault(child, []).append(module)
    users: dict[nn.Module, tuple[Kind | None, set[nn.Module]]] = {}
    for module in TopologicalSorter(parents).static_order():
        held_by: set[nn.Module] = set()
        for parent in parents[module]:  # the innermost units that hold the parent's parameters: itself, if it is one
            kind_of_parent, holders = users[parent]
            held_by |= holders if kind_of_parent is None else {parent}
        kind: Kind | None = None
        if module is model:
            kind = "rest"
        elif any(module is block for block in blocks):
            kind = "block"
        elif (
            len(held_by) > 1
            and type(module).forward is not nn.Module.forward
            and any(True for _ in module.parameters())
        ):
            kind = "shared"  # a list has no forward: its members are shared instead
        users[module] = kind, held_by
    return users


def _innermost_first(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Add the names of their parameters to the units, and sort them so that each unit comes after those inside it."""
    unit_of = {module: index for index, unit in enumerate(units) for module in unit.modules}
    names = {id(param): name for name, param in model.named_parameters()}
    inside: dict[int, set[int]] = {}
    owned: dict[int, list[str]] = {}
    for index, unit in enumerate(units):
        inside[index], waiting, seen = set(), list(unit.modules), set(unit.modules)
        param_ids: dict[int, None] = {}
        while waiting:
            module = waiting.pop()
            param_ids |= dict.fromkeys(map(id, module.parameters(recurse=False)))
            for child in module.children():
                if child in unit_of and child not in unit.modules:
                    inside[index].add(unit_of[child])
                elif child not in seen:
                    seen.add(child)
                    waiting.append(child)
        owned[index] = [names[key] for key in names if key in param_ids]
    try:
        order = list(TopologicalSorter(inside).static_order())
    except CycleError as error:
        raise _nested_tie(model, [module for index in error.args[1] for module in units[index].modules]) from None
    return [Unit(units[index].modules, units[index].kind, tuple(owned[index])) for index in order]


def _nested_tie(model: nn.Module, modules: Iterable[nn.Module]) -> ConfigError:
    """The error about a parameter that is tied between modules of which one is inside another."""
    names = {module: name for name, module in model.named_modules()}
    listed = ", ".join(sorted(names[module] or "the model" for module in modules))
    return ConfigError(
        f"a parameter is tied between modules of which one is inside another ({listed}), and a block is among them",
        "name block_classes that hold both, or neither; or set parallel.strategy to ddp or a ZeRO stage",
    )


def describe_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Describe a model's blocks: `12 T5Block in encoder.block, 12 in decoder.block; 38% of the parameters
    belong to no block: …`.

    For a model that is sharded by units, the line also names the units beside the blocks, and the share of each.
    """
    if not blocks:
        return f"{type(model).__name__} has no blocks: it is one unit"
    names = {id(module): name.removeprefix("module.") for name, module in model.named_modules()}  # DDP's
    stacks = Counter((names[id(b)].rpartition(".")[0] or "the model", plain_type(b).__name__) for b in blocks)
    listed = ", ".join(f"{count} {kind} in {path}" for (path, kind), count in stacks.items())
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for name, param in model.named_parameters():
        numel = n_values(name, param)
        sizes[name] = numel
        if id(param) not in inside:
            outside[name.removeprefix("module.").rpartition(".")[0] or name] += numel
    shown = ", ".join(name for name, _ in outside.most_common(3)) + (", …" if len(outside) > 3 else "")
    total = max(sum(sizes.values()), 1)
    outside_share = f"{sum(outside.values()) / total:.0%} of the parameters belong to no block: {shown}"
    units = find_units(model, blocks) if is_sharded(model) else []
    apart = "".join(
        f"; {unit.kind}: {' + '.join(names[id(module)] for module in unit.modules)}"
        f" ({sum(sizes[name] for name in unit.names) / total:.0%})"
        for unit in units
        if unit.kind in ("shared", "tied")
    )
    return f"{listed}; {outside_share if outside else 'every parameter is in a block'}{apart}"


def n_values(name: str, param: torch.Tensor) -> int:
    """The number of values that a parameter stands for: two in each byte of a packed weight, none in its scales."""
    in_tensor = int(getattr(param, "ds_numel", param.numel()))  # under ZeRO-3 the tensor itself is empty
    a_byte = _VALUES_A_BYTE.get(name.rpartition(".")[2], 1) if param.dtype == torch.uint8 else 1
    return a_byte * in_tensor


def packable_values(blocks: Sequence[nn.Module]) -> tuple[int, int]:
    """The values that `model.quantize` would pack in the blocks' frozen linear layers, and in their frozen experts that
    are 3-D parameters; (0, 0) if it refuses one."""
    modules = [module for block in blocks for module in block.modules()]
    linear = [m.weight for m in modules if type(m) is nn.Linear]
    experts = [
        param
        for module in modules
        if getattr(module, "has_gate", False) and not any(getattr(module, fact, False) for fact in OTHER_EXPERTS)
        for param in module.parameters(recurse=False)
        if param.dim() == 3
    ]
    frozen = [[weight for weight in weights if not weight.requires_grad] for weights in (linear, experts)]
    if any(weight.shape[-1] % _PACKED_BLOCK for weights in frozen for weight in weights):
        return 0, 0
    in_linear, in_experts = (sum(n_values("weight", weight) for weight in weights) for weights in frozen)
    return in_linear, in_experts


def packable_shares(model: nn.Module) -> tuple[float, float]:
    """The shares of the model's values that `packable_values` counts; 0 if a parameter has no size yet."""
    if any(is_lazy(param) for param in model.parameters()):
        return 0.0, 0.0
    everything = sum(n_values(name, param) for name, param in model.named_parameters())
    in_linear, in_experts = packable_values(find_blocks(model))
    return in_linear / max(everything, 1), in_experts / max(everything, 1)


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those of the modules that are not inside another one of them."""
    inner = {id(child) for m in modules for child in m.modules() if child is not m}
    return [m for m in modules if id(m) not in inner]


ATTENTION = ("attention", "attn")


def chosen_blocks(model: nn.Module, blocks: Sequence[nn.Module], config: ActivationConfig) -> list[nn.Module]:
    """The blocks that `activation.block_classes` names, else the model's own."""
    names = set(config.block_classes)
    setting = f"activation.policy={config.policy}" if config.recomputes else f"activation.offload={config.offload}"
    if missing := names - {type(module).__name__ for module in model.modules()}:
        raise ConfigError(
            f"activation.block_classes names {', '.join(sorted(missing))}, but {type(model).__name__} has none",
            f"name classes that it has: {_classes(model)}",
        )
    chosen = outermost([m for m in model.modules() if type(m).__name__ in names]) if names else list(blocks)
    if not chosen:
        raise ConfigError(
            f"{setting}, but {type(model).__name__} has no list of equal blocks",
            f"set activation.block_classes to one of its classes: {_classes(model)}",
        )
    return chosen


def attention_modules(blocks: Sequence[nn.Module], classes: Sequence[type[nn.Module]], policy: str) -> list[nn.Module]:
    """The outermost attention modules of each block: those of `classes`, or else those with attention or attn in the
    name of their class."""
    attention = []
    for block in blocks:
        inside = outermost([m for m in block.modules() if m is not block and _is_attention(m, classes)])
        if not inside:
            criteria = ", ".join(c.__name__ for c in classes) or "named *attention* or *attn*"
            raise ConfigError(
                f"activation.policy={policy}, but {type(block).__name__} has no module {criteria} "
                f"among {_classes(block)}",
                "give the task an attention_classes attribute, or set activation.policy=selective_op",
            )
        attention += inside
    return attention


def compile_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    config: CompileConfig,
    device: torch.device,
    hooks_outside: bool = False,
) -> None:
    """Compile each block in place, or the whole model if the config says so or it has no blocks.

    Blocks are compiled one by one, so that equal ones share one compilation and an engine's wrapping stays outside.
    `hooks_outside`: leave the hooks of the compiled modules out of the compilation.
    """
    if not config.enabled:
        return
    if device.type == "cpu" and sys.platform != "win32" and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "compile.enabled=true, but no C++ compiler (g++ or clang++) is on PATH", "apt-get install g++"
        )
    if config.keeps_graphs and device.type == "cuda":
        _LOG.warning(f"compile.mode={config.mode} keeps CUDA graphs, whose private memory pools raise the peak")
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        _LOG.warning("SyncBatchNorm layers communicate: each breaks the compiled graph in two")
    mode = None if config.mode == "default" else config.mode
    wrapped = {module: vars(module)["forward"] for module in model.modules() if "forward" in vars(module)}
    wrapped = {module: forward for module, forward in wrapped.items() if isinstance(forward, Around)}
    for module, forward in wrapped.items():
        forward.compile_inner(mode)
        module.forward = torch.compiler.disable(forward.__call__)  # type: ignore[no-untyped-call]
    for module in (blocks if config.scope == "block" else ()) or [model]:
        if module in wrapped:
            continue
        if hooks_outside:
            module.forward = torch.compile(module.forward, mode=mode)
        else:
            module.compile(mode=mode)


def release_graph_outputs() -> None:
    """Let CUDA graphs overwrite their earlier outputs. Call it before each step and each forward of an evaluation.

    Otherwise torch guesses where a step begins: without a backward, each compiled block would count as a step and
    invalidate the outputs of the block before it. Gradients live in the graphs' memory too, so this must not be called
    between the micro-batches of a step.
    """
    if "torch._inductor.cudagraph_trees" in sys.modules:  # only compiled code loads it
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


class Around:
    """A `forward` that calls `outer(inner, *args)` in plain Python, so that torch.compile compiles `inner` alone.

    Forward and a recomputation then run the same compiled code, and the bookkeeping in `outer` is not compiled again
    and again.
    """

    def __init__(self, outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
        self.outer, self.inner = outer, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.outer(self.inner, *args, **kwargs)

    def compile_inner(self, mode: str | None) -> None:
        if isinstance(self.inner, Around):
            self.inner.compile_inner(mode)
        else:
            self.inner = torch.compile(self.inner, mode=mode)


def _is_attention(module: nn.Module, classes: Sequence[type[nn.Module]]) -> bool:
    if classes:
        return isinstance(module, tuple(classes))
    return any(part in type(module).__name__.lower() for part in ATTENTION)


def _classes(module: nn.Module) -> str:
    """The classes inside a module that have parameters, in order of appearance: `Block ×4, LayerNorm ×9`."""
    inside = [m for m in module.modules() if m is not module and any(True for _ in m.parameters())]
    counted = Counter(type(m).__name__ for m in inside)
    return ", ".join(f"{name} ×{count}" for name, count in counted.items()) or "none with parameters"
