"""What is checked once a model is wrapped: parameters that the loss does not use, and the types the state is in."""

from __future__ import annotations

import json
import logging
from collections.abc import Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.capability import CAPABILITIES
from ..config.schema import PrecisionConfig, StrategyName
from ..errors import ConfigError, DataError, gib
from ..memory.rows import KINDS
from ..memory.state import local_tensors
from ..parallel.precision import master_dtype
from ..parallel.world import World
from ..strategies import Strategy

SHOWN = 4


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
            names = ", ".join([*waiting][:SHOWN]) + (", …" if len(waiting) > SHOWN else "")
            raise ConfigError(
                f"{len(waiting)} of {total} parameters got no gradient in the first step ({names}), which "
                f"parallel.strategy={strategy} cannot train: {reason}",
                "freeze them (requires_grad_(False)), use them in the loss, or set parallel.strategy=fsdp",
            )

    hooks.append(optimizer.register_step_pre_hook(check))


def _seen(waiting: dict[str, nn.Parameter], fqn: str, grad: torch.Tensor) -> None:
    waiting.pop(fqn, None)


_LOG = logging.getLogger(__name__)

Bytes = dict[str, dict[str, int]]
"""category → dtype → bytes on one rank."""


def check_same_data(world: World, train: Sized | None, val: Sized | None) -> None:
    """Ranks that see other data take other numbers of steps, or evaluate alone: the others would wait; collective.

    Raises:
        DataError: names the ranks' numbers of samples.
    """
    everyone: list[Any] = world.gather([None if data is None else len(data) for data in (train, val)])
    for split, sizes in zip(("training", "validation"), zip(*everyone, strict=True), strict=True):
        if len(set(sizes)) > 1:
            told = ", ".join("none" if size is None else str(size) for size in sizes[: 4 * SHOWN])
            raise DataError(
                f"ranks see different {split} data: {told} samples on ranks 0 to {len(sizes[: 4 * SHOWN]) - 1}",
                "give every rank the whole data, which the sampler shares out; check that its files are on all nodes",
            )


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


def describe(found: Bytes) -> str:
    """One line: `params float32 1.3 MiB, optimizer float32 2.6 MiB`."""
    return ", ".join(f"{kind} {name} {gib(size)}" for kind, types in found.items() for name, size in types.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
