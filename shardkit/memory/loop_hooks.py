"""Account for a training loop from outside: hooks on the model and its optimizers mark the ledger's phases."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..files import append_jsonl
from .ledger import MemoryLedger
from .probe import HasState
from .rows import PhaseName, gather_json


class Listener(Protocol):
    """Receives the events of a watched loop, on every rank."""

    def forward_begins(self, inputs: tuple[Any, ...]) -> None:
        """A forward in training begins, with these arguments, those by name last."""

    def step_ended(self, step: int, seconds: float, waited: float) -> None:
        """An optimizer step ended; `waited` of its seconds passed before its first forward."""

    def gather(self, step: int) -> None:
        """Gather every rank's row."""


class LoopHooks:
    """Marks a loop's phases by hooks while entered, and gathers memory when due and once more on leaving.

    `forward` is the model's forward in training, `backward` lasts from its end to the optimizer step or the next
    forward, `update` is the optimizers' steps; forward and backward inside a step's closure are marked as such. The
    last optimizer's step ends a training step. Every rank must take the same number of steps.

    `optimizers`: torch's, or objects with a `step` that updates the model once: it is replaced while entered. `path`:
    rank 0 appends a line per gather to it. `source`: lists the state; default: the model's parameters and torch's
    optimizers. `listener`: hears of steps, and gathers in place of this class. `steps_before`: steps that were taken
    before.
    """

    def __init__(
        self,
        ledger: MemoryLedger,
        model: nn.Module,
        optimizers: tuple[Any, ...],
        path: str | Path | None = None,
        *,
        source: HasState | None = None,
        listener: Listener | None = None,
        steps_before: int = 0,
    ) -> None:
        if not optimizers:
            raise TypeError("watch() needs at least one optimizer: its step ends a training step")
        self._ledger, self._model, self._optimizers, self._path = ledger, model, optimizers, path
        self._source, self._listener = source, listener
        self._handles: list[Any] = []
        self._step, self._began = steps_before, 0.0
        self._gathered: int | None = None
        self._first_forward: float | None = None
        self._forward_s, self._forward_began = 0.0, 0.0

    @property
    def step(self) -> int:
        """Optimizer steps that have ended."""
        return self._step

    def __enter__(self) -> None:
        self.hook()

    def hook(self) -> None:
        """Begin the first step, and let the model and the optimizers mark the phases."""
        self.begin()
        self._handles = [
            self._model.register_forward_pre_hook(_uncompiled(self._on_forward), with_kwargs=True),
            self._model.register_forward_hook(_uncompiled(self._on_backward)),
        ]
        # A model may have several optimizers, which all step in a training step: the last one ends it.
        last_index = len(self._optimizers) - 1
        for index, optimizer in enumerate(self._optimizers):
            ends = self.step_ends if index == last_index else self._close_phase
            if isinstance(optimizer, torch.optim.Optimizer):
                self._handles.append(optimizer.register_step_pre_hook(self._on_step))
                self._handles.append(optimizer.register_step_post_hook(lambda *_, ends=ends: ends()))
            else:
                self._handles.append(_Replaced(optimizer, self.update_begins, ends))

    def __exit__(self, kind: object, *raised: object) -> None:
        self.unhook()
        if kind is None:  # after an error, other ranks may not reach a gather
            self.gather_last()

    def begin(self) -> None:
        """Start the first step's clock; without `hook`, the caller marks the phases by the methods below."""
        self._began = time.perf_counter()

    def unhook(self) -> None:
        """Remove every hook, and leave the phase that runs."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._close_phase()

    def gather_last(self) -> None:
        """Gather once more unless the last step has been; collective."""
        if self._gathered != self._step:
            self._gather()

    def forward_begins(self, *inputs: Any) -> None:
        """A forward in training begins."""
        self._forward_began = time.perf_counter()
        if self._first_forward is None:
            self._first_forward = self._forward_began
            self._ledger.begin_step(self._step + 1)
        if self._listener is not None:
            self._listener.forward_begins(inputs)
        self._enter("forward")

    def backward_begins(self) -> None:
        """The forward ended; whatever follows until the update or the next forward is its backward."""
        if self._ledger.open_phase == "forward":
            self._forward_s += time.perf_counter() - self._forward_began
            self._enter("backward")

    def update_begins(self) -> None:
        """Gradients are complete, and an optimizer's update begins."""
        self._ledger.begin_step(self._step + 1)
        if self._source is None:
            self._ledger.sample_state(self._model, *self._optimizers)
        else:
            self._ledger.sample_state(self._source)
        self._enter("update")

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.forward_begins(*args, *kwargs.values())

    def _on_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.backward_begins()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
        if not closures:
            self.update_begins()
            return None
        closure = closures[0]  # runs forward and backward inside the optimizer's step

        def marked() -> Any:
            loss = closure()
            self.update_begins()
            return loss

        return tuple(marked if value is closure else value for value in args), {
            key: marked if value is closure else value for key, value in kwargs.items()
        }

    def step_ends(self) -> None:
        """The last optimizer's update ended, and with it a training step."""
        self._close_phase()
        self._step += 1
        now = time.perf_counter()
        waited = 0.0 if self._first_forward is None else max(0.0, self._first_forward - self._began)
        busy = self._forward_s + waited if self._ledger.device.type == "cpu" and self._forward_s else None
        self._ledger.end_step(self._step, now - self._began, waited, busy)
        if self._listener is not None:
            self._listener.step_ended(self._step, now - self._began, waited)
        self._first_forward, self._forward_s = None, 0.0
        if self._ledger.due(self._step):
            self._gather()
        # Not `now`: the gather above is the ledger's time, not the next step's.
        self._began = time.perf_counter()

    def _gather(self) -> None:
        self._gathered = self._step
        if self._listener is not None:
            self._listener.gather(self._step)
            return
        rows = self._ledger.gather(self._step)
        if rows is not None and self._path is not None:
            append_jsonl(self._path, gather_json(self._step, time.time(), rows))

    def _enter(self, name: PhaseName) -> None:
        if self._ledger.open_phase in _WATCHED:
            self._ledger.change(name)
        else:
            self._ledger.begin(name)

    def _close_phase(self) -> None:
        # A phase that the user's own code opened around the loop is left open.
        if self._ledger.open_phase in _WATCHED:
            self._ledger.end()


_WATCHED = ("forward", "backward", "update")


class _Replaced:
    """Replaces an object's `step` by one that calls `before` and `after` around it; `remove` restores it."""

    def __init__(self, owner: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._owner, self._own_step, original = owner, vars(owner).get("step"), owner.step

        def step(*args: Any, **kwargs: Any) -> Any:
            before()
            result = original(*args, **kwargs)
            after()
            return result

        owner.step = step

    def remove(self) -> None:
        if self._own_step is None:
            del self._owner.step
        else:
            self._owner.step = self._own_step


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, kept out of the compiled graph of a model that is compiled in place."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and the import takes a second
        return hook
    plain: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return plain
