"""Random initialisation, recorded while it runs on memory that nobody touches and replayed for any range of a tensor.

A chunk of `CHUNK` values has a generator of its own. Its values depend on the seed, the tensor's name and the chunk's
index, so a rank draws the chunks that its shard touches, and every rank and engine gets the same values.

The recorder takes writes of constants, `normal_`, `uniform_`, `nn.init.trunc_normal_`, and operators that change each
value by a number (`mul_`, `clamp_`), on the whole tensor or on a contiguous range of it. `nn.init` needs nothing else,
except in `orthogonal_`, `dirac_`, `eye_` and `sparse_`. A call that draws with a generator of the model's own is not
recorded either: its values are those of that generator, on the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import ConfigError
from .compat import DispatchMode, is_held_elsewhere, is_same_generator, replaced_truncated_normal, tree_leaves

CHUNK = 2**18
"""Values of a chunk: 1 MiB of fp32. Smaller tensors are drawn whole."""

_MARK = -1.9375 * 2.0**-12
"""Stands at the start of memory that nobody has written to; every floating-point type has it."""

OWN_GENERATOR = "draws with a generator of its own"
"""The reason to run a call on the whole tensor, whose values only that generator has."""

_aten = torch.ops.aten
_CONSTANTS = {_aten.fill_.Scalar, _aten.zero_.default}
_RANDOM = {_aten.normal_.default, _aten.uniform_.default}
_FACTORIES: dict[Any, tuple[Any, ...]] = {
    _aten.empty.memory_format: (),
    _aten.zeros.default: (_aten.zero_.default,),
    _aten.ones.default: (_aten.fill_.Scalar, 1.0),
    _aten.randn.default: (_aten.normal_.default, 0.0, 1.0),
    _aten.rand.default: (_aten.uniform_.default, 0.0, 1.0),
}
"""Operator that makes a tensor of a size → the operator that writes the same values, and its arguments."""
_SIZES_ONLY = {
    _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
    _aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default,
}  # fmt: skip
"""Operators that read the size and the type of a tensor, no value."""
_ESCAPES = {
    torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.data_ptr, torch.Tensor.storage,
    torch.Tensor.untyped_storage, torch.Tensor.__dlpack__, torch.Tensor.share_memory_, torch.Tensor.__reduce_ex__,
}  # fmt: skip
"""Functions that read a tensor's memory without an operator."""


@dataclass(frozen=True)
class Step:
    """One call on the range [start, end) of a flattened tensor."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    start: int
    end: int
    random: bool
    overwrites: bool


class Recipe:
    """The calls that initialise one tensor.

    Attributes:
        key: the name to seed it by; empty for a parameter's own.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.key = ""
        self.numel = numel
        self.dtype = dtype
        self._steps: list[Step] = []

    def add(self, step: Step) -> None:
        if step.overwrites and (step.start, step.end) == (0, self.numel):
            self._steps.clear()
        self._steps.append(step)

    @property
    def complete(self) -> bool:
        """Whether every value is written, whatever the memory held before."""
        first = self._steps[0] if self._steps else None
        return first is not None and first.overwrites and (first.start, first.end) == (0, self.numel)

    def fill(self, seed: int, out: torch.Tensor, start: int = 0) -> int:
        """Write the values [start, start + out.numel()) into `out`, 1-d and of any dtype and device.

        Returns:
            The number of random values drawn: at most those of two chunks more than `out` has.
        """
        drawn, end = 0, start + out.numel()
        buffer = torch.empty(min(CHUNK, self.numel), dtype=self.dtype)
        # A copy to a device would convert in new host memory each time, which glibc before 2.38 hardly uses again.
        converted = torch.empty_like(buffer, dtype=out.dtype)
        generator = torch.Generator()
        for index in range(start // CHUNK, -(-end // CHUNK)):
            begin = index * CHUNK
            chunk = buffer[: min(CHUNK, self.numel - begin)]
            if not self.complete:
                chunk.zero_()
            # torch uses 32 bits of a seed: neighbours differ for certain, hashes of 2^16 chunks would not.
            drawn += self._draw(chunk, begin, generator.manual_seed(seed + index))
            low, high = max(start, begin), min(end, begin + chunk.numel())
            wanted = chunk[low - begin : high - begin]
            if out.dtype != self.dtype:
                wanted = converted[: high - low].copy_(wanted)
            out[low - start : high - start].copy_(wanted)
        return drawn

    def _draw(self, chunk: torch.Tensor, begin: int, generator: torch.Generator) -> int:
        drawn = 0
        for step in self._steps:
            low, high = max(step.start - begin, 0), min(step.end - begin, chunk.numel())
            if low < high:
                part = chunk[low:high]
                if step.random:
                    step.run(part, *step.args, generator=generator)
                    drawn += part.numel()
                else:
                    step.run(part, *step.args)
        return drawn


class Uncut(Exception):
    """A call that cannot be replayed for a part of its tensor; the message names the call."""


@torch.no_grad()
def record(
    shape: torch.Size, init: Callable[[torch.Tensor], object], generator: torch.Generator | None = None
) -> Recipe:
    """Run `init` on an fp32 CPU tensor of this shape without computing or touching memory.

    Args:
        generator: the one that `init` is given to draw with; the replay puts its own in its place.

    Raises:
        Uncut: it does something else than what is recorded, or does not write every value.
    """
    with untouched_memory():
        full = torch.empty(shape, dtype=torch.float32)
    recorder = Recorder(generator)
    tensor = recorder.defer(full)
    with recorder:
        try:
            init(full)
        except Exception:
            if not recorder.problem:
                raise
    if recorder.problem:
        raise Uncut(recorder.problem)
    if not tensor.recipe.complete:
        raise Uncut("does not write the whole tensor at once")
    return tensor.recipe


@contextmanager
def untouched_memory() -> Iterator[None]:
    """`torch.empty` inside leaves memory as it is, also where deterministic algorithms are asked for."""
    setting: Any = torch.utils.deterministic
    was = setting.fill_uninitialized_memory
    setting.fill_uninitialized_memory = False
    try:
        yield
    finally:
        setting.fill_uninitialized_memory = was


@dataclass
class Deferred:
    """A tensor whose initialisation is recorded; its memory is not touched before the replay."""

    base: torch.Tensor
    order: int
    recipe: Recipe


class Recorder(DispatchMode):
    """Records calls on the tensors given to `defer` instead of running them; everything else runs.

    A call that cannot be recorded, or random numbers for another tensor, end the recording with `Uncut`: the next call
    could depend on them.

    Args:
        generator: the one, beside torch's global one, whose draws a replay may make with its own.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replaceable = [torch.default_generator, *([] if generator is None else [generator])]
        self.problem = ""
        self.deferred: dict[int, Deferred] = {}
        """Address of the memory → the tensor."""
        self.busy = False
        """Whether the recorder itself works: nothing is recorded then."""
        self._count = 0
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        self._stack.enter_context(replaced_truncated_normal(self._truncated))
        self._stack.enter_context(_Escapes(self))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        self._stack.close()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def defer(self, base: torch.Tensor) -> Deferred:
        """Record what is called on this tensor, which must be contiguous and have its storage for itself."""
        with self._at_work():
            made = Deferred(base.detach(), self._count, Recipe(base.numel(), base.dtype))
            self._count += 1
            base.view(-1)[0] = _MARK
            self.deferred[base.untyped_storage().data_ptr()] = made
        return made

    def found(self, tensor: torch.Tensor) -> Deferred | None:
        """The deferred tensor that shares memory with this one."""
        if not self.deferred or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        with self._at_work():
            return self.deferred.get(tensor.untyped_storage().data_ptr())

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Record nothing inside."""
        was, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = was

    def refuse(self, reason: str, touched: list[Deferred]) -> None:
        """Called before an operator that is not recorded works on deferred tensors."""
        self.problem = reason
        raise Uncut(self.problem)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        touched = list({id(deferred): deferred for tensor in tensors if (deferred := self.found(tensor))}.values())
        if not touched:
            return self._other(func, args, kwargs)
        if func.is_view or func in _SIZES_ONLY:
            return func(*args, **kwargs)
        if not self._is_replaceable(kwargs.get("generator")):
            self.refuse(OWN_GENERATOR, touched)
            return func(*args, **kwargs)
        if self._recorded(func, args, kwargs):
            return args[0]
        self.refuse(_needs_whole(func), touched)
        return func(*args, **kwargs)

    def _is_replaceable(self, generator: torch.Generator | None) -> bool:
        return generator is None or any(is_same_generator(generator, other) for other in self._replaceable)

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on tensors that are not deferred."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and not (args and isinstance(args[0], torch.Tensor) and args[0].is_meta):
            self.problem = f"calls {func.overloadpacket} for another tensor"
            raise Uncut(self.problem)
        return func(*args, **kwargs)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Record the call if it can be cut: it writes the first argument, and reads numbers besides."""
        random, constant = func in _RANDOM, func in _CONSTANTS
        by_value = torch.Tag.pointwise in func.tags and func.overloadpacket.__name__.endswith("_")
        options = {key: value for key, value in kwargs.items() if not (random and key == "generator")}
        operands = tree_leaves((args[1:], options))
        if not (random or constant or by_value) or any(isinstance(value, torch.Tensor) for value in operands):
            return False
        return self._step(args[0], partial(func, **options), args[1:], random, random or constant)

    def _truncated(self, whole: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stands for `nn.init.trunc_normal_`, which rejects values until none is left: it may do so in each chunk."""
        options = {key: value for key, value in kwargs.items() if key != "generator"}
        generator = args[4] if len(args) > 4 else kwargs.get("generator")
        can_replay = self._is_replaceable(generator) and self.found(tensor)
        if can_replay and self._step(tensor, partial(whole, **options), args[:4], True, True):
            return tensor
        return whole(tensor, *args, **kwargs)  # type: ignore[no-any-return]

    def _step(
        self, tensor: torch.Tensor, run: Callable[..., Any], args: tuple[Any, ...], random: bool, overwrites: bool
    ) -> bool:
        deferred = self.found(tensor)
        if deferred is None or not tensor.is_contiguous() or tensor.dtype != deferred.recipe.dtype:
            return False
        start = int(tensor.storage_offset())
        if tensor.numel():
            deferred.recipe.add(Step(run, args, start, start + tensor.numel(), random, overwrites))
        return True


class _Escapes(TorchFunctionMode):
    """Tells a recorder of functions that read a tensor's memory without an operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ESCAPES and not self._recorder.busy and (deferred := self._recorder.found(args[0])):
            self._recorder.refuse(_needs_whole(f"Tensor.{func.__name__}"), [deferred])
        return func(*args, **(kwargs or {}))


class Construction(Recorder):  # type: ignore[no-untyped-call]
    """Records how a model's constructor initialises large tensors, and initialises one when something reads its values.

    Tensors below `CHUNK` values are made as ever.

    Args:
        seed_of: the seed for a name.
        strict: raise `Uncut` instead of initialising a large tensor.
    """

    def __init__(self, seed_of: Callable[[str], int], strict: bool = False) -> None:
        super().__init__()
        self._seed_of = seed_of
        self._strict = strict
        self._reasons: dict[int, str] = {}
        self.values_drawn = 0
        self.made_whole: dict[str, str] = {}
        """Name of a large parameter that `replay` finds initialised, or has to initialise → the reason."""

    def refuse(self, reason: str, touched: list[Deferred]) -> None:
        for deferred in touched:
            address = deferred.base.untyped_storage().data_ptr()
            self._reasons[address] = reason
            if reason == OWN_GENERATOR and self._strict:  # the values are written, and nothing has read them
                del self.deferred[address]
            else:
                self._write(deferred)

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in _FACTORIES or len(args) != 1 or math.prod(args[0]) < CHUNK or _has_no_memory(kwargs):
            return func(*args, **kwargs)
        with untouched_memory():
            out = _aten.empty.memory_format(*args, **kwargs)
        if not (out.is_floating_point() and out.is_contiguous()):
            return func(*args, **kwargs)
        self.defer(out)
        self._reasons.pop(out.untyped_storage().data_ptr(), None)  # of memory that was freed since
        if _FACTORIES[func]:
            write, *values = _FACTORIES[func]
            self._recorded(write, (out, *values), {})
        return out

    def replay(self, model: nn.Module, keep_off: bool, in_place: bool = False) -> dict[str, Recipe]:
        """Initialise what is still deferred: each parameter by its name, everything else by its order.

        Args:
            keep_off: leave the parameters' memory untouched.
            in_place: the caller keeps the model's own parameters, so that what else holds one of them (the lists of an
                LSTM) stays right.

        Returns:
            Name → recipe of the parameters that `keep_off` left.
        """
        owners, aliased = dict[int, str](), set[int]()
        for fqn, param in model.named_parameters():
            if deferred := self.found(param):
                whole = deferred.recipe.complete and param.shape == deferred.base.shape and param.is_contiguous()
                if id(deferred) in owners or not whole:
                    aliased.add(id(deferred))
                    self.made_whole[fqn] = "shares its memory" if whole else "does not write the whole tensor at once"
                owners[id(deferred)] = fqn
            elif self._reasons and (why := self._reasons.get(_address(param))):
                self.made_whole[fqn] = why
        others: list[torch.Tensor] = list(model.buffers())
        for module in model.modules():
            plain = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers")]
            others += [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]
        kept = {id(param) for param in model.parameters()} if in_place else set[int]()
        listed = {id(found) for tensor in others if id(tensor) in kept and (found := self.found(tensor))}
        aliased |= {id(found) for tensor in others if id(tensor) not in kept and (found := self.found(tensor))}
        left: dict[str, Recipe] = {}
        for deferred in list(self.deferred.values()):
            fqn = owners.get(id(deferred), "")
            if not fqn and not is_held_elsewhere(deferred.base):
                continue  # the constructor has dropped it, as when it ties a head to an embedding
            if id(deferred) in aliased or not fqn:
                if fqn:
                    self.made_whole.setdefault(fqn, "is for a tensor that the model holds elsewhere too")
                self._write(deferred)
            elif keep_off:
                self._check_untouched(deferred)
                if id(deferred) in listed:
                    deferred.recipe.key = _numbered(deferred)  # as where the lists do not stay right
                left[fqn] = deferred.recipe
            else:
                self._write(deferred, fqn)
        return left

    def _write(self, deferred: Deferred, fqn: str = "") -> None:
        """Initialise the tensor; from now on it is like any other.

        Raises:
            ConfigError: another thread, whose calls are not recorded, has written to it.
        """
        if self._strict:
            raise Uncut(f"reads {deferred.base.numel():,} values while the model is built")
        self._check_untouched(deferred)
        with self._at_work(), torch.no_grad():
            del self.deferred[deferred.base.untyped_storage().data_ptr()]
            values = deferred.base.view(-1)
            self.values_drawn += deferred.recipe.fill(self._seed_of(fqn or _numbered(deferred)), values)

    def _check_untouched(self, deferred: Deferred) -> None:
        with self._at_work(), torch.no_grad():
            if deferred.base.view(-1)[0].item() != _MARK:
                raise ConfigError(
                    f"another thread writes to a tensor of {deferred.base.numel():,} values while the model is built",
                    "build the model first, and give job.wrap the module",
                )


def _numbered(deferred: Deferred) -> str:
    return f"#{deferred.order}"


def _needs_whole(func: Any) -> str:
    return f"calls {getattr(func, 'overloadpacket', func)}, which needs the whole tensor"


def _address(tensor: torch.Tensor) -> int:
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() >= CHUNK
    return tensor.untyped_storage().data_ptr() if plain else 0


def _has_no_memory(kwargs: dict[str, Any]) -> bool:
    device, layout = kwargs.get("device"), kwargs.get("layout")
    return (device is not None and torch.device(device).type != "cpu") or layout not in (None, torch.strided)
