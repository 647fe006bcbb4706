"""`memory.cap`: run out of memory at a chosen size, on the GPU by the allocator, on the CPU by counting tensors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..errors import ConfigError, gib
from ..memory.state import local_tensors
from ..memory.tracing.compat import TRACKER
from ..memory.tracing.tracker import TensorTracker
from .shortage import Shortage, innermost

_NOTED_SHARE = 1024  # storages of at least 1/1024 of the cap are recorded with their origin
_PRUNE = 4096


@dataclass(frozen=True)
class Made:
    n_bytes: int
    address: int
    shape: tuple[int, ...]
    dtype: str
    by: str  # operator and line, `aten.mm at task.py:33 in loss`


class MemoryCap(TensorTracker):  # type: ignore[no-untyped-call]
    """Raises `torch.OutOfMemoryError` as soon as live tensors on the CPU hold more than `limit` bytes.

    An operator's result counts before anyone gets it; one beyond the limit is dropped. Growth outside of operators
    (`UntypedStorage.resize_`, by which FSDP2 gathers) is noticed at the next operator. Counts like `TensorTracker`.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._ever_before, self._over = 0, False
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], Made]] = {}

    def __enter__(self) -> MemoryCap:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, ever_before = self.current("cpu"), self.ever_allocated("cpu")
        out = super().__torch_dispatch__(func, types, args, kwargs)
        now, ever = self.current("cpu"), self.ever_allocated("cpu")
        request, self._ever_before = ever - (ever_before if ever > ever_before else self._ever_before), ever
        self._over = self._over and before > self.limit
        if now <= self.limit:
            if request * _NOTED_SHARE >= self.limit:
                self._note(out, func)
        elif not self._over and get_worker_info() is None:  # a forked loader process counts its parent's tensors, too
            self._over = True  # the error's handler may need a tensor or two
            del out  # this frame lives as long as the error's traceback
            raise self._error(request, now, str(func))
        return out

    def made(self) -> list[Made]:
        """The larger storages that are alive and were made under the cap."""
        return [made for ref, made in self._made.values() if ref() is not None]

    def _error(self, request: int, now: int, op: str) -> torch.OutOfMemoryError:
        before = max(0, now - request)  # less if what an operator took is gone again
        error = torch.OutOfMemoryError(
            f"CPU out of memory. Tried to allocate {gib(request)} ({op}). memory.cap={gib(self.limit)}, of which "
            f"{gib(before)} is allocated."
        )
        shortage = Shortage("cap", request, self.limit, max(0, self.limit - before), before, before, op)
        error.shortage = shortage  # type: ignore[attr-defined]
        return error

    def _note(self, out: Any, func: Any) -> None:
        source_line = innermost(sys._getframe(1))
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if not isinstance(tensor, torch.Tensor):
                continue
            for local in local_tensors(tensor):
                storage = local.untyped_storage()
                if storage.nbytes() * _NOTED_SHARE < self.limit or local.device.type != "cpu":
                    continue
                noted = self._made.get(id(storage))
                if noted is None or noted[0]() is None:
                    shape, dtype = tuple(local.shape), str(local.dtype)
                    made = Made(storage.nbytes(), storage.data_ptr(), shape, dtype, f"{func} at {source_line}")
                    self._made[id(storage)] = (weakref.ref(storage), made)
        if len(self._made) > _PRUNE:
            self._made = {key: item for key, item in self._made.items() if item[0]() is not None}


@contextmanager
def memory_cap(limit: int | None, device: torch.device) -> Iterator[MemoryCap | None]:
    """Limit this rank to `limit` bytes of tensors while entered; `None` changes nothing and costs nothing.

    On a GPU, the caching allocator enforces it (`torch.cuda.set_per_process_memory_fraction`): memory that it reserves
    counts, and memory that NCCL and libraries take beside it does not. On the CPU, the limit is off if torch lacks a
    name that the tracker needs.
    """
    if limit is None:
        yield None
    elif device.type != "cuda":
        if not TRACKER.works("memory.cap"):
            yield None
            return
        with MemoryCap(limit) as cap:
            yield cap
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        if limit > total:
            raise ConfigError(f"memory.cap={gib(limit)}, but the GPU has {gib(total)}", "lower memory.cap")
        torch.cuda.set_per_process_memory_fraction(limit / total, device)
        try:
            yield None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
