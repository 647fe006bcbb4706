"""Track every tensor's storage through part of a training: live bytes and their peak, per device.

For a traced step and for tests, not for every step: it adds some 10 µs to each operator.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..probe import local_tensors
from .compat import DEVICE, DispatchMode, Patches, convolution_backend, schema, tensors
from .events import EventLog

# Scratch memory inside operators, which no tensor of the program shows, computed from arguments and results.

Count = Callable[[Any, Any], int]
"""Returns bytes from an operator's arguments and its result."""


def scratch(func: Any, args: Sequence[Any], out: Any) -> tuple[torch.device, int] | None:
    """The device and bytes of an operator's scratch memory; None if unknown.

    `func`: the `OpOverload` that dispatch received.
    """
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), None)
    count = None if device is None else _counted_by(func, device.type)
    return None if device is None or count is None else (device, count(args, out))


def may_take_scratch(func: Any) -> bool:
    """Whether an operator's scratch memory is known on some kind of device."""
    return any(_counted_by(func, kind) is not None for kind in ("cpu", "cuda"))


@functools.cache
def _counted_by(func: Any, kind: str) -> Count | None:
    name = schema(func).name
    if name in _SCRATCH:
        return _SCRATCH[name][1] if _SCRATCH[name][0] == kind else None
    if kind == "cpu" and torch.Tag.pointwise in func.tags and name not in _MASKED:
        return _promoted
    return None


def _flash_attention_backward(args: Any, out: Any) -> int:
    """FlashAttention-2's backward: row sums and an fp32 accumulator of dQ, rows rounded up to 128 and widths to 32.

    With fewer key heads than query heads, dK and dV are first made with as many heads as the query. The results of the
    forward lie as the query does, and are copied, like their gradient, if that is not [batch, sequence, heads, width].
    Args are (grad_out, query, key, value, out, ...), each [batch, heads, sequence, head width].
    """
    grad, query, key, _, attended = args[:5]
    batch, heads, rows, width = query.shape
    rows_up, width_up = -(-rows // 128) * 128, -(-width // 32) * 32
    n_bytes: int = 4 * batch * heads * rows_up * (1 + width_up)
    if key.shape[1] != heads:
        n_bytes += 2 * batch * key.shape[2] * heads * width * query.element_size()
    for part in (grad, attended):
        n_bytes += 0 if part.transpose(1, 2).is_contiguous() else part.nbytes
    return n_bytes


def _flash_by_documents_backward(args: Any, out: Any) -> int:
    """The same by documents: rows are rounded up by adding 128 for each document.

    Args are (grad_out, query, key, value, out, logsumexp, bounds, ...), each [tokens, heads, head width].
    """
    query, key, bounds = args[1], args[2], args[6]
    tokens, heads, width = query.shape
    rows_up, width_up = tokens + 128 * (bounds.numel() - 1), -(-width // 32) * 32
    n_bytes: int = 4 * heads * rows_up * (1 + width_up)
    if key.shape[1] != heads:
        n_bytes += 2 * tokens * heads * width * query.element_size()
    return n_bytes


def _columns_summed(args: Any, out: Any) -> int:
    """The partial sums of a sum over a matrix's rows, as for a bias's gradient, that many blocks of threads share.

    After `ReduceConfig` and `setReduceConfig` in torch's Reduce.cuh: a thread sums four columns where they divide; at
    least 16 values a thread, and at most 256 where the blocks of all multiprocessors allow it. Args are (input, dims,
    ...); other layouts and dims are not counted.
    """
    matrix = args[0]
    dims = sorted(dim % matrix.dim() for dim in (args[1] if len(args) > 1 else None) or ())
    if not dims or dims != list(range(len(dims))) or len(dims) == matrix.dim() or not matrix.is_contiguous():
        return 0
    columns = math.prod(matrix.shape[len(dims) :])
    if not columns or not matrix.numel():
        return 0
    rows = matrix.numel() // columns
    at_once = next(n for n in (4, 2, 1) if columns % n == 0)
    most = 512 // at_once
    across, down = (min(1 << (n.bit_length() - 1), most) for n in (columns // at_once, rows))
    height = min(down, most // min(across, 32))
    width = min(across, most // height)
    values = -(-rows // height)
    if rows < min(height * 16, 256) or values < 256:
        return 0
    card = torch.cuda.get_device_properties(matrix.device)
    filling = card.multi_processor_count * (card.max_threads_per_multi_processor // (width * height))
    blocks = -(-(columns // at_once) // width)
    if blocks > filling:
        return 0
    parts = max(min(-(-filling // blocks), -(-values // 16)), -(-values // 256))
    return 4 * columns * parts * width * at_once if parts > 1 else 0


def _promoted(args: Any, out: Any) -> int:
    """Pointwise operators on CPUs copy operands, and results, that are not of the common dtype.

    See torch's `TensorIteratorBase::compute_types`; on GPUs the kernel converts as it reads and writes.
    """
    operands = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()]
    if len({operand.dtype for operand in operands}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    if out is args[0]:
        operands.append(out)
    return sum(operand.numel() * common.itemsize for operand in operands if operand.dtype != common)


def _convolution(args: Any, out: Any) -> int:
    """oneDNN's copies in its blocked layout: of the input, the weight and the result, which is then copied back.

    Its developer guide, "Understanding Memory Formats": channels in blocks of 16 with AVX-512, of 8 with AVX2; images
    of at most 3 channels are read in place. The kernel's own scratchpad is not counted. What oneDNN does not compute,
    as bf16 without AVX-512, torch computes as a product with unfolded windows. Args are (input, weight, bias, stride,
    padding, dilation, transposed, output padding, groups).
    """
    image, weight = args[0], args[1]
    backend = convolution_backend(image, weight, *args[3:9])
    if backend == _UNFOLDING:
        # The windows of all images, for one group after another; the groups' results are then concatenated.
        windows = _windows(image, weight, out, *args[3:5])
        return windows if args[8] == 1 else max(windows + _of_group(image, args[8]), int(out.nbytes))
    lanes = _lanes(backend, image, args[8])
    if not lanes:
        return 0
    result = _blocked(out, lanes)
    elements = max(_read(image, lanes) + _blocked(weight, lanes, 0, 1) + result - out.numel(), result)
    return int(elements * image.element_size())


def _convolution_backward(args: Any, out: Any) -> int:
    """Like `_convolution`: first for the input's gradient, which is copied back, then for the weight's.

    Args are (grad_out, input, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, mask).
    """
    grad, image, weight = args[:3]
    backend = convolution_backend(image, weight, *args[4:10])
    if backend == _UNFOLDING:
        return _unfolded_backward(args, out)
    lanes = _lanes(backend, image, args[9])
    if not lanes:
        return 0
    of_input, of_weight = (0 if result is None else result.numel() for result in out[:2])
    grads, weights, inputs = _blocked(grad, lanes), _blocked(weight, lanes, 0, 1), _blocked(image, lanes)
    for_input = inputs + max(grads + weights, of_input) if of_input else 0
    for_weight = of_input + grads + _read(image, lanes) + weights if of_weight else 0
    elements = max(for_input - of_input - of_weight, for_weight - of_input - of_weight, 0)
    return int(elements * image.element_size())


def _unfolded_backward(args: Any, out: Any) -> int:
    """The windows beside the weight's gradient, or the fp32 copy in which a bias's gradient is summed before it."""
    grad, image, weight = args[:3]
    groups = args[9]
    _, of_weight, of_bias = out
    n_bytes = 0 if of_weight is None else _windows(image, weight, grad, *args[4:6])
    if of_bias is not None and grad.itemsize < 4 and len(grad) > 1:
        allocated_later = 0 if of_weight is None else of_weight.nbytes
        n_bytes = max(n_bytes, (4 * (grad.numel() + of_bias.numel()) - allocated_later) // groups)
    if groups == 1:
        return n_bytes
    results: int = sum(tensor.nbytes for tensor in out if tensor is not None)
    return max(n_bytes + _of_group(grad, groups) + _of_group(image, groups), results)


def _windows(image: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stride: Any, padding: Any) -> int:
    """Bytes of what a kernel sees of one group of all images; 0 where that is their pixels in order."""
    if math.prod(weight.shape[2:]) == 1 and set(stride) == {1} and not any(padding):
        return 0
    return len(image) * math.prod(weight.shape[1:]) * math.prod(out.shape[2:]) * image.element_size()


def _of_group(images: torch.Tensor, groups: int) -> int:
    """Bytes of a contiguous copy of one group of channels; of one image it is contiguous as it is."""
    return images.nbytes // groups if len(images) > 1 else 0


def _lanes(backend: str, image: torch.Tensor, groups: int) -> int:
    """Channels per block of oneDNN's layout; 0 if oneDNN does not compute this, or uses the tensors' layout.

    Also 0 for groups of more than one channel: their layout is unknown.
    """
    if image.dim() == 4 and not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last):
        return 0
    if backend != "Mkldnn" or groups not in (1, image.shape[1]):
        return 0
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 0)


def _read(image: torch.Tensor, lanes: int) -> int:
    return 0 if image.shape[1] <= _PLAIN_CHANNELS else _blocked(image, lanes)


def _blocked(tensor: torch.Tensor, lanes: int, *dims: int) -> int:
    """Elements of a tensor with blocked channels: dimension 1, or those given."""
    sizes = [
        -(-size // lanes) * lanes if at in (dims or (1,)) and size > _PLAIN_CHANNELS else size
        for at, size in enumerate(tensor.shape)
    ]
    return math.prod(sizes)


_PLAIN_CHANNELS = 3
_UNFOLDING = "Slow2d"  # torch's name of its own convolution of images; transposed, dilated and 3-D ones are not counted
_MASKED = ("aten::where", "aten::masked_fill", "aten::masked_fill_")  # a mask keeps its dtype
_SCRATCH: dict[str, tuple[Literal["cuda", "cpu"], Count]] = {
    "aten::_scaled_dot_product_flash_attention_backward": ("cuda", _flash_attention_backward),
    "aten::_flash_attention_backward": ("cuda", _flash_by_documents_backward),
    "aten::sum": ("cuda", _columns_summed),
    "aten::_safe_softmax": ("cuda", lambda args, out: out.numel()),  # which values are -inf
    "aten::_softmax_backward_data": ("cuda", lambda args, out: args[0].nbytes),  # gradient times result
    "aten::convolution": ("cpu", _convolution),
    "aten::convolution_backward": ("cpu", _convolution_backward),
    # gloo gathers into a flat copy of the output, and reduces a copy of the whole input: arguments 0 and 1.
    "c10d::_allgather_base_": ("cpu", lambda args, out: int(args[0].nbytes)),
    "c10d::_reduce_scatter_base_": ("cpu", lambda args, out: int(args[1].nbytes)),
}
"""Operator → (the device kind it applies to, its scratch bytes)."""


Device = str | torch.device
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")
"""Operators that take the matrix library's workspace."""
_EXCHANGE = "_c10d_functional::all_to_all_single"
"""Its argument is a copy that was made to be sent (`parallel/context.py`)."""
_LAST_FIRST = ("aten::native_dropout",)
"""Operators whose kernels make the last result first."""


class _Storage:
    __slots__ = ("device", "index", "label", "n_bytes", "ref")

    def __init__(self, device: str, label: str | None, index: int) -> None:
        self.device, self.label, self.n_bytes, self.index = device, label, 0, index
        self.ref: weakref.ref[torch.UntypedStorage] | None = None


class TensorTracker(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensor storages while it is entered, on every device, real or fake.

    Each storage counts once, with its full size, from the moment an operator returns a tensor on it until its last
    reference is gone; storages made earlier count from `see` on. In-place growth, `out=`, collectives and
    `UntypedStorage.resize_` (which FSDP2 uses to free parameters) are tracked. DTensors and other wrapper subclasses
    count as the local tensors inside them; the fake tensors of DTensor's sharding propagation do not count. Backward is
    tracked on any thread: autograd passes the caller's dispatch mode to its device threads. The work per operator does
    not grow with the number of live storages.

    Not counted: scratch memory inside a kernel, regions compiled by torch.compile, and memory outside tensors. A
    storage over foreign memory (numpy, mmap) counts in full once an operator returns a view of it. With fake tensors,
    enter the tracker inside the `FakeTensorMode`.

    Peaks count from the first `__enter__`; a tracker that is entered again continues counting.

    `log`: receives every event. `ran`: called with every operator, its arguments and its result.
    """

    def __init__(self, log: EventLog | None = None, ran: Callable[[Any, Any, Any, Any], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self._ran = ran
        self._live: dict[int, _Storage] = {}
        self._current: dict[str, int] = {}
        self._ever_allocated: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._phase = "start"
        self._phase_peaks: dict[str, dict[str, int]] = {"start": {}}
        self._lock = threading.RLock()
        self._busy = False
        self._dead: deque[int] = deque()

    def see(self, tree: Any, label: str | None = None) -> None:
        """Count the storages of all tensors in nested containers (or of a module's parameters, gradients and buffers).

        `tree`: tensors in any nesting of lists, tuples and dicts, or a module. `label`: their label in `by_label`.
        """
        if isinstance(tree, torch.nn.Module):
            params = list(tree.parameters())
            tree = [*params, *(p.grad for p in params if p.grad is not None), *tree.buffers()]
        for tensor in tensors(tree):
            self._see(tensor, label)

    def mark(self, phase: str) -> None:
        """From now on peaks also count towards `phase`; a repeated phase keeps its largest peak."""
        with self._updating():
            if self.log is not None:
                self.log.mark(phase)
            self._phase = phase
            peaks = self._phase_peaks.setdefault(phase, {})
            for device, n_bytes in self._current.items():
                peaks[device] = max(peaks.get(device, 0), n_bytes)

    def current(self, device: Device) -> int:
        """Bytes of live storages on a device ("cpu", "cuda:1"; "cuda" = the only GPU in use)."""
        return self._current.get(self._key(device), 0)

    def ever_allocated(self, device: Device) -> int:
        """Bytes of all storages so far on a device, those that are gone too."""
        return self._ever_allocated.get(self._key(device), 0)

    def peak(self, device: Device, phase: str | None = None) -> int:
        """The largest `current` so far, or in one phase."""
        peaks = self._peak if phase is None else self._phase_peaks.get(phase, {})
        return peaks.get(self._key(device), 0)

    def phase_peaks(self, device: Device) -> dict[str, int]:
        """Peak by phase, in order of first `mark`; "start" is the time before any mark."""
        key = self._key(device)
        return {phase: peaks.get(key, 0) for phase, peaks in self._phase_peaks.items()}

    def by_label(self, device: Device) -> dict[str | None, int]:
        """Bytes of live storages by label; `None` for unlabelled ones."""
        key, sums = self._key(device), dict[str | None, int]()
        with self._updating():
            for entry in self._live.values():
                if entry.device == key:
                    sums[entry.label] = sums.get(entry.label, 0) + entry.n_bytes
        return sums

    def __enter__(self) -> TensorTracker:
        Patches.acquire(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        Patches.release(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A wrapper's own dispatch runs first, and calls this mode again with the tensors inside.
        for cls in types:
            if _wraps(cls):
                return NotImplemented
        if func is DEVICE:  # only a query, but as frequent as all operators together
            return getattr(args[0], "fake_device", None) or func(*args)
        out = func(*args, **(kwargs or {}))
        if not Patches.in_propagation():
            traits = _traits(func)
            # The planner's allocator replays allocations in this order, which decides which free block each one gets.
            self._see_result(reversed(out) if traits.is_last_first else out, traits.name, traits.is_older)
            if traits.name == _EXCHANGE:
                self.see(args[0], "communication")
            if self.log is not None:
                taken = scratch(func, args, out) if traits.may_take_scratch else None
                if taken is not None and taken[1]:
                    with self._updating():
                        self.log.scratch(str(taken[0]), traits.name, taken[1])
                if traits.is_product and self.log.product_workspace and isinstance(out, torch.Tensor):
                    with self._updating():
                        self.log.multiplied(str(out.device), traits.name)
            if self._ran is not None:
                self._ran(func, args, kwargs or {}, out)
        return out

    def _see_result(self, out: Any, op: str, is_older: bool) -> None:
        if isinstance(out, torch.Tensor):
            self._see(out, None, op, is_older)
        elif isinstance(out, (list, tuple, reversed)):
            for item in out:
                self._see_result(item, op, is_older)

    def _see(self, tensor: torch.Tensor, label: str | None, op: str = "", is_older: bool = False) -> None:
        for local in local_tensors(tensor) if _wraps(type(tensor)) else (tensor,):
            if local.device.type != "meta" and local.layout == torch.strided:
                self._count(local, label, op, is_older)

    def _count(self, local: torch.Tensor, label: str | None, op: str, is_older: bool) -> None:
        storage, log = local.untyped_storage(), self.log
        key = id(storage)  # the object lives as long as the storage itself
        counted = self._live.get(key)
        if counted is not None and label is None and not self._dead and counted.n_bytes == storage.nbytes():
            return  # the usual case: results of views and in-place operators
        with self._updating():
            entry = self._live.get(key)
            if entry is None:
                device = str(local.device)
                entry = self._live[key] = _Storage(device, label, -1 if log is None else log.made(device, op))
                entry.ref = weakref.ref(storage, functools.partial(self._forget, key))
                if log is not None:
                    allocation = log.allocations[entry.index]
                    allocation.shape, allocation.is_older = tuple(local.shape), is_older
            elif label is not None:
                entry.label = label
            if log is not None and label is not None:
                log.labelled(entry.index, label)
            self._resized(entry, storage.nbytes())

    def recount(self, storage: torch.UntypedStorage) -> None:
        """Update a storage's size after `UntypedStorage.resize_`; unknown storages stay uncounted."""
        with self._updating():
            entry = self._live.get(id(storage))
            if entry is not None:
                self._resized(entry, storage.nbytes())

    def _forget(self, key: int, _: object) -> None:
        """Handle the end of a storage. Garbage collection may call this during an update: then only queue it."""
        self._dead.append(key)
        with self._lock:
            if not self._busy:
                self._bury()

    def _updating(self) -> _Update:
        """Guard an update: remove dead storages before it (their addresses may be reused) and after it."""
        return _Update(self)

    def _bury(self) -> None:
        while self._dead:
            self._resized(self._live.pop(self._dead.popleft()), 0)

    def _resized(self, entry: _Storage, n_bytes: int) -> None:
        if n_bytes == entry.n_bytes:
            return
        device = entry.device
        if self.log is not None:
            self.log.changed(entry.index, n_bytes - entry.n_bytes)
        current = self._current[device] = self._current.get(device, 0) + n_bytes - entry.n_bytes
        self._ever_allocated[device] = self._ever_allocated.get(device, 0) + max(0, n_bytes - entry.n_bytes)
        entry.n_bytes = n_bytes
        if current > self._peak.get(device, 0):
            self._peak[device] = current
        peaks = self._phase_peaks[self._phase]
        if current > peaks.get(device, 0):
            peaks[device] = current

    def _key(self, device: Device) -> str:
        asked_device = torch.device(device)
        if asked_device.type == "cpu" or ":" in str(asked_device):
            return str(asked_device)
        used = sorted(key for key in self._current if torch.device(key).type == asked_device.type)
        if len(used) > 1:
            raise ValueError(f"{device} is ambiguous: tensors were seen on {', '.join(used)}")
        return used[0] if used else str(asked_device)


class _Update:
    """The context of an update of a tracker; it may be within another one. See `TensorTracker._updating`."""

    __slots__ = ("_before", "_tracker")

    def __init__(self, tracker: TensorTracker) -> None:
        self._tracker, self._before = tracker, False

    def __enter__(self) -> None:
        tracker = self._tracker
        tracker._lock.acquire()
        tracker._bury()
        self._before, tracker._busy = tracker._busy, True

    def __exit__(self, *raised: object) -> None:
        tracker = self._tracker
        tracker._busy = self._before
        try:
            tracker._bury()
        finally:
            tracker._lock.release()


class _Traits(NamedTuple):
    """What is known about an operator before it runs."""

    name: str
    is_older: bool  # its results lie in the memory of its arguments: views, and what it writes to
    is_last_first: bool  # its kernel makes the last result first
    is_product: bool  # it takes the matrix library's workspace
    may_take_scratch: bool  # it takes scratch memory on some kind of device


@functools.cache
def _traits(func: Any) -> _Traits:
    name = schema(func).name
    return _Traits(
        name,
        is_older=any(result.alias_info is not None for result in schema(func).returns),
        is_last_first=name in _LAST_FIRST,
        is_product=name in PRODUCTS,
        may_take_scratch=may_take_scratch(func),
    )


@functools.cache
def _wraps(cls: type) -> bool:
    """Whether a tensor subclass holds its data in other tensors."""
    return hasattr(cls, "__tensor_flatten__")
