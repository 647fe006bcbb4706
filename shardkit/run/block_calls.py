"""Check that all ranks call the same blocks and use the same parameters, where an engine pairs their gathers."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..config.schema import SHARDING, RunConfig, StrategyName
from ..errors import ConfigError, listed
from ..parallel.blocks import chosen_by_data, chosen_members, find_parts, is_sharded, plain_type
from ..parallel.world import World
from ..strategies import Strategy
from ..strategies.step import GatherWaits

FIRST_STEPS = 2
"""Steps in which ranks compare their calls before an engine pairs their gathers, which it does by order alone."""
_END = "the end of forward"
Loss = TypeVar("Loss")


class BlockCalls:
    """Checks that all ranks call the same blocks, where an engine pairs their gathers by order.

    In the first two steps the ranks compare every call of a gathered module before the call, and before backward the
    parameters that the loss depends on. Later each rank only notes its calls: `flags` sends a checksum of them, and of
    the parameters that got no gradient, with the step's reduction. For compiled blocks only the parameters of the loss
    are compared, since hooks on their modules would be compiled with them. `strategy`: the engine, which is set up.
    `blocks`: the model's repeated blocks by name.
    """

    def __init__(self, strategy: Strategy, blocks: Mapping[str, nn.Module], config: RunConfig, world: World) -> None:
        model, facts = strategy.model, strategy.facts
        self._engine, self._blocks, self._model, self._world = strategy, [*blocks.values()], model, world
        self._order = [*blocks]
        self._strategy, self._facts = config.parallel.strategy, facts
        self._step = 1
        self._called: list[int] = []
        self._forwards = 0
        self._names = {id(module): plain(name) or "the model" for name, module in model.named_modules()}
        alone, self._compiles = world.size == 1, config.compile.enabled
        compiles = self._compiles
        parts = {} if alone or config.parallel.find_unused is False else find_parts(model, self._blocks)
        # ZeRO-1 and 2 gather nothing in forward, and reduce in one order what a rank of a model with towers lacks.
        is_paired = facts.needs_same_calls and (facts.shards_parameters or not parts)
        self._same_calls = not alone and is_paired and not compiles
        self._same_uses = not alone and not facts.reduces_missing_grads
        sharded = [module for module in model.modules() if is_sharded(module)]
        gathering = [*model.modules()] if facts.gathers_by_layer else sharded
        unknown = compiles and bool(gathering) and not alone  # hooks would be compiled with the blocks
        # the waits of forward for gathered parameters
        self.waits = GatherWaits(None if unknown else [] if alone else gathering, world.device)
        counts_as_zero = facts.counts_unused_as_zero
        # names of the parameters that ranks may use differently
        self.may_differ = {plain(fqn) for fqn in chosen_by_data(model, self._blocks)} if counts_as_zero else set[str]()
        if parts and facts.needs_same_calls:
            self.may_differ = {plain(fqn) for fqn, param in model.named_parameters() if param.requires_grad}
        # ZeRO-3 gathers such a member whole, fsdp by units of its own.
        members = chosen_members(model, self._blocks).values() if counts_as_zero and not sharded else ()
        self._not_gathered_alone = {id(module) for member in members for module in member.modules()}
        self._differing_blocks: list[nn.Module] = []
        # names of the parameters that ranks were found to use differently, in blocks that every rank calls
        self.allowed: set[str] = set()
        self._allows = counts_as_zero
        self._rows = RowChoice(blocks if self._allows and not compiles and not alone else {})
        self._gathers_with_block = counts_as_zero and facts.gathers_by_layer
        self._modules = {plain(name): module for name, module in model.named_modules(remove_duplicate=False)}
        self._leaves = {id(param): plain(name) for name, param in model.named_parameters()}
        self._hooks: list[Any] = []
        self._counts_forwards = facts.hooks_model and not compiles
        if self._counts_forwards:
            self._hooks.append(model.register_forward_pre_hook(self._count_forward))
        if self._same_calls:
            for index, block in enumerate(self._blocks):
                block.register_forward_pre_hook(partial(self._note, index), prepend=True)
            gathered = [module for module in sharded if not strategy.is_held(module)]
            for module in gathered or self._callable(model):
                # Prepended after the engine's own hooks: it runs before their gather.
                self._hooks.append(module.register_forward_pre_hook(self._compare_call, prepend=True))
        self._parts = {plain(name): part for name, part in parts.items()} if facts.shards_parameters else {}
        self._in_forward = False
        self._inside = ""
        """The part in which this rank is; empty outside of all."""
        if self._parts:
            self._watch_parts(model, gathering)
        if self._same_uses and not compiles:
            self._hooks += [module.register_forward_pre_hook(self._note_leaves) for module in sharded]

    def _callable(self, model: nn.Module) -> list[nn.Module]:
        """Modules that may be called separately, and for ZeRO-3 every layer, which it gathers by itself."""
        lists = (m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict)))
        members = [child for holder in lists for child in holder.children() if any(True for _ in child.parameters())]
        if self._facts.gathers_by_layer:
            members += [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        callable_modules = {id(m): m for m in [model, *self._blocks, *members]}
        return [m for key, m in callable_modules.items() if key not in self._not_gathered_alone]

    def _watch_parts(self, model: nn.Module, gathering: Sequence[nn.Module]) -> None:
        """Compare ranks at the entry of each part that gathers, and at the end of each forward, in every step.

        A call inside a part that is not running is an entry too, by the name of what is called: an embedding of a
        language model, before that itself is called.
        """
        model.register_forward_pre_hook(self._begin_forward)
        model.register_forward_hook(self._end_parts)
        gathering_ids = {id(module) for module in gathering if any(True for _ in module.parameters())}
        for name, part in self._parts.items():
            inside = [module for module in part.modules() if id(module) in gathering_ids and module is not part]
            if not inside and id(part) not in gathering_ids:
                continue
            # A stack of blocks that no module calls has no end: it is left where another part is entered.
            callable_part = not isinstance(part, (nn.ModuleList, nn.ModuleDict))
            if callable_part:  # hooks on compiled blocks would be compiled with them
                inside = [part, *(() if self._compiles else inside)]
            for module in inside:
                entry = self._names[id(module)] if callable_part and self._facts.gathers_by_layer else name
                enter = torch.compiler.disable(partial(self._enter, entry))  # type: ignore[no-untyped-call]
                module.register_forward_pre_hook(enter, prepend=True)
                if callable_part:
                    leave = torch.compiler.disable(partial(self._leave, entry, module))  # type: ignore[no-untyped-call]
                    module.register_forward_hook(leave, always_call=True)

    def _begin_forward(self, *_: Any) -> None:
        self._in_forward, self._inside = True, ""

    def _enter(self, entry: str, module: nn.Module, *_: Any) -> None:
        is_running = self._inside != "" and (entry == self._inside or entry.startswith(f"{self._inside}."))
        if self._in_forward and not is_running:
            if not self._engine.is_held(module) and not self._engine.is_held(self._parts.get(entry, module)):
                self._compare(entry, enters=True)
            self._inside = entry

    def _leave(self, entry: str, module: nn.Module, *_: Any) -> None:
        if self._inside == entry and module is self._parts.get(entry, module):
            self._inside = ""

    def _end_parts(self, *_: Any) -> None:
        self._compare(_END)
        self._in_forward = False
        if not torch.is_grad_enabled():
            self._engine.release()

    def _numel(self, name: str) -> int:
        return sum(int(getattr(param, "ds_numel", param.numel())) for param in self._modules[name].parameters())

    @property
    def last_called(self) -> str:
        """Name of the block that this rank called last; empty before the first call, and where no engine compares."""
        return self._order[self._called[-1]] if self._called else ""

    def _note(self, index: int, block: nn.Module, *_: Any) -> None:
        if block.training and not self._engine.is_held(block):
            self._called.append(index)

    def _count_forward(self, *_: Any) -> None:
        self._forwards += 1

    def _compare_call(self, module: nn.Module, *_: Any) -> None:
        if module.training and id(module) not in self._not_gathered_alone and not self._engine.is_held(module):
            self._compare(self._names[id(module)])

    def _note_leaves(self, module: nn.Module, *_: Any) -> None:
        """Note the names of the parameters that FSDP2 has just gathered."""
        prefix = "" if module is self._model else self._names[id(module)] + "."
        self._leaves |= {id(param): prefix + name for name, param in module.named_parameters()}

    def _compare(self, name: str, enters: bool = False) -> None:
        """Raise on every rank if the ranks are at different calls; collective.

        A part that some rank enters is gathered by all of them. Calls inside a block may differ where the engine can
        gather that part of the block on every rank. Then this rank's next call is compared with those of the others.
        `enters`: this is the entry of a part of a model with towers.
        """
        while not self._agreed(f"{name} {enters}"):
            called: list[Any] = self._world.gather((name, enters))
            names = [str(called_name) for called_name, _ in called]
            entered = [called_name for called_name, is_entry in called if is_entry]
            # The smallest of these modules is next: every rank gathers it, and the others wait for their turn.
            entry = min(entered, key=lambda name: (self._numel(name), name), default=None)
            if entry is not None:
                self._engine.hold(self._modules[entry])
                if name == entry:
                    return
                continue
            parts = self._parts_of_blocks(names)
            if not parts or not self._gathers_with_block:
                raise self._refusal(names)
            for block, part in parts:
                self._engine.gather_with_block(self._modules[block], self._modules[part])
                self._not_gathered_alone |= {id(module) for module in self._modules[part].modules()}
                self._differing_blocks.append(self._modules[block])
            if any(name == part or name.startswith(f"{part}.") for _, part in parts):
                return

    def _parts_of_blocks(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """(block, child of the block) for each of these modules that is inside a block, once."""
        parts: dict[str, str] = {}
        for name in names:
            block = next((block for block in self._order if name.startswith(f"{block}.")), None)
            if block is not None:
                parts[f"{block}.{name.removeprefix(f'{block}.').partition('.')[0]}"] = block
        return [(block, part) for part, block in parts.items()]

    def _agreed(self, text: str) -> bool:
        number = float(zlib.crc32(text.encode()) & 0xFFFFF)
        return self._equal(*self._world.sum([number, number * number]))

    def _equal(self, total: float, squares: float) -> bool:
        """Whether the numbers of all ranks are equal, from their sum and the sum of their squares."""
        return int(squares) * self._world.size == int(total) ** 2

    def _refusal(self, names: list[str]) -> ConfigError:
        rank = next(rank for rank, name in enumerate(names) if name != names[0])
        shared = [class_name for name in names if (class_name := self._shared_class(name))]
        at = [f"is at {name}" if name == _END else f"calls {name}" for name in names]
        return ConfigError(
            f"rank 0 {at[0]} where rank {rank} {at[rank]} (step {self._step}): "
            f"parallel.strategy={self._strategy} needs every rank to call the same blocks, in the same order",
            advice(self._strategy, shared[0] if shared else None),
        )

    def _shared_class(self, name: str) -> str | None:
        """Class of the module around a list's member, which every rank calls; None if that is the whole model."""
        modules, parts = self._modules, name.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts))]
        lists = [path for path in paths if isinstance(modules.get(path), (nn.ModuleList, nn.ModuleDict))]
        if len(lists) > 1:  # the member of the outer list
            return plain_class(modules[paths[paths.index(lists[0]) + 1]])
        holder = lists[0].rpartition(".")[0] if lists else ""
        return plain_class(modules[holder]) if holder else None

    def around(self, loss: Callable[..., Loss]) -> Callable[..., Loss]:
        """The loss function; in the first steps it ends by comparing its calls and the parameters it depends on."""

        def compared(*args: Any) -> Loss:
            self._forwards = 0
            try:
                total = loss(*args)
            except RuntimeError as error:  # a layer cannot compute with a shard
                if self._step <= FIRST_STEPS:
                    self._refuse_parts(error)
                explained = self._engine.explained(error)
                if isinstance(explained, ConfigError) and self._same_calls and self._step <= FIRST_STEPS:
                    self._compare(explained.cause)  # a rank that came past it waits for this one's next call
                raise explained from error
            if self._step > FIRST_STEPS:
                return total
            self._refuse_parts(None)
            if self._same_calls:
                self._compare(_END)
                self._end_forward()
            if self._same_uses:
                self._compare_uses(total)
            return total

        return self.waits.around(compared)

    def _end_forward(self) -> None:
        """From now on the blocks of which ranks use different parts are gathered whole: no call inside is compared."""
        for block in self._differing_blocks:
            self._not_gathered_alone |= {id(module) for module in block.modules() if module is not block}
        self._differing_blocks.clear()

    def compare_reach(self, words: str) -> None:
        """Raise on every rank unless all ranks have just found the same part used outside of its block; collective."""
        if self._same_calls and self._model.training and self._step <= FIRST_STEPS:
            self._compare(words)

    def _refuse_parts(self, error: RuntimeError | None) -> None:
        if self._counts_forwards and not self._forwards:
            raise ConfigError(
                f"the loss did not call the model, only parts of it: parallel.strategy={self._strategy} hooks into "
                "the call of the whole model",
                "call model(...) in the loss; give its forward an argument that selects the part to compute",
            ) from error

    def _compare_uses(self, loss: Any) -> None:
        used = {self._leaves.get(id(leaf)) for leaf in leaves_of(loss)} - {None} - self.may_differ
        rows = {name: names for name in self._rows.modules if (names := self._trained_in(name) - self.may_differ)}
        reports: list[Any] = [(used, rows)]
        if not self._agreed("\n".join([*sorted(map(str, used)), *sorted(rows)])):
            reports = self._world.gather((used, rows))
        sets = [names for names, _ in reports]
        different = set.union(*sets) - set.intersection(*sets)
        if different and (not self._allows or not self._is_part_of_blocks(different)):
            raise self._different_uses(sets)
        for name in sorted(set().union(*(parts for _, parts in reports))):
            different |= self._trained_in(name)
            if self._gathers_with_block:
                block = next(block for block in self._order if name.startswith(f"{block}."))
                self._engine.gather_with_block(self._modules[block], self._modules[name])
                self._differing_blocks.append(self._modules[block])
        if different and self._allows:
            self._engine.allow_differing_use(different)
            self.may_differ |= different
            self.allowed |= different
            self._end_forward()

    def _trained_in(self, name: str) -> set[str]:
        """Names of the trained parameters of a module."""
        inside = {id(param) for param in self._modules[name].parameters()}
        return {plain(fqn) for fqn, p in self._model.named_parameters() if id(p) in inside and p.requires_grad}

    def _is_part_of_blocks(self, names: set[Any]) -> bool:
        """Whether these are parameters of the model, and no block has only such ones: a rank skips it then."""
        trained = {id(p): plain(fqn) for fqn, p in self._model.named_parameters() if p.requires_grad}
        in_blocks = [{trained[id(p)] for p in block.parameters() if id(p) in trained} for block in self._blocks]
        return names <= {*trained.values()} and not any(inside and inside <= names for inside in in_blocks)

    def _different_uses(self, sets: list[Any]) -> ConfigError:
        """The error for ranks whose losses depend on these sets of parameters, which differ."""
        common = set.intersection(*sets)
        extra = [sorted(names - common) for names in sets]
        rank = next(rank for rank, names in enumerate(extra) if names)
        ranks_without = [index for index, names in enumerate(sets) if not set(extra[rank]) <= names]
        return ConfigError(
            f"the loss of rank {rank} depends on {len(extra[rank])} parameters that rank {ranks_without[0]}'s does not "
            f"depend on (step {self._step}: {listed(extra[rank])}): parallel.strategy={self._strategy} needs "
            "the same on every rank",
            advice(self._strategy, self._shared_class(extra[rank][0])),
        )

    def flags(self) -> list[float]:
        """Two numbers for this step's calls; their sums over all ranks go to `agree`."""
        number = float(zlib.crc32(f"{self._called} {self._unused_alike()}".encode()) & 0xFFFFF)
        return [number, number * number]

    def _unused_alike(self) -> list[str]:
        """The parameters to which this rank gave no gradient in this step, without those that ranks may choose."""
        return [name for name in self._engine.unused() if name not in self.may_differ]

    def agree(self, sums: Sequence[float]) -> None:
        """Compare this step's calls by the sums of `flags`, and begin the next step; collective if they differ."""
        called, self._called = self._called, self._called[-1:]
        if not self._equal(*sums):
            everyone: list[Any] = self._world.gather(([self._order[index] for index in called], self._unused_alike()))
            calls, unused = [names for names, _ in everyone], [set(names) for _, names in everyone]
            indices = range(len(called) + 1)
            at = next((i for i in indices if len({tuple(names[i : i + 1]) for names in calls}) > 1), None)
            if at is None:
                raise self._different_uses([set().union(*unused) - names for names in unused])
            raise self._refusal([(names[at : at + 1] or [_END])[0] for names in calls])
        self._step += 1
        if self._step == FIRST_STEPS + 1:
            self._rows.remove()
            for hook in self._hooks:
                hook.remove()
            self._leaves.clear()


def advice(strategy: StrategyName, shared: str | None) -> str:
    """The fix for a model whose ranks use different parts.

    `shared`: name of a class around those parts that every rank calls; `None` if there is none.
    """
    if strategy == "ddp":  # the words name settings, which differ by the name of the strategy
        return "remove parallel.find_unused"
    ddp = "set parallel.strategy=ddp"
    from ..strategies.reach import REDUCES_UNUSED  # imports FSDP2, which only this error needs

    counts_as_zero = SHARDING[strategy].stage > 0 or REDUCES_UNUSED
    return f"name block_classes that every rank calls ({shared}), or {ddp}" if shared and counts_as_zero else ddp


def leaves_of(loss: Any) -> Iterator[torch.Tensor]:
    """The tensors to which backward of this loss gives gradients."""
    waiting = [getattr(loss, "grad_fn", None)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [after for after, _ in node.next_functions]


def plain(fqn: str) -> str:
    """A name without engines' prefixes."""
    return fqn.removeprefix("module.")


def plain_class(module: nn.Module) -> str:
    """Name of a module's class in the model's code."""
    return plain_type(module).__name__


class RowChoice:
    """Notes modules inside blocks that are called with fewer rows than their block, and otherwise with its shape.

    Such a module is a branch for some rows: in another step a rank may have none for it. `blocks`: by name.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.modules: dict[str, str] = {}  # names of the modules → names of their blocks
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
