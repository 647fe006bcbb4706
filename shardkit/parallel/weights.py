"""Initial weights: the same values whatever the strategy and the world size; and the exchange of written ranges."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ..config.libraries import is_first_rank
from ..errors import ConfigError
from .compat import copy_grad_hooks
from .draws import CHUNK, Construction, Recipe, Uncut, record
from .world import World

_LOG = logging.getLogger(__name__)
Init = Callable[[str, torch.Tensor, torch.Generator], None]
Later = Literal["on meta", "unwritten"]

BUCKET_BYTES = 2**18
"""Bytes of a message of `exchange` on the CPU that holds several tensors, all ranks' parts together; gloo keeps several
times that beside it."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside keep their parameters on the meta device, and their buffers real.

    A real parameter is dropped as soon as it is registered: no two exist at once, and untouched memory costs nothing.
    Buffers hold the values that the constructor computed (rotary frequencies, position ids, statistics).
    """
    register = nn.Module.register_parameter
    shared = WeakIdKeyDictionary()  # a parameter that is registered twice stays tied

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        refuse_uninitialised(module, name, param)
        if param is not None and not param.is_meta and not hasattr(param, "ds_id"):  # ZeRO-3's is a partition already
            if param not in shared:
                shared[param] = _on_meta(param)
                copy_grad_hooks(param, shared[param])
            param = shared[param]
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def refuse_uninitialised(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Refuse a parameter of a lazy module (`nn.LazyLinear`), which has no size before the first forward.

    Raises:
        ConfigError: the parameter has no size.
    """
    if param is not None and is_lazy(param):
        raise ConfigError(
            f"{name} of {type(module).__name__} has no size before the first forward, so nothing can hold or draw it",
            "give the layer its input size, or call the model on one batch where it is built",
        )


@contextmanager
def scalars_as_vectors() -> Iterator[None]:
    """Modules built inside register 0-d parameters with shape [1]: an engine needs a dimension to shard along."""
    register = nn.Module.register_parameter
    shared = WeakIdKeyDictionary()

    def register_vector(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.dim() == 0:
            if param not in shared:
                vector = torch.empty(1, dtype=param.dtype, device=param.device)
                vector.copy_(param.detach())  # a view of a fake tensor would stay a constant on the CPU
                shared[param] = nn.Parameter(vector, requires_grad=param.requires_grad)
                shared[param].is_scalar = True
            param = shared[param]
        register(module, name, param)

    nn.Module.register_parameter = register_vector  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def show_scalars(model: nn.Module) -> set[str]:
    """Give the model's 0-d parameters shape [1], but let its own code read them as 0-d; returns their names."""
    found: set[str] = set()
    with scalars_as_vectors():
        for prefix, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, param in own.items():
                if param.dim() == 0:
                    setattr(module, name, param)
            names = [name for name in own if hasattr(getattr(module, name), "is_scalar")]
            if names:
                found |= {f"{prefix}.{name}".lstrip(".") for name in names}
                shown = {name: property(partial(_zero_dimensional, name=name)) for name in names}
                module.__class__ = type(type(module).__name__, (type(module),), shown)
    return found


def _zero_dimensional(module: nn.Module, name: str) -> Any:
    """A whole parameter of shape [1] viewed as 0-d; unchanged while an engine holds it in shards."""
    param: Any = nn.Module.__getattr__(module, name)
    whole = isinstance(param, torch.Tensor) and not hasattr(param, "placements") and param.shape == (1,)
    return param.view(()) if whole else param


class Weights:
    """Initial values of a model's parameters: functions of the seed and the parameter's name alone.

    With `init_parameter` the model is built on the meta device, and a rank draws the values of its shards. Without it
    the model's constructor runs under the run's seed. The initialisation of its large parameters is recorded there, so
    that a rank can draw a part of them; small ones are made on every rank.
    """

    _strict = False
    """Raise `Uncut` where a constructor needs the values of a large parameter."""

    def __init__(self, seed: int, init_parameter: Init | None = None, drawn: bool = True) -> None:
        """
        Args:
            drawn: False if the caller overwrites every parameter later; they are zero until then.
        """
        self.seed = seed
        self.init_parameter = init_parameter
        self.scalars: set[str] = set()
        """Names of the 0-d parameters that are registered with shape [1]."""
        self.values_drawn = 0
        """Random values that this rank drew for large parameters, and all values of those that it drew whole."""
        self._drawn = drawn
        self._recipes: dict[str, Recipe] = {}
        self._made: dict[str, torch.Tensor] = {}
        """Parameters that have values although the model's are on meta."""
        self._made_whole: dict[str, str] = {}
        """Name of a large parameter that the constructor had to draw → the reason."""
        self._said_whole = False

    def build(
        self,
        make_model: Callable[[], nn.Module],
        construction: AbstractContextManager[object] | None,
        cut_up: bool = False,
        later: Later | None = None,
    ) -> nn.Module:
        """Build the model, with its parameters on meta if they can be drawn later.

        Args:
            construction: the engine's own context for building a model.
            cut_up: the engine shards parameters along a dimension; none may be 0-d.
            later: what becomes of parameters that a constructor makes and that can be drawn later. None: they are drawn
                at once. "on meta": the engine takes the whole model on meta, and fills its shards. "unwritten": they
                stay where they are until `materialise`, their memory untouched.

        Raises:
            ConfigError: the task put buffers on meta, which loses their values.
        """
        if self.init_parameter is None:
            model = self._constructed(make_model, later)
        else:
            # Under zero.Init a parameter is sharded as soon as its module's constructor ends.
            with scalars_as_vectors() if cut_up else nullcontext(), construction or parameters_on_meta():
                model = make_model()
        if cut_up:
            self.scalars = show_scalars(model)
        if self.init_parameter is None:
            return model
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ConfigError(
                    f"the task's model has a buffer on the meta device: {name}",
                    "build the model without torch.device('meta'): parameters are put on meta as they are registered",
                )
        return model

    def _constructed(self, make_model: Callable[[], nn.Module], later: Later | None) -> nn.Module:
        """The model as its constructor makes it, but for the large parameters that can be drawn in parts."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            recorder = Construction(self._seed_of, self._strict)
            with recorder:
                model = make_model()
            plain = all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
            self._recipes = recorder.replay(model, later is not None and plain, in_place=later == "unwritten")
            self.values_drawn += recorder.values_drawn
            self._made_whole = recorder.made_whole
        if self._recipes and later == "on meta":
            named = dict(model.named_parameters())
            self._made = {fqn: param.detach() for fqn, param in named.items() if fqn not in self._recipes}
            metas = {id(param): _on_meta(param) for param in named.values()}
            replace_parameters(model, lambda param: metas[id(param)])
        return model

    def _seed_of(self, fqn: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}\0{fqn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # leaves room to add a chunk's index

    @torch.no_grad()
    def fill(self, fqn: str, shape: torch.Size, out: torch.Tensor, start: int = 0) -> None:
        """Write a range of a parameter's initial values; host memory beside it stays below a few MiB.

        A parameter of more than `CHUNK` values is drawn whole for it if its initialisation cannot be cut: rank 0 says
        so once.

        Args:
            shape: the whole parameter's.
            out: takes the values [start, start + out.numel()) of the flattened parameter; 1-d, of any type and device.

        Raises:
            ConfigError: nothing initialises the parameter.
        """
        if not out.numel():
            return
        if not self._drawn:
            out.zero_()
        elif fqn in self._made:
            if fqn in self._made_whole and out.numel() < shape.numel():
                self._say_whole(fqn, self._made_whole[fqn])
            out.copy_(self._made.pop(fqn).reshape(-1)[start : start + out.numel()])
        elif isinstance(recipe := self.recipe(fqn, shape), Recipe):
            self.values_drawn += recipe.fill(self._seed_of(recipe.key or fqn), out, start)
        else:
            if recipe and out.numel() < shape.numel():
                self._say_whole(fqn, recipe)
            out.copy_(self._whole(fqn, shape).view(-1)[start : start + out.numel()])

    def recipe(self, fqn: str, shape: torch.Size) -> Recipe | str:
        """How to draw a part of a parameter, or the reason to draw it whole; empty if it is small."""
        if self.init_parameter is None:
            if fqn not in self._recipes:
                raise ConfigError(
                    f"nothing initialises {fqn}, which the model's constructor left on the meta device",
                    "build the model without torch.device('meta'), or give init_parameter",
                )
            return self._recipes[fqn]
        if shape.numel() <= CHUNK:
            return ""
        init, generator = self.init_parameter, torch.Generator()
        try:
            return record(shape, lambda full: init(fqn, full, generator), generator)
        except Uncut as why:
            return str(why)

    def _say_whole(self, fqn: str, why: str) -> None:
        if not self._said_whole and is_first_rank():
            _LOG.warning(
                "%s, and each parameter like it, is drawn whole on every rank: its initialisation %s", fqn, why
            )
        self._said_whole = True

    def _whole(self, fqn: str, shape: torch.Size) -> torch.Tensor:
        """Draw a whole parameter in fp32 on CPU."""
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

    def unwritten(self, fqn: str) -> bool:
        """Whether a parameter of a constructed model has no values before `materialise`."""
        return self.init_parameter is None and fqn in self._recipes

    def materialise(self, model: nn.Module, device: torch.device, world: World | None = None) -> None:
        """Put a whole, unsharded model on `device`; draw what has no values yet, and keep tied parameters tied.

        Args:
            world: the ranks that call this together. Each draws an even range of a large parameter, and they exchange
                the ranges.
        """
        real: dict[int, nn.Parameter] = {}
        shared: list[torch.Tensor] = []
        named = dict(model.named_parameters())
        assert self._recipes.keys() <= named.keys(), "a parameter without values was renamed since the model was built"
        for fqn, param in named.items():
            if not param.is_meta and not self.unwritten(fqn):
                continue
            value = param.detach()
            if value.device != device:
                value = torch.empty(param.shape, dtype=param.dtype, device=device)
            if self._fill_part(fqn, param.shape, value.view(-1), world):
                shared.append(value.view(-1))
            if param.is_meta:
                real[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
            else:
                param.data = value
        if world is not None:
            exchange(shared)
            for fqn, why in list(self._made_whole.items())[: int(world.size > 1)]:
                self._say_whole(fqn, why)
        replace_parameters(model, lambda param: real.get(id(param), param))
        model.to(device)

    def _fill_part(self, fqn: str, shape: torch.Size, out: torch.Tensor, world: World | None) -> bool:
        """Write a parameter, or this rank's range of a large one; returns whether the other ranks have the rest."""
        alone = world is None or world.size == 1 or not self._drawn
        recipe = "" if alone else self.recipe(fqn, shape)
        if isinstance(recipe, str) or world is None:
            if recipe:
                self._say_whole(fqn, str(recipe))
            self.fill(fqn, shape, out)
            return False
        start, end = even_range(out.numel(), world.rank, world.size)
        self.fill(fqn, shape, out[start:end], start)
        return True


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """The parameter without its memory, with what the model's code has noted on it."""
    meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    noted = {name: note for name, note in vars(param).items() if name not in vars(meta)}  # a fake tensor's are its own
    vars(meta).update(noted)
    return meta


def replace_parameters(model: nn.Module, by: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by another of the caller's choice, wherever the model holds it, and keep its hooks."""
    replaced: set[int] = set()
    for module in model.modules():
        for name, held in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if (other := by(held)) is not held:
                if id(other) not in replaced:
                    copy_grad_hooks(held, other)
                replaced.add(id(other))
                setattr(module, name, other)


def even_range(numel: int, part: int, parts: int) -> tuple[int, int]:
    """Start and end of one of `parts` nearly equal ranges of `numel` elements."""
    return numel * part // parts, numel * (part + 1) // parts


@torch.no_grad()
def exchange(wholes: Sequence[torch.Tensor]) -> None:
    """Give every rank the ranges that the other ranks have written, bit for bit; collective on the default group.

    On CPUs there is at most one message for every `BUCKET_BYTES`, and one more, for any number of tensors and ranks.

    Args:
        wholes: flat tensors on one device, the same on every rank, of which this rank has written its `even_range`.
    """
    if not wholes:
        return
    size, rank = dist.get_world_size(), dist.get_rank()
    if wholes[0].device.type != "cpu":
        for whole in wholes:
            start, end = even_range(whole.numel(), rank, size)
            whole[:start].zero_()
            whole[end:].zero_()
            dist.all_reduce(whole.view(torch.uint8))  # in place; all other bytes are zero in the sum
        return
    large = [whole for whole in wholes if whole.nbytes >= size * BUCKET_BYTES]
    for whole in large:
        for part in range(size):
            dist.broadcast(_even_bytes(whole, part, size), src=part)  # in place
    wholes = [whole for whole in wholes if whole.nbytes < size * BUCKET_BYTES]
    length = max(sum(_even_bytes(whole, part, size).numel() for whole in wholes) for part in range(size))
    length = min(length, max(1, BUCKET_BYTES // size))
    mine, received = torch.empty(length, dtype=torch.uint8), torch.empty(size, length, dtype=torch.uint8)
    for groups in zip_longest(*(_in_pieces(wholes, part, size, length) for part in range(size)), fillvalue=[]):
        for piece, place in _placed(groups[rank], mine):
            place.copy_(piece)
        dist.all_gather(list(received), mine)
        for part, group in enumerate(groups):
            for piece, place in _placed(group, received[part]) if part != rank else ():
                piece.copy_(place)


def _even_bytes(whole: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    start, end = even_range(whole.numel(), part, parts)
    return whole[start:end].view(torch.uint8)


def _in_pieces(wholes: Sequence[torch.Tensor], part: int, parts: int, length: int) -> Iterator[list[torch.Tensor]]:
    """The bytes of one part's range of each tensor, in groups of `length` bytes."""
    group, room = list[torch.Tensor](), length
    for whole in wholes:
        left = _even_bytes(whole, part, parts)
        while left.numel():
            piece, left = left[:room], left[room:]
            group.append(piece)
            room -= piece.numel()
            if not room:
                yield group
                group, room = [], length
    if group:
        yield group


def _placed(pieces: Sequence[torch.Tensor], message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece, and its place in the message."""
    at = 0
    for piece in pieces:
        yield piece, message[at : at + piece.numel()]
        at += piece.numel()
