"""Initial weights that are the same for any strategy and world size, and the exchange of ranges that ranks wrote."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ..config.libraries import is_first_rank
from ..errors import ConfigError, gib
from .compat import copy_grad_hooks
from .draws import CHUNK, InitRecipe, Uncut, record
from .world import World

_LOG = logging.getLogger(__name__)
Init = Callable[[str, torch.Tensor, torch.Generator], None]

BUCKET_BYTES = 2**18
"""Bytes of a message with several tensors that `exchange` sends on the CPU, summed over the ranks. gloo takes several
times as much memory for it."""
_LARGE = 4 * 2**30
"""Bytes of a model from which on its whole construction on each rank is worth a warning."""


@contextmanager
def _registering(replace: Callable[[nn.Module, str, nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Inside, a module registers `replace(module, name, parameter)` for a parameter, unless that is None.

    A parameter that is registered twice is replaced once, and stays tied.
    """
    register = nn.Module.register_parameter
    shared = WeakIdKeyDictionary()

    def register_replaced(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            if param not in shared and (replaced := replace(module, name, param)) is not None:
                shared[param] = replaced
            param = shared.get(param, param)  # type: ignore[no-untyped-call]
        register(module, name, param)

    nn.Module.register_parameter = register_replaced  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, and real buffers.

    A real parameter is freed as soon as a module registers it, so at most one exists at a time, and memory that is not
    touched costs nothing. Buffers have the values that the constructor computed: rotary frequencies, position ids,
    statistics.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        refuse_uninitialised(module, name, param)
        if param.is_meta or hasattr(param, "ds_id"):  # ZeRO-3's are partitions already
            return None
        meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        # The model's code may have set attributes. A fake tensor has some that belong to it alone: those stay.
        vars(meta).update({name: attribute for name, attribute in vars(param).items() if name not in vars(meta)})
        copy_grad_hooks(param, meta)
        return meta

    with _registering(to_meta):
        yield


def refuse_uninitialised(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Refuse a parameter of a lazy module (`nn.LazyLinear`), which has no size before the first forward."""
    if is_lazy(param):
        raise ConfigError(
            f"{name} of {type(module).__name__} has no size before the first forward, so nothing can hold or draw it",
            "give the layer its input size, or call the model on one batch where it is built",
        )


def scalars_as_vectors() -> AbstractContextManager[None]:
    """Modules built inside register 0-d parameters with shape [1], so that engines have a dimension to shard along."""

    def to_vector(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        if param.dim():
            return None
        values = torch.empty(1, dtype=param.dtype, device=param.device)
        values.copy_(param.detach())  # copied, because a view of a fake tensor would stay a constant on the CPU
        vector = nn.Parameter(values, requires_grad=param.requires_grad)
        vector.is_scalar = True  # type: ignore[attr-defined]
        return vector

    return _registering(to_vector)


def show_scalars(model: nn.Module) -> set[str]:
    """Give the model's 0-d parameters shape [1], which its own code still reads as 0-d; returns their names."""
    scalar_names: set[str] = set()
    with scalars_as_vectors():
        for prefix, module in model.named_modules():
            params = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, param in params.items():
                if param.dim() == 0:
                    setattr(module, name, param)
            names = [name for name in params if hasattr(getattr(module, name), "is_scalar")]
            if names:
                scalar_names |= {f"{prefix}.{name}".lstrip(".") for name in names}
                shown = {name: property(partial(_zero_dimensional, name=name)) for name in names}
                module.__class__ = type(type(module).__name__, (type(module),), shown)
    return scalar_names


def _zero_dimensional(module: nn.Module, name: str) -> Any:
    """The parameter `name` viewed as 0-d, or as it is while an engine holds it in shards."""
    param: Any = nn.Module.__getattr__(module, name)
    is_whole = isinstance(param, torch.Tensor) and not hasattr(param, "placements") and param.shape == (1,)
    return param.view(()) if is_whole else param


class Weights:
    """Builds a model and draws its initial weights, which are the same for any strategy and world size.

    With `init_parameter`, the model is built on the meta device, and each rank draws the values of its own shards from
    the seed and the parameters' names. Without it, every rank runs the model's constructor on the CPU under the run's
    seed, as one process would.
    """

    def __init__(self, seed: int, init_parameter: Init | None = None, drawn: bool = True) -> None:
        """`drawn`: False if the caller overwrites every parameter later; until then, all are zero."""
        self.seed = seed
        self.init_parameter = init_parameter
        self.scalars: set[str] = set()
        """Names of the parameters that the model's code made as 0-d, and that are registered with shape [1]."""
        self.values_drawn = 0
        """Number of values that this rank drew: of large parameters drawn in parts, the random ones alone."""
        self._drawn = drawn
        self._has_warned = False

    def build(
        self,
        make_model: Callable[[], nn.Module],
        construction: AbstractContextManager[object] | None,
        cut_up: bool = False,
    ) -> nn.Module:
        """Build the model. With `init_parameter`, its parameters get no values yet.

        `construction`: a context in which the engine wants a model to be built whose weights are drawn later. `cut_up`:
        whether the engine shards parameters along a dimension, so that none may be 0-d.
        """
        if self.init_parameter is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                model = make_model()
            self._check_constructed(model, cut_up)
        else:
            # Under zero.Init a parameter is sharded as soon as its module's constructor ends.
            with scalars_as_vectors() if cut_up else nullcontext(), construction or parameters_on_meta():
                model = make_model()
        if cut_up:
            self.scalars = show_scalars(model)
        for name, buffer in model.named_buffers() if self.init_parameter is not None else ():
            if buffer.is_meta:
                raise ConfigError(
                    f"the task's model has a buffer on the meta device: {name}",
                    "build the model without torch.device('meta'): parameters are put on meta as they are registered",
                )
        return model

    def _check_constructed(self, model: nn.Module, cut_up: bool) -> None:
        for fqn, param in model.named_parameters():
            if param.is_meta:
                raise ConfigError(
                    f"nothing initialises {fqn}, which the model's constructor left on the meta device",
                    "build the model without torch.device('meta'), or give init_parameter",
                )
        n_bytes = sum(param.nbytes for param in model.parameters())
        if cut_up and n_bytes >= _LARGE and is_first_rank():
            _LOG.warning(
                "each rank builds the whole model on the CPU, %s, all of a machine at once, and keeps its shard of "
                "it; with init_parameter (docs/tasks.md) a rank draws its shard alone", gib(n_bytes),
            )  # fmt: skip

    def _seed_of(self, fqn: str) -> int:
        """The seed of a parameter's first chunk, a hash of the run's seed and the name."""
        digest = hashlib.blake2b(f"{self.seed}\0{fqn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # leaves room to add a chunk's index

    @torch.no_grad()
    def fill(
        self, fqn: str, shape: torch.Size, out: torch.Tensor, start: int = 0, run: int = 0, stride: int = 0
    ) -> None:
        """Write a part of a parameter's initial values into `out`, with a few MiB of further host memory at most.

        If the initialisation of a large parameter cannot be cut, the parameter is drawn whole, with as much memory;
        rank 0 warns once. `shape`: shape of the whole parameter. `out`: takes the values [start, start + out.numel())
        of the flattened parameter, or runs of `run` values that begin `stride` apart; 1-D, of any type and device.
        """
        if not out.numel():
            return
        if not self._drawn:
            out.zero_()
        elif isinstance(recipe := self.recipe(fqn, shape), InitRecipe):
            self.values_drawn += recipe.fill(self._seed_of(fqn), out, start, run, stride)
        else:
            if recipe and out.numel() < shape.numel():
                self._warn_drawn_whole(fqn, recipe)
            values = self._draw_whole(fqn, shape).view(-1)[start:]
            rows = (out.numel() // run, run) if run else (1, out.numel())
            out.view(rows).copy_(values.as_strided(rows, (stride, 1)))

    def recipe(self, fqn: str, shape: torch.Size) -> InitRecipe | str:
        """The recipe to draw a part of a parameter, or the reason why it must be drawn whole.

        The reason is empty for a small parameter, which is drawn whole without a warning.
        """
        assert self.init_parameter is not None
        if shape.numel() <= CHUNK:
            return ""
        init, generator = self.init_parameter, torch.Generator()
        try:
            return record(shape, lambda full: init(fqn, full, generator), generator)
        except Uncut as error:
            return str(error)

    def _warn_drawn_whole(self, fqn: str, reason: str) -> None:
        """Warn, once and on rank 0, that each rank draws a large parameter whole."""
        if not self._has_warned and is_first_rank():
            _LOG.warning(
                "%s, and each parameter like it, is drawn whole on every rank: its initialisation %s", fqn, reason
            )
        self._has_warned = True

    def _draw_whole(self, fqn: str, shape: torch.Size) -> torch.Tensor:
        """Draw a whole parameter in fp32 on the CPU."""
        assert self.init_parameter is not None
        full = torch.full(() if fqn in self.scalars else shape, torch.nan)
        self.init_parameter(fqn, full, torch.Generator().manual_seed(self._seed_of(fqn)))
        self.values_drawn += full.numel()
        if torch.isnan(full).any():
            raise ConfigError(
                f"nothing initialises {fqn}, or not all of it",
                "fill it in init_parameter; of transformers, use a model whose _init_weights covers every parameter",
            )
        return full

    def materialise(self, model: nn.Module, device: torch.device, world: World | None = None) -> None:
        """Move an unsharded model to `device` and draw the parameters on meta; tied parameters stay tied.

        `world`: the ranks that call this together, if they do. Each then draws an even range of a large parameter, and
        they exchange the ranges.
        """
        real: dict[int, nn.Parameter] = {}
        shared: list[torch.Tensor] = []
        for fqn, param in model.named_parameters():
            if param.is_meta:
                value = torch.empty(param.shape, dtype=param.dtype, device=device)
                if self._fill_part(fqn, param.shape, value.view(-1), world):
                    shared.append(value.view(-1))
                real[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
        if world is not None:
            exchange(shared)
        replace_parameters(model, lambda param: real.get(id(param), param))
        model.to(device)

    def _fill_part(self, fqn: str, shape: torch.Size, out: torch.Tensor, world: World | None) -> bool:
        """Write a parameter into `out`; returns True if this rank wrote only its own range of it, not all."""
        alone = world is None or world.size == 1 or not self._drawn
        recipe = "" if alone else self.recipe(fqn, shape)
        if isinstance(recipe, str) or world is None:
            if recipe:
                self._warn_drawn_whole(fqn, str(recipe))
            self.fill(fqn, shape, out)
            return False
        start, end = even_range(out.numel(), world.rank, world.size)
        self.fill(fqn, shape, out[start:end], start)
        return True


def replace_parameters(model: nn.Module, replacement: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put `replacement(param)` in place of each parameter, wherever the model holds it. Gradient hooks move with it."""
    replaced: set[int] = set()
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if (new_param := replacement(param)) is not param:
                if id(new_param) not in replaced:
                    copy_grad_hooks(param, new_param)
                replaced.add(id(new_param))
                setattr(module, name, new_param)


def even_range(numel: int, part: int, parts: int) -> tuple[int, int]:
    """Start and end of one of `parts` nearly equal ranges of `numel` elements."""
    return numel * part // parts, numel * (part + 1) // parts


@torch.no_grad()
def exchange(tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the ranges that the other ranks have written, bit for bit; collective on the default group.

    On CPUs it sends at most one message for every `BUCKET_BYTES`, and one more, for any number of tensors and ranks.
    `tensors`: flat tensors on one device, the same on every rank. Each rank has written its `even_range` of each.
    """
    if not tensors:
        return
    size, rank = dist.get_world_size(), dist.get_rank()
    if tensors[0].device.type != "cpu":
        for tensor in tensors:
            start, end = even_range(tensor.numel(), rank, size)
            tensor[:start].zero_()
            tensor[end:].zero_()
            dist.all_reduce(tensor.view(torch.uint8))  # in place; each byte is zero on all ranks but one
        return
    for tensor in tensors:
        if tensor.nbytes >= size * BUCKET_BYTES:
            for part in range(size):
                dist.broadcast(_even_bytes(tensor, part, size), src=part)  # in place
    _exchange_small([tensor for tensor in tensors if tensor.nbytes < size * BUCKET_BYTES], size, rank)


def _exchange_small(tensors: Sequence[torch.Tensor], size: int, rank: int) -> None:
    """`exchange` of small CPU tensors, packed into messages; every rank sends equally many bytes in each."""
    length = max(sum(_even_bytes(tensor, part, size).numel() for tensor in tensors) for part in range(size))
    length = min(length, max(1, BUCKET_BYTES // size))
    message, received = torch.empty(length, dtype=torch.uint8), torch.empty(size, length, dtype=torch.uint8)
    for groups in zip_longest(*(_in_pieces(tensors, part, size, length) for part in range(size)), fillvalue=[]):
        for piece, slot in _slots(groups[rank], message):
            slot.copy_(piece)
        dist.all_gather(list(received), message)
        for part, group in enumerate(groups):
            for piece, slot in _slots(group, received[part]) if part != rank else ():
                piece.copy_(slot)


def _even_bytes(tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """The bytes of a tensor's even range number `part`, as a view."""
    start, end = even_range(tensor.numel(), part, parts)
    return tensor[start:end].view(torch.uint8)


def _in_pieces(tensors: Sequence[torch.Tensor], part: int, parts: int, length: int) -> Iterator[list[torch.Tensor]]:
    """Cut one part's ranges of all tensors into groups of pieces; a group fills a message of `length` bytes."""
    group, room = list[torch.Tensor](), length
    for tensor in tensors:
        unsent = _even_bytes(tensor, part, parts)
        while unsent.numel():
            piece, unsent = unsent[:room], unsent[room:]
            group.append(piece)
            room -= piece.numel()
            if not room:
                yield group
                group, room = [], length
    if group:
        yield group


def _slots(pieces: Sequence[torch.Tensor], message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece with the bytes of the message that carry it."""
    at = 0
    for piece in pieces:
        yield piece, message[at : at + piece.numel()]
        at += piece.numel()
