"""Record how one tensor is initialised, without computing anything, so that any range of it can be drawn later.

A tensor is divided into chunks of `CHUNK` values, and each chunk is drawn with a generator of its own. A chunk's values
depend only on the seed, the tensor's name and the chunk's index. So a rank draws just the chunks that its shard
touches, and every rank and engine gets the same values.

The recorder runs the initialisation on memory that nobody touches, and notes the calls in an `InitRecipe`. It can
record writes of constants, `normal_`, `uniform_`, `nn.init.trunc_normal_`, and operators that change each element by a
number (`mul_`, `clamp_`), each on the whole tensor or on a contiguous range of it. `nn.init` needs nothing else, except
in `orthogonal_`, `dirac_`, `eye_` and `sparse_`. A call that draws from a generator of the caller's own cannot be
recorded either: only that generator, run over the whole tensor, gives its values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .compat import DispatchMode, is_same_generator, replaced_truncated_normal, tree_leaves
from .runs import Runs

CHUNK = 2**18
"""Values of a chunk: 1 MiB of fp32. Smaller tensors are drawn whole."""


@dataclass(frozen=True)
class InitCall:
    """One recorded call, on the range [start, end) of a flattened tensor."""

    run: Callable[..., Any]  # the function, called with the range's elements, then `args`
    args: tuple[Any, ...]
    start: int
    end: int
    random: bool  # whether it draws random numbers, and takes a generator
    overwrites: bool  # whether its results do not depend on the old values


class InitRecipe:
    """The calls that initialise one tensor, in order; they can be replayed for any range of it."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.dtype = dtype
        self._calls: list[InitCall] = []

    def add(self, call: InitCall) -> None:
        """Record a call. If it overwrites the whole tensor, the calls before it are forgotten."""
        if self._sets_all(call):
            self._calls.clear()
        self._calls.append(call)

    def _sets_all(self, call: InitCall) -> bool:
        return call.overwrites and (call.start, call.end) == (0, self.numel)

    @property
    def complete(self) -> bool:
        """Whether the calls write every element, whatever the memory held before."""
        return bool(self._calls) and self._sets_all(self._calls[0])

    def fill(self, seed: int, out: torch.Tensor, start: int = 0, run: int = 0, stride: int = 0) -> int:
        """Write the values [start, start + out.numel()) of the flattened tensor into `out`, or those of the runs of
        `run` values that begin `stride` apart.

        `out`: 1-D, of any dtype and device. Each chunk is drawn once, whatever runs it holds. Returns the number of
        random values drawn: at most those from the first run to the last, and of two chunks more.
        """
        runs, drawn = Runs(start, out.numel(), run, stride), 0
        buffer = torch.empty(min(CHUNK, self.numel), dtype=self.dtype)
        # A copy to a device would convert in new host memory each time, which glibc before 2.38 hardly uses again.
        converted = torch.empty_like(buffer, dtype=out.dtype)
        generator = torch.Generator()
        for index in range(start // CHUNK, -(-self.numel // CHUNK)):
            begin = index * CHUNK
            chunk = buffer[: min(CHUNK, self.numel - begin)]
            low, high = runs.below(begin), runs.below(begin + chunk.numel())
            if low == runs.length:
                break
            if low == high:  # between two runs
                continue
            if not self.complete:
                chunk.zero_()
            # torch uses 32 bits of a seed. Neighbouring seeds surely differ; hashes of 2^16 chunks might collide.
            drawn += self._draw(chunk, begin, generator.manual_seed(seed + index))
            for block in runs.blocks(low, high):
                size = block.rows * block.width
                values = chunk[block.start - begin :].as_strided((block.rows, block.width), (stride, 1))
                if out.dtype != self.dtype:
                    values = converted[:size].view(values.shape).copy_(values)
                out[block.offset : block.offset + size].view(values.shape).copy_(values)
        return drawn

    def _draw(self, chunk: torch.Tensor, begin: int, generator: torch.Generator) -> int:
        """Run the calls on the chunk that begins at element `begin`; returns the number of random values drawn."""
        drawn = 0
        for call in self._calls:
            low, high = max(call.start - begin, 0), min(call.end - begin, chunk.numel())
            if low < high:
                part = chunk[low:high]
                if call.random:
                    call.run(part, *call.args, generator=generator)
                    drawn += part.numel()
                else:
                    call.run(part, *call.args)
        return drawn


_aten = torch.ops.aten
_CONSTANTS = {_aten.fill_.Scalar, _aten.zero_.default}
_RANDOM = {_aten.normal_.default, _aten.uniform_.default}
_SIZES_ONLY = {
    _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
    _aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default,
}  # fmt: skip
"""Operators that read a tensor's size and type, but none of its elements."""
_ESCAPES = {
    torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.data_ptr, torch.Tensor.storage,
    torch.Tensor.untyped_storage, torch.Tensor.__dlpack__, torch.Tensor.share_memory_, torch.Tensor.__reduce_ex__,
}  # fmt: skip
"""Functions that read a tensor's memory without calling an operator."""


class Uncut(Exception):
    """Raised for a call that cannot be replayed for a part of its tensor; the message names the call."""


@torch.no_grad()
def record(
    shape: torch.Size, init: Callable[[torch.Tensor], object], generator: torch.Generator | None = None
) -> InitRecipe:
    """Record what `init` does to an fp32 CPU tensor of this shape, without computing or touching memory.

    `generator`: the generator from which `init` draws; a replay draws from its own instead.
    """
    # With deterministic algorithms, `torch.empty` would fill the memory, and so take it.
    setting: Any = torch.utils.deterministic
    fills, setting.fill_uninitialized_memory = setting.fill_uninitialized_memory, False
    try:
        full = torch.empty(shape, dtype=torch.float32)
    finally:
        setting.fill_uninitialized_memory = fills
    recorder = _Recorder(full, generator)
    with recorder:
        try:
            init(full)
        except Exception:
            if not recorder.problem:
                raise
    if recorder.problem:
        raise Uncut(recorder.problem)
    if not recorder.recipe.complete:
        raise Uncut("does not write the whole tensor at once")
    return recorder.recipe


class _Recorder(DispatchMode):
    """Inside this mode, calls on one tensor are recorded instead of run; all other calls run.

    A call that cannot be recorded raises `Uncut`, and so do random numbers for any other tensor: the calls after it
    could depend on them. `problem` keeps the reason, in case the caller's code swallows the exception.
    """

    def __init__(self, full: torch.Tensor, generator: torch.Generator | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recipe, self.problem = InitRecipe(full.numel(), full.dtype), ""
        self._address = full.untyped_storage().data_ptr()
        self._replaceable = [torch.default_generator, *([] if generator is None else [generator])]
        self._stack = ExitStack()
        self._looks = False

    def __enter__(self) -> Any:
        self._stack.enter_context(replaced_truncated_normal(self._truncated))
        self._stack.enter_context(_Escapes(self))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        self._stack.close()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with the recorded one."""
        if self._looks or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        self._looks = True  # the look below is itself one of `_ESCAPES`
        try:
            return tensor.untyped_storage().data_ptr() == self._address
        finally:
            self._looks = False

    def refuse(self, reason: str) -> None:
        self.problem = reason
        raise Uncut(reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(self.holds(tensor) for tensor in tensors):
            draws = torch.Tag.nondeterministic_seeded in func.tags
            if draws and not (args and isinstance(args[0], torch.Tensor) and args[0].is_meta):
                self.refuse(f"calls {func.overloadpacket} for another tensor")
            return func(*args, **kwargs)
        if func.is_view or func in _SIZES_ONLY:
            return func(*args, **kwargs)
        if not self._is_replaceable(kwargs.get("generator")):
            self.refuse("draws with a generator of its own")
        random, constant = func in _RANDOM, func in _CONSTANTS
        elementwise = torch.Tag.pointwise in func.tags and func.overloadpacket.__name__.endswith("_")
        options = {key: value for key, value in kwargs.items() if not (random and key == "generator")}
        from_numbers = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args[1:], options)))
        is_recordable = (random or constant or elementwise) and from_numbers
        if is_recordable and self._add(args[0], partial(func, **options), args[1:], random, random or constant):
            return args[0]
        self.refuse(f"calls {func.overloadpacket}, which needs the whole tensor")
        return None

    def _is_replaceable(self, generator: torch.Generator | None) -> bool:
        return generator is None or any(is_same_generator(generator, replaceable) for replaceable in self._replaceable)

    def _truncated(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand in for `nn.init.trunc_normal_`, and record it as one call: it may reject values in each chunk apart."""
        options = {key: value for key, value in kwargs.items() if key != "generator"}
        generator = args[4] if len(args) > 4 else kwargs.get("generator")
        can_replay = self._is_replaceable(generator) and self.holds(tensor)
        if can_replay and self._add(tensor, partial(original, **options), args[:4], True, True):
            return tensor
        return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]

    def _add(
        self, tensor: torch.Tensor, run: Callable[..., Any], args: tuple[Any, ...], random: bool, overwrites: bool
    ) -> bool:
        """Add a call on `tensor` to the recipe; returns False unless it is a contiguous range of the recorded one."""
        if not self.holds(tensor) or not tensor.is_contiguous() or tensor.dtype != self.recipe.dtype:
            return False
        start = int(tensor.storage_offset())
        if tensor.numel():
            self.recipe.add(InitCall(run, args, start, start + tensor.numel(), random, overwrites))
        return True


class _Escapes(TorchFunctionMode):
    """Tells a recorder when a function reads the tensor's memory without calling an operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ESCAPES and self._recorder.holds(args[0]):
            self._recorder.refuse(f"calls Tensor.{func.__name__}, which needs the whole tensor")
        return func(*args, **(kwargs or {}))
