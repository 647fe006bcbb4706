"""Trace steps tensor by tensor: every allocation with its phase, module and category."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Protocol

from torch import nn

from ..memory.rows import PhaseName
from ..memory.state import HasState, local_tensors
from .events import following_modules
from .tracker import TensorTracker

BETWEEN = "between"
"""The phase of an event log from the end of a step to the next one."""


class Wrapped(HasState, Protocol):
    """A wrapped model that can name its state: every strategy is one."""

    @property
    def model(self) -> nn.Module: ...


class Tracing:
    """Tells a tracker the phases and the modules of a run, and what is state while all of it is there.

    Entered, it tracks; `wrapped` once the model exists, `stepped` after each optimizer step. In between it takes the
    ledger's place in a training step.
    """

    def __init__(self, tracker: TensorTracker) -> None:
        assert tracker.log is not None
        self._tracker, self._log, self._stack = tracker, tracker.log, ExitStack()

    def __enter__(self) -> Tracing:
        self._stack.enter_context(self._tracker)
        self._tracker.mark("wrap")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[None]:
        self._tracker.mark(name)
        yield

    def sample_state(self, source: HasState) -> None:
        label_state(self._tracker, source)

    def wrapped(self, strategy: Wrapped) -> None:
        label_state(self._tracker, strategy)
        self._stack.enter_context(following_modules(self._log, strategy.model))

    def stepped(self, strategy: Wrapped) -> None:
        label_state(self._tracker, strategy)
        self._log.mark(BETWEEN, "")


def label_state(tracker: TensorTracker, source: HasState) -> None:
    """Name the storages of parameters, masters, gradients, optimizer states, buffers and gathered parameters."""
    for kind, tensor in source.state_tensors():
        tracker.see(list(local_tensors(tensor)), kind)
    for tensor in getattr(source, "communication_tensors", tuple)():
        tracker.see(tensor, "communication")
