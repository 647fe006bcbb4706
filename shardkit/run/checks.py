"""Checks of a wrapped model: ranks call the same blocks and use the same parameters, the state's dtypes, and the
origin of a gradient that is not finite."""

from __future__ import annotations

import json
import logging
import math
import platform
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from statistics import pvariance
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..config.capability import CAPABILITIES, ZERO
from ..config.libraries import is_first_rank
from ..config.schema import ParallelConfig, PrecisionConfig, RunConfig, StrategyName
from ..errors import ConfigError, DataError, gib
from ..memory.rows import KINDS
from ..memory.state import local_tensors
from ..parallel.blocks import chosen_by_data, chosen_members, is_sharded, may_leave_out, plain_type
from ..parallel.compat import graph_breaks
from ..parallel.precision import master_dtype
from ..parallel.world import World
from ..strategies import Strategy
from ..strategies.clocks import GatherWaits, HostValue
from ..strategies.step import one_number
from .not_finite import listed

if TYPE_CHECKING:
    from ..strategies.reach import Reach
    from ..strategies.unused import UnusedParameters

SHOWN = 4
FIRST_STEPS = 2
"""Steps in which ranks compare their calls before an engine pairs their gathers, which it does by order alone."""
_END = "the end of forward"
_SUMS_MIN, _SUMS_MAX, _SUMS_SPREAD = 8, 64, 1.5
_LOG = logging.getLogger(__name__)
Loss = TypeVar("Loss")


class BlockCalls:
    """Checks that all ranks call the same blocks, if an engine gathers these.

    In the first two steps ranks compare each call of a gathered module before the call, and before backward the
    parameters that the loss depends on. Later a call is only noted in a list, whose `flags` ride in the step's
    reduction, with the parameters that got no gradient where the engine knows them. Compiled blocks get the second
    check alone: the hooks of the others would be compiled with them.

    Attributes:
        blocks: the model's repeated blocks.
        waits: the waits of forward for gathered parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        config: RunConfig,
        world: World,
        reach: Reach | None = None,
        unused: UnusedParameters | None = None,
    ) -> None:
        self.blocks, self._model, self._world, self._unused = blocks, model, world, unused
        self._strategy = config.parallel.strategy
        self._step = 1
        self._called: list[int] = []
        self._forwards = 0
        self._names = {id(module): plain(name) or "the model" for name, module in model.named_modules()}
        self._order = [self._names[id(block)] for block in blocks]
        alone = world.size == 1
        self._same_calls = not alone and self._strategy not in ("single", "ddp") and not config.compile.enabled
        # DDP gathers nothing; where it looks for unused parameters, it averages gradients that some ranks lack.
        find_unused = config.parallel.find_unused
        finds_unused = self._strategy == "ddp" and may_leave_out(find_unused, model, blocks)
        self._same_uses = not alone and not finds_unused
        sharded = [module for module in model.modules() if is_sharded(module)]
        self._explain = reach is not None
        gathering = [*model.modules()] if self._strategy == "zero3" else sharded
        unknown = config.compile.enabled and bool(gathering) and not alone  # hooks would be compiled with the blocks
        self.waits = GatherWaits(None if unknown else [] if alone else gathering, world.device)
        is_zero = self._strategy in ZERO
        counts_as_zero = find_unused is not False if is_zero else bool(sharded) and _fsdp_reduces_unused()
        self._may_differ = {plain(fqn) for fqn in chosen_by_data(model, blocks)} if counts_as_zero else set[str]()
        members = chosen_members(model, blocks).values() if counts_as_zero and is_zero else ()
        self._not_gathered_alone = {id(module) for member in members for module in member.modules()}
        self._leaves = {id(param): plain(name) for name, param in model.named_parameters()}
        self._hooks: list[Any] = []
        self._counts_forwards = self._strategy != "single" and not config.compile.enabled
        if self._counts_forwards:
            self._hooks.append(model.register_forward_pre_hook(self._count_forward))
        if self._same_calls:
            for index, block in enumerate(blocks):
                block.register_forward_pre_hook(partial(self._note, index), prepend=True)
            gathered = [module for module in sharded if reach is None or not reach.is_held(module)]
            for module in gathered or self._callable(model):
                # Prepended after the engine's own hooks: it runs before their gather.
                self._hooks.append(module.register_forward_pre_hook(self._compare_call, prepend=True))
        if self._same_uses and not config.compile.enabled:
            self._hooks += [module.register_forward_pre_hook(self._note_leaves) for module in sharded]

    def _callable(self, model: nn.Module) -> list[nn.Module]:
        """Modules that may be called separately, and for ZeRO-3 every layer, which it gathers by itself."""
        lists = (m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict)))
        found = [child for each in lists for child in each.children() if any(True for _ in child.parameters())]
        if self._strategy == "zero3":
            found += [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        callable_modules = {id(m): m for m in [model, *self.blocks, *found]}
        return [m for key, m in callable_modules.items() if key not in self._not_gathered_alone]

    @property
    def last(self) -> str:
        """Name of the block that this rank called last; empty before the first call, and where no engine compares."""
        return self._order[self._called[-1]] if self._called else ""

    def _note(self, index: int, block: nn.Module, *_: Any) -> None:
        if block.training:
            self._called.append(index)

    def _count_forward(self, *_: Any) -> None:
        self._forwards += 1

    def _compare_call(self, module: nn.Module, *_: Any) -> None:
        if module.training:
            self._compare(self._names[id(module)])

    def _note_leaves(self, module: nn.Module, *_: Any) -> None:
        """Note the names of the parameters that FSDP2 has just gathered."""
        prefix = "" if module is self._model else self._names[id(module)] + "."
        self._leaves |= {id(param): prefix + name for name, param in module.named_parameters()}

    def _compare(self, name: str) -> None:
        """Raise on every rank if the ranks are not at the same place; collective."""
        if self._agreed(name):
            return
        raise self._refusal([str(said) for said in self._world.gather(name)])

    def _agreed(self, what: str) -> bool:
        number = float(zlib.crc32(what.encode()) & 0xFFFFF)
        return self._equal(*self._world.sum([number, number * number]))

    def _equal(self, total: float, squares: float) -> bool:
        """Whether the numbers of all ranks are equal, from their sum and the sum of their squares."""
        return int(squares) * self._world.size == int(total) ** 2

    def _refusal(self, said: list[str]) -> ConfigError:
        other = next(rank for rank, name in enumerate(said) if name != said[0])
        shared = [found for name in said if (found := self._shared_class(name))]
        at = [f"is at {name}" if name == _END else f"calls {name}" for name in said]
        return ConfigError(
            f"rank 0 {at[0]} where rank {other} {at[other]} (step {self._step}): "
            f"parallel.strategy={self._strategy} needs every rank to call the same blocks, in the same order",
            advice(self._strategy, shared[0] if shared else None),
        )

    def _shared_class(self, name: str) -> str | None:
        """Class of the module around a list's member, which every rank calls; None if that is the whole model."""
        modules = {plain(fqn): module for fqn, module in self._model.named_modules()}
        parts = name.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts))]
        lists = [path for path in paths if isinstance(modules.get(path), (nn.ModuleList, nn.ModuleDict))]
        if len(lists) > 1:  # the member of the outer list
            return plain_class(modules[paths[paths.index(lists[0]) + 1]])
        holder = lists[0].rpartition(".")[0] if lists else ""
        return plain_class(modules[holder]) if holder else None

    def around(self, loss: Callable[..., Loss]) -> Callable[..., Loss]:
        """`loss`; in the first steps it ends by comparing its calls and the parameters that it depends on.

        Raises (from the loss):
            ConfigError: ranks differ, or the loss bypassed the wrapped model.
        """

        def compared(*args: Any) -> Loss:
            self._forwards = 0
            try:
                found = loss(*args)
            except RuntimeError as error:  # a layer cannot compute with a shard
                if self._step <= FIRST_STEPS:
                    self._refuse_parts(error)
                raise self._explained(error) from error
            if self._step > FIRST_STEPS:
                return found
            self._refuse_parts(None)
            if self._same_calls:
                self._compare(_END)
            if self._same_uses:
                self._compare_uses(found)
            return found

        return self.waits.around(compared)

    def _explained(self, error: Exception) -> Exception:
        if not self._explain:
            return error
        from ..strategies.reach import explained  # imports FSDP2

        return explained(error, self._model, self._strategy)

    def compare_reach(self, words: str) -> None:
        """Raise on every rank unless all have just found the same part used outside of its block; collective."""
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
        used = {self._leaves.get(id(leaf)) for leaf in leaves_of(loss)} - {None} - self._may_differ
        if self._agreed("\n".join(sorted(map(str, used)))):
            return
        raise self._different_uses(self._world.gather(used))

    def _different_uses(self, sets: list[Any]) -> ConfigError:
        """The error for ranks whose losses depend on these sets of parameters, which differ."""
        common = set.intersection(*sets)
        extra = [sorted(found - common) for found in sets]
        rank = next(rank for rank, names in enumerate(extra) if names)
        shown = ", ".join(extra[rank][:SHOWN]) + (", …" if len(extra[rank]) > SHOWN else "")
        others = [index for index, names in enumerate(sets) if not set(extra[rank]) <= names]
        return ConfigError(
            f"the loss of rank {rank} depends on {len(extra[rank])} parameters that rank {others[0]}'s does not depend "
            f"on (step {self._step}: {shown}): parallel.strategy={self._strategy} needs the same on every rank",
            advice(self._strategy, self._shared_class(extra[rank][0])),
        )

    def flags(self) -> list[float]:
        """Two numbers for this step's calls; their sums over all ranks go to `agree`."""
        number = float(zlib.crc32(f"{self._called} {self._unused_alike()}".encode()) & 0xFFFFF)
        return [number, number * number]

    def _unused_alike(self) -> list[str]:
        """The parameters to which this rank gave no gradient in this step, without those that ranks may choose."""
        names = self._unused.names() if self._unused is not None else ()
        return [name for name in names if name not in self._may_differ]

    def agree(self, sums: Sequence[float]) -> None:
        """Compare this step's calls by the sums of `flags`, and begin the next step; collective if they differ.

        Raises:
            ConfigError: ranks called different blocks, or used different parameters.
        """
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
            for hook in self._hooks:
                hook.remove()
            self._leaves.clear()


def advice(strategy: StrategyName, shared: str | None) -> str:
    """The fix for a model whose ranks use different parts; `shared`: a class around the parts that every rank calls."""
    if strategy == "ddp":
        return "set parallel.find_unused=true"
    ddp = "set parallel.strategy=ddp with parallel.find_unused=true"
    counts_as_zero = strategy in ZERO or _fsdp_reduces_unused()
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


def refuse_unused(model: nn.Module, optimizer: torch.optim.Optimizer, config: ParallelConfig, chosen: set[str]) -> None:
    """Before each update, raise if a trained parameter got no gradient and the strategy cannot leave it alone.

    Args:
        chosen: names of the parameters that a rank may skip in a step. Unless `parallel.find_unused` is false, they
            are left out of the check, and DDP, which then looks for unused parameters, is not checked at all.

    Raises (from the optimizer's step):
        ConfigError: parameters got no gradient; names them.
    """
    strategy = config.strategy
    reason = CAPABILITIES["unused_params"][strategy]
    may_skip = set[str]() if config.find_unused is False else {plain(name) for name in chosen}
    if reason is True or config.find_unused or (strategy == "ddp" and may_skip):
        return
    named = ((plain(fqn), p) for fqn, p in model.named_parameters())
    trained = {fqn: p for fqn, p in named if p.requires_grad and fqn not in may_skip}
    waiting = dict(trained)
    hooks: list[Any] = []
    for fqn, param in trained.items():
        hooks.append(param.register_hook(partial(_seen, waiting, fqn)))  # type: ignore[no-untyped-call]
    names = {id(param): fqn for fqn, param in trained.items()}
    steps = 0

    def check(*_: Any) -> None:
        nonlocal steps
        if strategy == "ddp" and steps:  # gradients can be looked at, which costs less than hooks
            updated = (param for group in optimizer.param_groups for param in group["params"])
            lacking = [names[id(param)] for param in updated if param.grad is None and id(param) in names]
        elif len(waiting) == len(trained):  # no backward: a resume creates the optimizer's state by such a step
            return
        else:
            lacking = [*waiting]
        if lacking:
            when = "this step" if steps else "the first step"
            raise ConfigError(
                f"{len(lacking)} of {len(trained)} parameters got no gradient in {when} ({listed(lacking)}), which "
                f"parallel.strategy={strategy} cannot train: {reason}",
                "freeze them (requires_grad_(False)), use them in the loss, or "
                + ("set parallel.find_unused=true" if strategy == "ddp" else "set parallel.strategy=fsdp"),
            )
        steps += 1
        waiting.update(trained)
        if strategy == "ddp":
            while hooks:
                hooks.pop().remove()

    optimizer.register_step_pre_hook(check)


def _seen(waiting: dict[str, nn.Parameter], fqn: str, grad: torch.Tensor) -> None:
    waiting.pop(fqn, None)


def plain(fqn: str) -> str:
    """A name without engines' prefixes."""
    return fqn.removeprefix("module.")


def plain_class(module: nn.Module) -> str:
    """Name of a module's class in the model's code."""
    return plain_type(module).__name__


def _fsdp_reduces_unused() -> bool:
    from ..strategies.unused import REDUCES_UNUSED  # imports FSDP2

    return REDUCES_UNUSED


Bytes = dict[str, dict[str, int]]
"""category → dtype → bytes on one rank."""


def check_same_data(world: World, train: Sized | None, val: Mapping[str, Sized]) -> None:
    """Refuse data of different sizes: ranks would take different numbers of steps and wait for each other; collective.

    Raises:
        DataError: the sizes differ; names the ranks' numbers of samples.
    """
    everyone: list[Any] = world.gather(
        [None if train is None else len(train), sum(map(len, val.values())) if val else None]
    )
    for split, sizes in zip(("training", "validation"), zip(*everyone, strict=True), strict=True):
        if len(set(sizes)) > 1:
            told = ", ".join("none" if size is None else str(size) for size in sizes[: 4 * SHOWN])
            raise DataError(
                f"ranks see different {split} data: {told} samples on ranks 0 to {len(sizes[: 4 * SHOWN]) - 1}",
                "give every rank the whole data (the sampler splits it); check that its files are on all nodes",
            )


def check_same_digests(world: World, digests: Mapping[str, str]) -> None:
    """Refuse ranks that read other data of the same size, or tokenise them otherwise: they would train a mixture. All
    ranks call it.

    Args:
        digests: of this rank's data, by name, as `Task.digests` gives them.

    Raises:
        DataError: the digests differ; names the ranks and hosts with each.
    """
    everyone: list[Any] = world.gather((platform.node(), dict(digests)))
    for name in sorted({name for _, others in everyone for name in others}):
        ranks_with: dict[str, list[str]] = {}
        for rank, (host, others) in enumerate(everyone):
            ranks_with.setdefault(others.get(name, "none"), []).append(f"{rank} ({host})")
        if len(ranks_with) > 1:
            parts = [
                f"digest {digest} on {len(ranks)} rank{'s' * (len(ranks) > 1)}: {', '.join(ranks[:SHOWN])}"
                f"{', …' if len(ranks) > SHOWN else ''}"
                for digest, ranks in sorted(ranks_with.items(), key=lambda pair: -len(pair[1]))[:SHOWN]
            ]
            raise DataError(
                f"ranks do not have the same {name}, and would train a mixture: {'; '.join(parts)}",
                "give every node the same files: the digest is of their contents, not of where they are",
            )


def check_masters(config: PrecisionConfig, strategy: Strategy) -> None:
    """Check that the optimizer updates weights in the dtype of the precision mode.

    Raises:
        ConfigError: the model was built in another dtype.
    """
    masters = [tensor for kind, tensor in strategy.state_tensors() if kind == "master_params"]
    if not masters:
        masters = [param for group in strategy.optimizer.param_groups for param in group["params"]]
    wanted = master_dtype(config)
    wrong = [t for t in masters if t.is_floating_point() and t.dtype != wanted]
    if wrong:
        size = sum(t.numel() * t.element_size() for t in wrong)
        raise ConfigError(
            f"precision.mode={config.mode} updates {_name(wanted)} weights, but {gib(size)} of the model's trainable "
            f"parameters are {_name(wrong[0].dtype)}",
            "build the model in fp32" + (", or set precision.mode=pure_bf16" if wanted == torch.float32 else ""),
        )


def count_dtypes(strategy: Strategy) -> Bytes:
    """This rank's bytes of each category of state by dtype; a storage counts once, whole."""
    found: Bytes = {}
    seen: set[int] = set()
    for kind in KINDS:
        for of, tensor in strategy.state_tensors():
            if of != kind:
                continue
            for local in local_tensors(tensor):
                storage = local.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    types = found.setdefault(kind, {})
                    types[_name(local.dtype)] = types.get(_name(local.dtype), 0) + storage.nbytes()
    return found


def audit(strategy: Strategy, world: World, run_dir: Path) -> None:
    """Write every rank's `count_dtypes` to `logs/dtypes.json` and show rank 0's in one line; collective."""
    ranks = world.gather(count_dtypes(strategy))
    if world.is_main:
        try:
            (run_dir / "logs" / "dtypes.json").write_text(json.dumps(ranks, indent=1) + "\n")
        except OSError as error:
            _LOG.warning("cannot write %s: %s", run_dir / "logs" / "dtypes.json", error.strerror)
        print(f"types on rank 0: {describe(ranks[0])}", flush=True)  # type: ignore[arg-type]


def say_graph_breaks() -> None:
    """Warn if torch.compile could not make one graph of each unit: the pieces between breaks are slower."""
    found = graph_breaks()
    if found and is_first_rank():
        reasons = ", ".join(f"{reason} ({number})" for reason, number in found.items())
        _LOG.warning(
            "compile.enabled=true: torch.compile broke its graphs %d times in the first step: %s. The code between two "
            "breaks is compiled, the rest is not; TORCH_LOGS=graph_breaks names the lines",
            sum(found.values()), reasons,
        )  # fmt: skip


class SumCheck:
    """Warns once if a loss that should be a sum over targets does not grow with their number: it may be a mean.

    Looks at rank 0's first micro-batches, if their numbers of targets differ.

    Args:
        loss_name, fix: words for the warning.
    """

    def __init__(self, loss_name: str, fix: str) -> None:
        self._loss_name, self._fix = loss_name, fix
        self._counts: list[int] = []
        self._losses: list[HostValue] = []
        self._done = not is_first_rank()

    def expect(self, counts: Sequence[int]) -> None:
        """Announce the numbers of targets of the next micro-batches; 0 = ignore this one."""
        if not self._done:
            self._counts += counts

    def around(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        """`loss_fn`, with its losses recorded; it does not wait for them."""

        def noted(model: Any, batch: Any) -> torch.Tensor:
            loss = one_number(loss_fn(model, batch))
            if not self._done:
                self._losses.append(HostValue(loss))
            return loss

        return noted

    def judge(self) -> None:
        """Warn if the losses look like means; call it after a step whose loss is known."""
        if self._done:
            return
        seen = [(n, loss.item()) for n, loss in zip(self._counts, self._losses, strict=False) if n]
        counts = [n for n, _ in seen]
        self._done = len(self._losses) >= _SUMS_MAX
        if len(seen) < _SUMS_MIN or max(counts) < _SUMS_SPREAD * min(counts) or min(loss for _, loss in seen) <= 0:
            return
        # For a sum, loss / targets stays about the same; for a mean, the loss does.
        of_mean = pvariance([math.log(loss) for _, loss in seen])
        of_sum = pvariance([math.log(loss / n) for n, loss in seen])
        if of_mean < of_sum / 4:
            self._done = True
            _LOG.warning(
                "%s does not grow with its targets (%d to %d of them): it looks like their mean, but is used as "
                "their sum, which makes gradients too small\n  fix: %s",
                self._loss_name, min(counts), max(counts), self._fix,
            )  # fmt: skip


def describe(found: Bytes) -> str:
    """One line: `params float32 1.3 MiB, optimizer float32 2.6 MiB`."""
    return ", ".join(f"{kind} {name} {gib(size)}" for kind, types in found.items() for name, size in types.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
