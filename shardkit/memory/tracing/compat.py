"""Private names of torch for tracking tensors and the allocator, and the functions of torch that tracking replaces."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...config.libraries import Feature, NameGone

TRACKER = Feature("following tensors (memory.trace_step, memory.cap on CPUs, plans)")
CONVOLUTIONS = Feature("counting convolutions' copies on CPUs")
GROUP_NAME = Feature("naming the module that FSDP2 gathered when memory ran out")
HISTORY = Feature("the CUDA allocator's history (profile.start, post-mortems)")
OBSERVER = Feature("exact figures of a failed request in post-mortems")
STACKS = Feature("lines of Python in the tables of a profile (profile.stack)")
_PYTREE = "https://github.com/pytorch/pytorch/issues/65761"

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter as tree_iter

    from .tracker import TensorTracker

    DispatchMode = TorchDispatchMode
else:
    DispatchMode = TRACKER.take("torch.utils._python_dispatch.TorchDispatchMode")
    tree_iter = TRACKER.take("torch.utils._pytree.tree_iter", _PYTREE)

DEVICE = torch.ops.prim.device.default
TRACKER.take("torch.ops.aten.add.Tensor._schema")
_select_conv_backend = CONVOLUTIONS.take("torch._C._select_conv_backend")
# `resize_` is not an operator: dispatch does not see it.
_resize = TRACKER.take("torch.UntypedStorage.resize_")
# DTensor's sharding propagation runs operators on fake tensors of global shape; under an outer FakeTensorMode these
# look like the program's tensors (torch 2.9 to 2.15).
_PROPAGATE = "_propagate_tensor_meta_non_cached"
_propagator = TRACKER.take("torch.distributed.tensor._sharding_prop.ShardingPropagator")
_propagate = TRACKER.take(f"torch.distributed.tensor._sharding_prop.ShardingPropagator.{_PROPAGATE}")
GROUP_NAME.use("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._module_fqn")
_record = HISTORY.take("torch.cuda.memory._record_memory_history")
_dump = HISTORY.take("torch.cuda.memory._dump_snapshot")
HISTORY.take("torch.cuda.memory._snapshot")
_is_recording = HISTORY.use("torch._C._cuda_isHistoryEnabled", cuda=True)
_ExperimentalConfig = STACKS.take(
    "torch.profiler._ExperimentalConfig", "https://github.com/pytorch/pytorch/issues/100253"
)
_attach = OBSERVER.use("torch._C._cuda_attach_out_of_memory_observer", cuda=True)


def schema(func: Any) -> Any:
    """An operator's schema: its name, arguments and results."""
    return func._schema


def convolution_backend(image: torch.Tensor, weight: torch.Tensor, *settings: Any) -> str:
    """Name of the library that computes a convolution; empty if torch does not say."""
    try:
        return str(_select_conv_backend(image, weight, None, *settings).name)
    except NameGone:
        CONVOLUTIONS.works()
        return ""


class Patches:
    """Replaces two functions of torch while any tracker is active: storages' `resize_` and DTensor's propagation."""

    _lock = threading.RLock()
    _trackers: list[TensorTracker] = []
    _originals: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    _propagating = threading.local()

    @classmethod
    def in_propagation(cls) -> bool:
        return getattr(cls._propagating, "depth", 0) > 0

    @classmethod
    def acquire(cls, tracker: TensorTracker) -> None:
        with cls._lock:
            cls._trackers.append(tracker)
            if cls._originals is None:
                cls._install()

    @classmethod
    def release(cls, tracker: TensorTracker) -> None:
        with cls._lock:
            cls._trackers.remove(tracker)
            if not cls._trackers and cls._originals is not None:
                torch.UntypedStorage.resize_ = cls._originals[0]  # type: ignore[method-assign]
                setattr(_propagator, _PROPAGATE, cls._originals[1])
                cls._originals = None

    @classmethod
    def _install(cls) -> None:
        resize, propagate = torch.UntypedStorage.resize_, getattr(_propagator, _PROPAGATE)
        cls._originals = (resize, propagate)

        @functools.wraps(resize)
        def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
            result = resize(storage, *args)
            for tracker in cls._trackers:
                tracker.recount(storage)
            return result

        @functools.wraps(propagate)
        def propagated(self: Any, *args: Any, **kwargs: Any) -> Any:
            cls._propagating.depth = getattr(cls._propagating, "depth", 0) + 1
            try:
                return propagate(self, *args, **kwargs)
            finally:
                cls._propagating.depth -= 1

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        setattr(_propagator, _PROPAGATE, propagated)


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def fsdp_module_name(group: Any) -> str | None:
    """Name of the module that an FSDP2 parameter group belongs to."""
    name = getattr(group, "_module_fqn", None)
    return name if isinstance(name, str) else None


def keep_history(entries: int) -> None:
    """Make the CUDA allocator record every allocation with its Python stack."""
    if HISTORY.works():
        _record(max_entries=entries, stacks="python")


def write_history(path: str) -> bool:
    """Write the CUDA allocator's record to a file and stop recording; returns whether it was written."""
    if not HISTORY.works():
        return False
    _dump(path)
    _record(enabled=None)
    return True


def keep_stacks(on: bool) -> bool:
    """Make the CUDA allocator keep the Python stack of each live block, or stop it; whether it did."""
    if not HISTORY.works() or (on and _is_recording.find()()):
        return False
    _record(enabled="state" if on else None, stacks="python", max_entries=1)
    return True


def stacks_in_tables() -> Any:
    """Settings for `torch.profiler.profile`: without them it records stacks but leaves them out of `key_averages`."""
    return _ExperimentalConfig(verbose=True) if STACKS.works() else None


def allocator_snapshot(device: int) -> Any:
    """The segments and blocks of the CUDA allocator; None if this torch does not show them."""
    return torch.cuda.memory._snapshot(device) if HISTORY.works() else None


def observe_shortages(note: Callable[[int, int, int, int], None]) -> None:
    """Make the CUDA allocator call `note(device, request, total, free)` before a failed request raises."""
    try:
        _attach.find()(note)
    except NameGone:
        OBSERVER.lost(_attach)
