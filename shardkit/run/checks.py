"""What is checked of a wrapped model: parameters that the loss does not use, the types of the state, where a gradient
stopped being finite."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import pvariance
from typing import Any

import torch
from torch import nn

from ..config.capability import CAPABILITIES
from ..config.libraries import is_first_rank
from ..config.schema import PrecisionConfig, StrategyName
from ..errors import ConfigError, TrainingError, gib
from ..memory.phases import Phases
from ..memory.rows import KINDS
from ..memory.state import local_tensors
from ..parallel.precision import master_dtype
from ..parallel.world import World
from ..strategies import Strategy
from ..strategies.step import HostValue, MicroBatch, accumulate, one_number

SHOWN = 4
_SUMS_MIN, _SUMS_MAX, _SUMS_SPREAD = 8, 64, 1.5
_LOG = logging.getLogger(__name__)


def refuse_unused(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: StrategyName) -> None:
    """Before the first update, raise if a parameter that requires a gradient got none in that step.

    Does nothing for strategies that leave such parameters alone.

    Raises (from the optimizer's first step):
        ConfigError: names them.
    """
    reason = CAPABILITIES["unused_params"][strategy]
    if reason is True:
        return
    waiting = {fqn.removeprefix("module."): p for fqn, p in model.named_parameters() if p.requires_grad}
    total = len(waiting)
    hooks: list[Any] = [
        p.register_hook(partial(_seen, waiting, fqn))  # type: ignore[no-untyped-call]
        for fqn, p in waiting.items()
    ]

    def check(*_: Any) -> None:
        if len(waiting) == total:  # no backward yet: a resume makes the optimizer's states by such a step
            return
        for hook in hooks:
            hook.remove()
        if waiting:
            raise ConfigError(
                f"{len(waiting)} of {total} parameters got no gradient in the first step ({_listed([*waiting])}), "
                f"which parallel.strategy={strategy} cannot train: {reason}",
                "freeze them (requires_grad_(False)), use them in the loss, or set parallel.strategy=fsdp",
            )

    hooks.append(optimizer.register_step_pre_hook(check))


def _seen(waiting: dict[str, nn.Parameter], fqn: str, grad: torch.Tensor) -> None:
    waiting.pop(fqn, None)


Bytes = dict[str, dict[str, int]]
"""category → dtype → bytes on one rank."""


def check_masters(config: PrecisionConfig, strategy: Strategy) -> None:
    """The weights that the optimizer updates are in the type that the precision mode promises.

    Raises:
        ConfigError: they are not, because the model was built in another type.
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
    """This rank's bytes of each category of state by type; a storage counts once, whole."""
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


class SumCheck:
    """Warns once if a loss that should be a sum over targets does not grow with their number: it may be a mean.

    Looks at rank 0's first micro-batches, as far as their numbers of targets differ.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._losses: list[HostValue] = []
        self._done = not is_first_rank()

    def expect(self, counts: Sequence[int]) -> None:
        """The numbers of targets of the micro-batches whose losses come next; 0: do not look at it."""
        if not self._done:
            self._counts += counts

    def around(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        """`loss_fn`, whose losses are looked at and not waited for."""

        def noted(model: Any, batch: Any) -> torch.Tensor:
            loss = one_number(loss_fn(model, batch))
            if not self._done:
                self._losses.append(HostValue(loss))
            return loss

        return noted

    def judge(self, what: str, fix: str) -> None:
        """After a step whose loss has been waited for."""
        if self._done:
            return
        seen = [(n, loss.item()) for n, loss in zip(self._counts, self._losses, strict=False) if n]
        counts = [n for n, _ in seen]
        self._done = len(self._losses) >= _SUMS_MAX
        if len(seen) < _SUMS_MIN or max(counts) < _SUMS_SPREAD * min(counts) or min(loss for _, loss in seen) <= 0:
            return
        # A sum's share for each target stays about the same, a mean itself does.
        of_mean = pvariance([math.log(loss) for _, loss in seen])
        of_sum = pvariance([math.log(loss / n) for n, loss in seen])
        if of_mean < of_sum / 4:
            self._done = True
            _LOG.warning(
                "%s does not grow with its targets (%d to %d of them): it looks like their mean, but is taken for "
                "their sum, so that gradients are too small\n  fix: %s", what, min(counts), max(counts), fix,
            )  # fmt: skip


def not_finite_gradient(
    strategy: Strategy, ledger: Phases, world: World, step: int, micro_batches: Sequence[MicroBatch],
    loss_fn: Callable[[Any, Any], torch.Tensor], n_targets: float,
) -> TrainingError:  # fmt: skip
    """The error that names the ranks and parameters whose gradient is not finite; collective.

    Gradients are reduced and gone by then: a second forward and backward of the step shows each rank's own. Where the
    update could not be skipped and has spoilt the state, that state is named.
    """
    spoilt = sorted({s.name.partition(".")[2] for s in strategy.shards() if not s.local.isfinite().all()})
    if any(world.gather(bool(spoilt))):
        found = sorted({str(name) for names in world.gather(spoilt[:SHOWN]) for name in names})  # type: ignore[attr-defined]
        cause = f"the gradient is not finite at step {step}, nor is the state after its update: {_listed(found)}"
    else:
        cause = _own_gradients(strategy, ledger, world, step, micro_batches, loss_fn, n_targets)
    return TrainingError(
        cause,
        "look at the loss on that step's data (a division by 0, a root or log of 0), lower optim.lr, or train in fp32; "
        f"nothing after step {step - 1} was saved, checkpoints hold the state before",
    )


def _own_gradients(
    strategy: Strategy, ledger: Phases, world: World, step: int, micro_batches: Sequence[MicroBatch],
    loss_fn: Callable[[Any, Any], torch.Tensor], n_targets: float,
) -> str:  # fmt: skip
    """Which ranks' gradients are not finite before they are reduced, in another pass of the step."""
    largest: dict[str, torch.Tensor] = {}
    with watching_gradients(strategy.model, largest):
        try:
            accumulate(strategy, ledger, micro_batches, loss_fn, n_targets, world.size, world.device)
        except Exception as error:  # the finding is told without its origin
            _LOG.warning("cannot repeat step %d to find its bad gradient: %s: %s", step, type(error).__name__, error)
    sizes = {fqn: float(value) for fqn, value in largest.items()}
    bad = [fqn for fqn, size in sizes.items() if not math.isfinite(size)]
    top = max(sizes, key=sizes.__getitem__, default="") if not bad else ""
    told: list[Any] = world.gather((len(bad), bad[:SHOWN], len(sizes), top, sizes.get(top, 0.0)))
    ranks = [rank for rank, (n_bad, *_) in enumerate(told) if n_bad]
    if ranks:
        n_bad, names, total, *_ = told[ranks[0]]
        on = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"
        return f"the gradient is not finite at step {step} on {on}: {', '.join(names)} ({n_bad} of {total} parameters)"
    rank, (*_, name, size) = max(enumerate(told), key=lambda item: item[1][-1])
    if size < math.sqrt(torch.finfo(torch.float32).max) / 2**20:
        return f"the gradient is not finite at step {step}, but finite on every rank when the step is repeated"
    return (
        f"the gradient norm overflowed at step {step}: every gradient is finite, the largest element {size:.0e} "
        f"({name} on rank {rank})"
    )


@contextmanager
def watching_gradients(model: nn.Module, largest: dict[str, torch.Tensor]) -> Iterator[None]:
    """Inside, keep the largest magnitude of each parameter's gradient as backward makes it, before any reduction.

    Parameters are looked up as each module's forward finds them: engines that shard them put others in their place.
    """
    handles: list[Any] = []
    seen: dict[int, torch.Tensor] = {}

    def note(fqn: str, grad: torch.Tensor) -> None:
        if grad.numel():
            largest[fqn] = torch.maximum(largest[fqn], grad.detach().abs().max().float())  # keeps NaN

    def look(prefix: str, module: nn.Module, args: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad and id(param) not in seen:
                seen[id(param)] = param
                fqn = f"{prefix}.{name}".lstrip(".").removeprefix("module.")
                largest[fqn] = torch.zeros((), device=param.device)
                handles.append(param.register_hook(partial(note, fqn)))  # type: ignore[no-untyped-call]

    for prefix, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(look, prefix)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:SHOWN])) + (", …" if len(items) > SHOWN else "")


def describe(found: Bytes) -> str:
    """One line: `params float32 1.3 MiB, optimizer float32 2.6 MiB`."""
    return ", ".join(f"{kind} {name} {gib(size)}" for kind, types in found.items() for name, size in types.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
