"""The optimizers of a program: which were made, which have stepped, and what those that have not would add."""

from __future__ import annotations

import functools
import linecache
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from shardkit_assumed import program_line  # type: ignore[import-not-found]
from shardkit_held import parts  # type: ignore[import-not-found]


class Optimizers:
    """Each optimizer of this process with its steps. One that the program has dropped is gone here too."""

    def __init__(self) -> None:
        self.last_new_at = 0  # the most steps that any optimizer had done when another one stepped for the first time
        self._made: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def watch(self, torch: Any) -> None:
        """See each optimizer that is made from now on."""
        initialise = torch.optim.Optimizer.__init__

        @functools.wraps(initialise)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            initialise(optimizer, *args, **kwargs)
            self._made[optimizer] = program_line(sys._getframe(1))

        torch.optim.Optimizer.__init__ = init

    def stepped(self, optimizer: Any) -> None:
        if optimizer not in self._steps:
            self.last_new_at = self.most_steps()
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def most_steps(self) -> int:
        return max(self._steps.values(), default=0)

    def steps(self, wanted: int) -> int:
        """The steps that all optimizers have done. One that lags twice behind is not used any more."""
        fewest, most = min(self._steps.values(), default=0), self.most_steps()
        return most if most > 2 * max(wanted, fewest) else fewest

    def never_stepped(self) -> list[dict[str, Any]]:
        """Optimizers over trainable tensors on GPUs that no optimizer has updated so far, with bytes."""
        updated = {address for optimizer in list(self._steps) for address, _ in _trainable(optimizer)}
        rows = []
        for optimizer, (filename, line) in list(self._made.items()):
            # A program may make one, move or shard the model, and make another over the same numbers.
            sizes = {} if optimizer in self._steps else dict(_trainable(optimizer))
            if sizes and not sizes.keys() & updated:
                text = linecache.getline(filename, line).strip()
                rows.append({
                    "name": type(optimizer).__name__, "source_line": f"{filename}:{line}: {text}",
                    "parameters": sum(sizes.values()),
                    "more": sum(sizes.values()) * (1 + _states_for_each_parameter(optimizer.defaults)),
                })  # fmt: skip
        return rows


def _trainable(optimizer: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of each trainable tensor on a GPU that an optimizer updates."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for part in parts(parameter) if parameter.requires_grad else ():
                if part.is_cuda and part.data_ptr():
                    yield part.data_ptr(), int(part.nbytes)


def _states_for_each_parameter(defaults: dict[str, Any]) -> int:
    """How many tensors of a parameter's size the optimizer keeps, by the names of its settings."""
    if "betas" in defaults:
        return 3 if defaults.get("amsgrad") else 2
    return 1 if defaults.get("momentum") or "lr_decay" in defaults or "alpha" in defaults else 0
