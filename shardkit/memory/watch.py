"""Account a training loop from outside: hooks on the model and its optimizers tell the ledger where the loop is."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..files import append_jsonl
from .ledger import MemoryLedger
from .rows import gather_json


class Watch:
    """While entered: forward = the model's forward in training, backward = from there to the optimizer step or the next
    forward, step = the (last) optimizer's step; memory is gathered when due, and once more on leaving.

    Every rank must take the same number of steps. An engine that does not call `step` of these optimizers (DeepSpeed)
    is not seen: mark its phases with `MemoryLedger.phase`.
    """

    def __init__(
        self,
        ledger: MemoryLedger,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        path: str | Path | None,
    ) -> None:
        if not optimizers:
            raise TypeError("watch() needs at least one optimizer: its step ends a training step")
        self._ledger, self._model, self._optimizers, self._path = ledger, model, optimizers, path
        self._handles: list[Any] = []
        self._step, self._began = 0, 0.0
        self._gathered: int | None = None

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._handles = [
            self._model.register_forward_pre_hook(self._on_forward),
            self._model.register_forward_hook(self._on_backward),
        ]
        for index, optimizer in enumerate(self._optimizers):
            if index == 0:
                self._handles.append(optimizer.register_step_pre_hook(self._on_step))
            if index == len(self._optimizers) - 1:
                self._handles.append(optimizer.register_step_post_hook(self._on_step_end))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._close_phase()
        if kind is None and self._gathered != self._step:  # after an error, other ranks may not reach a gather
            self._gather()

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        if self._is_training(module):
            self._close_phase()
            self._ledger.begin("forward")

    def _on_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_training(module) and self._ledger.open_phase == "forward":
            self._ledger.end()
            self._ledger.begin("backward")

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._close_phase()
        self._ledger.begin_step(self._step + 1)
        self._ledger.sample_state(self._model, *self._optimizers)
        self._ledger.begin("step")

    def _on_step_end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._close_phase()
        self._step += 1
        now = time.perf_counter()
        self._ledger.end_step(self._step, now - self._began)
        if self._ledger.due(self._step):
            self._gather()
        self._began = time.perf_counter()

    def _gather(self) -> None:
        rows = self._ledger.gather(self._step)
        self._gathered = self._step
        if rows is not None and self._path is not None:
            append_jsonl(self._path, gather_json(self._step, time.time(), rows))

    def _close_phase(self) -> None:
        if self._ledger.open_phase in _WATCHED:
            self._ledger.end()

    def _is_training(self, module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled()


_WATCHED = ("forward", "backward", "step")
