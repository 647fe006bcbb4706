"""The request for memory that failed: its size, and the memory around it; and `memory.cap`, which makes one fail."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import get_worker_info

from ..errors import ConfigError, gib
from ..memory.probe import local_tensors
from ..memory.tracing.compat import TRACKER, allocator_snapshot, fsdp_module_name, observe_shortages
from ..memory.tracing.tracker import TensorTracker

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# torch's files, FSDP2's among them, and those packages of shardkit that only watch.
_LIBRARIES = (
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(_PACKAGE, part) + os.sep for part in ("memory", "oom", "tracing")),
)
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def innermost(frame: FrameType | None) -> str:
    """`FILE:LINE in FUNCTION` of the innermost frame outside torch and this package; empty if there is none."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return _line(frame, frame.f_lineno)
        frame = frame.f_back
    return ""


def raised_at(error: BaseException) -> str | None:
    """`FILE:LINE in FUNCTION` of the deepest frame of an exception's traceback outside torch and this package."""
    line = None
    for trace in _traces(error):
        if not trace.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
            line = _line(trace.tb_frame, trace.tb_lineno)
    return line


def module_of(error: BaseException, model: nn.Module | None) -> str | None:
    """Name of the innermost module of `model` whose forward an exception came from, "" for the model itself.

    Read from the exception's traceback, so nothing has to be recorded before a failure. In backward, it is a module
    whose forward is recomputed, or whose parameters FSDP2 gathers; else `None`.
    """
    names = {} if model is None else {id(module): plain_name(name) for name, module in model.named_modules()}
    name_so_far, inside = None, False
    for trace in _traces(error):
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):  # an engine that is a module itself also has methods that run no forward
            inside = inside or trace.tb_frame.f_code.co_name in ("_call_impl", "forward")
            name_so_far = names.get(id(owner), name_so_far) if inside else name_so_far
        elif type(owner).__name__ == "FSDPParamGroup":
            name = fsdp_module_name(owner)
            name_so_far = name_so_far if name is None else plain_name(name)
    return name_so_far


def plain_name(name: str) -> str:
    """A module's name without the parts that wrappers add."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _line(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


_LOG = logging.getLogger(__name__)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|[KMG]iB)"
_FRESH_S = 120.0  # collectives and unwinding may take this long between a failed request and its handling
# Messages of libraries that allocate device memory on their own, and raise other errors when it runs out.
_OTHER_WORDS = re.compile(
    r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|Cuda failure.*out of memory"
)
_BARE = "CUDA error: out of memory"  # a failed request of pinned host memory has the same message
_ROOM = 1 / 16  # share of a device's memory: libraries that allocate on their own request less
_CPU_ALLOCATOR = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+) bytes", re.DOTALL)


@dataclass(frozen=True)
class Shortage:
    """A failed request and the memory around it at that moment, in bytes; `None` if not known."""

    # whose memory: `device` (a GPU's), `cap` (`memory.cap` on the CPU), `host` (the operating system refused),
    # `host-risk` (nothing failed yet, but the host's memory is almost used up)
    kind: Literal["device", "cap", "host", "host-risk"]
    request: int | None = None  # the size of the request
    limit: int | None = None  # the total of the device, the cap or the host
    free: int | None = None  # the part of `limit` that was free
    allocated: int | None = None  # held by tensors; a phase's peak may have been higher
    reserved: int | None = None  # held by the caching allocator, `allocated` included
    op: str | None = None  # the operator that asked
    exact: bool = True  # the allocator's own figures; else from an error message, with two decimals
    snapshot: Any = field(default=None, repr=False, compare=False)  # the CUDA allocator's segments, as torch gives them

    @property
    def fragmentation(self) -> int | None:
        """Bytes that the caching allocator held without a tensor in them."""
        return None if self.reserved is None or self.allocated is None else self.reserved - self.allocated

    @property
    def missing(self) -> int | None:
        """Bytes by which the request exceeded the free memory."""
        return None if self.request is None or self.free is None else max(0, self.request - self.free)


def of(error: BaseException) -> Shortage | None:
    """The shortage behind an exception, on a GPU as observed when it happened; `None` for other exceptions."""
    noted: Shortage | None = getattr(error, "shortage", None)
    if noted is not None:
        return noted
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _OTHER_WORDS.search(text)):
        seen = _Observer.latest()
        if seen is None and text.startswith(_BARE) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            free, total = torch.cuda.mem_get_info()
            if free >= _ROOM * total:
                return Shortage("host")
        return seen or parse(text)
    match = _CPU_ALLOCATOR.search(text) if isinstance(error, RuntimeError) else None
    if match is not None:
        return Shortage("host", request=int(match[1]))
    return Shortage("host") if isinstance(error, MemoryError) else None


def parse(message: str) -> Shortage:
    """The figures in a message of torch's CUDA allocator (torch 2.9 to 2.13)."""

    def size(pattern: str) -> int | None:
        match = re.search(pattern.replace("SIZE", _SIZE), message)
        return round(float(match[1]) * _UNITS[match[2]]) if match else None

    allocated, idle = size(r"Of the allocated memory SIZE is"), size(r"and SIZE is reserved by PyTorch but")
    return Shortage(
        "device",
        request=size(r"Tried to allocate SIZE"),
        limit=size(r"SIZE allowed") or size(r"total capacity of SIZE"),
        free=size(r"of which SIZE is free"),
        allocated=allocated,
        reserved=None if allocated is None or idle is None else allocated + idle,
        exact=False,
    )


def observe(device: torch.device) -> None:
    """Let the CUDA allocator report a failed request before it raises; costs nothing until then. Idempotent."""
    if device.type == "cuda" and not _Observer.attached:
        observe_shortages(_Observer.note)
        _Observer.attached = True


class _Observer:
    """Keeps the last failed request; torch has no way to detach an observer, so there is one per process."""

    attached = False
    _latest: tuple[float, Shortage] | None = None

    @classmethod
    def latest(cls) -> Shortage | None:
        if cls._latest is None or time.monotonic() - cls._latest[0] > _FRESH_S:
            return None
        return cls._latest[1]

    @classmethod
    def note(cls, device: int, request: int, limit: int, free: int) -> None:
        """Called by the allocator with the request, and the device's total and free bytes."""
        try:
            stats = torch.cuda.memory_stats_as_nested_dict(device)
            allocated, reserved = (stats[f"{kind}_bytes"]["all"]["current"] for kind in ("allocated", "reserved"))
            snapshot = allocator_snapshot(device)
            shortage = Shortage("device", request, limit, free, allocated, reserved, snapshot=snapshot)
            cls._latest = (time.monotonic(), shortage)
        except Exception:  # an exception from here would replace the error itself
            _LOG.exception("cannot look at the GPU's memory")


# `memory.cap`: run out of memory at a chosen size, on the GPU by the allocator, on the CPU by counting tensors.

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
