"""Record how tensors are initialised, without computing anything, so that any range of them can be drawn later.

The recorder runs the initialisation on memory that nobody touches, and notes the calls in an `InitRecipe`. It can
record writes of constants, `normal_`, `uniform_`, `nn.init.trunc_normal_`, and operators that change each element by a
number (`mul_`, `clamp_`), each on the whole tensor or on a contiguous range of it. `nn.init` needs nothing else, except
in `orthogonal_`, `dirac_`, `eye_` and `sparse_`. A call that draws from a generator of the model's own cannot be
recorded either: only that generator, run over the whole tensor, gives its values.
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
from .init_recipe import CHUNK, InitCall, InitRecipe

_MARK = -1.9375 * 2.0**-12
"""Written to the first element of untouched memory, to notice later writes; every floating-point type can hold it."""

OWN_GENERATOR = "draws with a generator of its own"
"""Why a call must run on the whole tensor: only the model's own generator can give its values."""

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
"""Operator that makes a tensor → the in-place operator that writes the same values, and its arguments."""
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
_REGISTERED = ("_parameters", "_buffers")
"""Attributes of a module that hold its registered tensors."""


class Uncut(Exception):
    """Raised for a call that cannot be replayed for a part of its tensor; the message names the call."""


@torch.no_grad()
def record(
    shape: torch.Size, init: Callable[[torch.Tensor], object], generator: torch.Generator | None = None
) -> InitRecipe:
    """Record what `init` does to an fp32 CPU tensor of this shape, without computing or touching memory.

    Args:
        generator: the generator from which `init` draws; a replay draws from its own instead.

    Raises:
        Uncut: `init` makes a call that cannot be recorded, or does not write every element.
    """
    with untouched_memory():
        full = torch.empty(shape, dtype=torch.float32)
    recorder = InitRecorder(generator)
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
    """Inside, `torch.empty` leaves memory as it is, even if the user asked for deterministic algorithms."""
    setting: Any = torch.utils.deterministic
    before = setting.fill_uninitialized_memory
    setting.fill_uninitialized_memory = False
    try:
        yield
    finally:
        setting.fill_uninitialized_memory = before


@dataclass
class Deferred:
    """A tensor whose initialisation is recorded; nothing touches its memory before the replay.

    Attributes:
        order: how many tensors were deferred before it.
    """

    base: torch.Tensor
    order: int
    recipe: InitRecipe


class InitRecorder(DispatchMode):
    """Inside this mode, calls on deferred tensors are recorded instead of run; all other calls run.

    A call that cannot be recorded raises `Uncut`, and so do random numbers for a tensor that is not deferred: the calls
    after it could depend on it.

    Args:
        generator: a generator whose draws a replay may make with its own one, as it does for torch's global generator.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replaceable = [torch.default_generator, *([] if generator is None else [generator])]
        self.problem = ""
        self.deferred: dict[int, Deferred] = {}
        """Address of a deferred tensor's memory → the tensor."""
        self.busy = False
        """True while the recorder itself calls operators, which are then not recorded."""
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
        """Record the calls on this tensor from now on. It must be contiguous, and share its storage with no tensor."""
        with self._at_work():
            deferred = Deferred(base.detach(), self._count, InitRecipe(base.numel(), base.dtype))
            self._count += 1
            base.view(-1)[0] = _MARK
            self.deferred[base.untyped_storage().data_ptr()] = deferred
        return deferred

    def deferred_of(self, tensor: torch.Tensor) -> Deferred | None:
        """The deferred tensor that shares memory with `tensor`, if any."""
        if not self.deferred or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        with self._at_work():
            return self.deferred.get(tensor.untyped_storage().data_ptr())

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Inside, calls are not recorded."""
        was_busy, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = was_busy

    def refuse(self, reason: str, touched: list[Deferred]) -> None:
        """Handle a call on deferred tensors that cannot be recorded: end the recording. Called before the call runs.

        Raises:
            Uncut: always, unless a subclass can initialise the tensors.
        """
        self.problem = reason
        raise Uncut(self.problem)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        touched = list(
            {id(deferred): deferred for tensor in tensors if (deferred := self.deferred_of(tensor))}.values()
        )
        if not touched:
            return self._run_unrelated(func, args, kwargs)
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
        return generator is None or any(is_same_generator(generator, replaceable) for replaceable in self._replaceable)

    def _run_unrelated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator none of whose tensors is deferred.

        Raises:
            Uncut: it draws random numbers.
        """
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and not (args and isinstance(args[0], torch.Tensor) and args[0].is_meta):
            self.problem = f"calls {func.overloadpacket} for another tensor"
            raise Uncut(self.problem)
        return func(*args, **kwargs)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Record a call that writes its first argument element by element from numbers; returns False for any other."""
        random, constant = func in _RANDOM, func in _CONSTANTS
        elementwise = torch.Tag.pointwise in func.tags and func.overloadpacket.__name__.endswith("_")
        options = {key: value for key, value in kwargs.items() if not (random and key == "generator")}
        operands = tree_leaves((args[1:], options))
        if not (random or constant or elementwise) or any(isinstance(operand, torch.Tensor) for operand in operands):
            return False
        return self._add_call(args[0], partial(func, **options), args[1:], random, random or constant)

    def _truncated(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand in for `nn.init.trunc_normal_`, and record it as one call: it may reject values in each chunk apart."""
        options = {key: value for key, value in kwargs.items() if key != "generator"}
        generator = args[4] if len(args) > 4 else kwargs.get("generator")
        can_replay = self._is_replaceable(generator) and self.deferred_of(tensor)
        if can_replay and self._add_call(tensor, partial(original, **options), args[:4], True, True):
            return tensor
        return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]

    def _add_call(
        self, tensor: torch.Tensor, run: Callable[..., Any], args: tuple[Any, ...], random: bool, overwrites: bool
    ) -> bool:
        """Add a call on `tensor`, a range of a deferred one, to its recipe; returns False if it is no such range."""
        deferred = self.deferred_of(tensor)
        if deferred is None or not tensor.is_contiguous() or tensor.dtype != deferred.recipe.dtype:
            return False
        start = int(tensor.storage_offset())
        if tensor.numel():
            deferred.recipe.add(InitCall(run, args, start, start + tensor.numel(), random, overwrites))
        return True


class _Escapes(TorchFunctionMode):
    """Tells a recorder when a function reads a deferred tensor's memory without calling an operator."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ESCAPES and not self._recorder.busy and (deferred := self._recorder.deferred_of(args[0])):
            self._recorder.refuse(_needs_whole(f"Tensor.{func.__name__}"), [deferred])
        return func(*args, **(kwargs or {}))


class ConstructionRecorder(InitRecorder):  # type: ignore[no-untyped-call]
    """Records how a model's constructor initialises large tensors, and initialises a tensor when its values are read.

    Tensors below `CHUNK` values are initialised at once, as without the recorder.

    Args:
        seed_of: gives the seed for a tensor's name.
        strict: raise `Uncut` instead of initialising a large tensor.
    """

    def __init__(self, seed_of: Callable[[str], int], strict: bool = False) -> None:
        super().__init__()
        self._seed_of = seed_of
        self._strict = strict
        self._reasons: dict[int, str] = {}
        self.values_drawn = 0
        self.made_whole: dict[str, str] = {}
        """Name of a large parameter that could not be left to a later draw → the reason, for a message."""

    def refuse(self, reason: str, touched: list[Deferred]) -> None:
        """Initialise deferred tensors before a call on them that cannot be recorded."""
        for deferred in touched:
            address = deferred.base.untyped_storage().data_ptr()
            self._reasons[address] = reason
            if reason == OWN_GENERATOR and self._strict:  # the call writes the values, and nothing has read them
                del self.deferred[address]
            else:
                self._initialise(deferred)

    def _run_unrelated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Defer a large tensor that the operator makes; run any other operator."""
        if func not in _FACTORIES or len(args) != 1 or math.prod(args[0]) < CHUNK or _has_no_memory(kwargs):
            return func(*args, **kwargs)
        with untouched_memory():
            out = _aten.empty.memory_format(*args, **kwargs)
        if not (out.is_floating_point() and out.is_contiguous()):
            return func(*args, **kwargs)
        self.defer(out)
        self._reasons.pop(out.untyped_storage().data_ptr(), None)  # the reason of a tensor that was freed
        if _FACTORIES[func]:
            write, *constants = _FACTORIES[func]
            self._recorded(write, (out, *constants), {})
        return out

    def replay(self, model: nn.Module, keep_off: bool, in_place: bool = False) -> dict[str, InitRecipe]:
        """Initialise the tensors that are still deferred: a parameter by its name, any other tensor by its order.

        Args:
            keep_off: leave the memory of parameters untouched, and return their recipes. A parameter whose memory the
                model uses elsewhere too is initialised all the same.
            in_place: the caller keeps the model's own parameters, so that other references to them (the lists of an
                LSTM) stay valid.

        Returns:
            Name → recipe of each parameter that `keep_off` left untouched.
        """
        names, aliased = self._names_of_deferred(model)
        aliases, references = self._references(model, in_place)
        aliased |= aliases
        recipes: dict[str, InitRecipe] = {}
        for deferred in list(self.deferred.values()):
            fqn = names.get(id(deferred), "")
            if not fqn and not is_held_elsewhere(deferred.base):
                continue  # the constructor has dropped it, as when it ties a head to an embedding
            if id(deferred) in aliased or not fqn:
                if fqn:
                    self.made_whole.setdefault(fqn, "is for a tensor that the model holds elsewhere too")
                self._initialise(deferred)
            elif keep_off:
                self._check_untouched(deferred)
                if id(deferred) in references:
                    deferred.recipe.key = _numbered(deferred)  # the seed that it has without `in_place`
                recipes[fqn] = deferred.recipe
            else:
                self._initialise(deferred, fqn)
        return recipes

    def _names_of_deferred(self, model: nn.Module) -> tuple[dict[int, str], set[int]]:
        """The parameter name of each deferred tensor, by its id; and the ids of those that are no plain parameter.

        Notes in `made_whole` why a large parameter cannot be drawn later.
        """
        names, aliased = dict[int, str](), set[int]()
        for fqn, param in model.named_parameters():
            if deferred := self.deferred_of(param):
                is_whole = deferred.recipe.complete and param.shape == deferred.base.shape and param.is_contiguous()
                if id(deferred) in names or not is_whole:
                    aliased.add(id(deferred))
                    reason = "shares its memory" if is_whole else "does not write the whole tensor at once"
                    self.made_whole[fqn] = reason
                names[id(deferred)] = fqn
            elif self._reasons and (reason := self._reasons.get(_address(param), "")):
                self.made_whole[fqn] = reason
        return names, aliased

    def _references(self, model: nn.Module, in_place: bool) -> tuple[set[int], set[int]]:
        """Find the deferred tensors that the model holds beside its registered parameters: as buffers or attributes.

        Returns:
            The ids of deferred tensors that other tensors share memory with; and, with `in_place`, the ids of those
            that the model refers to by their own parameter.
        """
        tensors: list[torch.Tensor] = list(model.buffers())
        for module in model.modules():
            attributes = [attribute for name, attribute in vars(module).items() if name not in _REGISTERED]
            tensors += [leaf for leaf in tree_leaves(attributes) if isinstance(leaf, torch.Tensor)]
        param_ids = {id(param) for param in model.parameters()} if in_place else set[int]()
        aliased, references = set[int](), set[int]()
        for tensor in tensors:
            if deferred := self.deferred_of(tensor):
                (references if id(tensor) in param_ids else aliased).add(id(deferred))
        return aliased, references

    def _initialise(self, deferred: Deferred, fqn: str = "") -> None:
        """Initialise a deferred tensor and stop recording calls on it.

        Raises:
            ConfigError: another thread, whose calls are not recorded, has written to the tensor.
            Uncut: the recorder is strict.
        """
        if self._strict:
            raise Uncut(f"reads {deferred.base.numel():,} values while the model is built")
        self._check_untouched(deferred)
        with self._at_work(), torch.no_grad():
            del self.deferred[deferred.base.untyped_storage().data_ptr()]
            seed = self._seed_of(fqn or _numbered(deferred))
            self.values_drawn += deferred.recipe.fill(seed, deferred.base.view(-1))

    def _check_untouched(self, deferred: Deferred) -> None:
        """Refuse a deferred tensor that another thread has written to.

        Raises:
            ConfigError: its first element is no longer the mark.
        """
        with self._at_work(), torch.no_grad():
            if deferred.base.view(-1)[0].item() != _MARK:
                raise ConfigError(
                    f"another thread writes to a tensor of {deferred.base.numel():,} values while the model is built",
                    "build the model first, and give job.wrap the module",
                )


def _numbered(deferred: Deferred) -> str:
    """The name by which a tensor without a parameter's name is seeded."""
    return f"#{deferred.order}"


def _needs_whole(func: Any) -> str:
    return f"calls {getattr(func, 'overloadpacket', func)}, which needs the whole tensor"


def _address(tensor: torch.Tensor) -> int:
    """The address of a large CPU tensor's memory; 0 for any other tensor."""
    is_large = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() >= CHUNK
    return tensor.untyped_storage().data_ptr() if is_large else 0


def _has_no_memory(kwargs: dict[str, Any]) -> bool:
    """Whether a factory is called for a tensor without plain memory on the CPU."""
    device, layout = kwargs.get("device"), kwargs.get("layout")
    return (device is not None and torch.device(device).type != "cpu") or layout not in (None, torch.strided)
