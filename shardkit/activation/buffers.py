"""Buffers that a block's forward changes: a recomputation reads what they held before the call, and changes nothing.

Batch norm, spectral norm and counters write to buffers in forward. When backward runs the block again, it must compute
with the old values, and the buffers must not be changed a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..errors import TrainingError
from ..parallel.compat import has_values, version_of

_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip
_changing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Block → names of the buffers that a forward of it has changed so far."""


class BufferRecord:
    """The buffers of one call of a block. Its first call copies all of them, later ones those that have changed before.

    Attributes:
        before: name → the values before the call, of the buffers that the call changed.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.before: dict[str, torch.Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the block's forward.

        Raises:
            TrainingError: the forward changed a buffer that earlier calls left alone.
        """
        changing = _changing.get(self._block)
        buffers = dict(self._block.named_buffers(remove_duplicate=False))
        versions = {name: version_of(buffer) for name, buffer in buffers.items()}
        copies = {name: buffers[name].detach().clone() for name in buffers if changing is None or name in changing}
        yield
        for name, buffer in self._block.named_buffers(remove_duplicate=False):
            untouched = name in buffers and buffer is buffers[name] and version_of(buffer) == versions[name]
            if untouched and changing is None:  # batch norm's kernel writes without counting: compare values once
                untouched = torch.equal(buffer, copies[name]) if has_values(buffer) else not self._is_statistic(name)
            if untouched and (changing is None or name not in changing):
                continue
            if name not in copies:
                raise TrainingError(
                    f"the forward of {type(self._block).__name__} changes its buffer {name}, which it left alone in "
                    "the first step: activation.policy would compute with the new values when it runs it again",
                    "change the buffer in every step or in none, or set activation.policy=none",
                )
            self.before[name] = copies[name]
        _changing.setdefault(self._block, set()).update(self.before)

    def _is_statistic(self, name: str) -> bool:
        """Whether a buffer is one of those that batch norm's kernel writes."""
        owner = self._block.get_submodule(name.rpartition(".")[0])
        return isinstance(owner, _NORMS) and owner.training and owner.track_running_stats

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Around a recomputation: buffers hold the values before the call, and get the present ones back at the end."""
        present: list[tuple[nn.Module, str, torch.Tensor]] = []
        try:
            for name, values in self.before.items():
                owner, _, key = name.rpartition(".")
                module = self._block.get_submodule(owner)
                present.append((module, key, getattr(module, key)))
                setattr(module, key, values.clone())
            yield
        finally:
            for module, key, buffer in present:
                setattr(module, key, buffer)

    def contexts(
        self, inner: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of forward and recomputation (`context_fn` of torch.utils.checkpoint), around `inner`'s."""
        forward, again = inner or (None, None)
        return _Around(self.recording, forward), _Around(self.restored, again)


class _Around:
    """Enters a fresh context and then `inner`, as often as it is entered: backward may run twice."""

    def __init__(self, fresh: Any, inner: AbstractContextManager[Any] | None) -> None:
        self._fresh, self._inner = fresh, inner
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._fresh())
            if self._inner is not None:
                stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def has_buffers(module: nn.Module) -> bool:
    return any(True for _ in module.buffers())
