"""Initial weights: the same values whatever the strategy and the world size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ConfigError

Init = Callable[[str, torch.Tensor, torch.Generator], None]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside keep their parameters on the meta device, and their buffers real.

    A real parameter is dropped as soon as it is registered: no two exist at once, and untouched memory costs nothing.
    Buffers hold the values that the constructor computed (rotary frequencies, position ids, statistics).
    """
    register = nn.Module.register_parameter
    shared = WeakIdKeyDictionary()  # a parameter that is registered twice stays tied

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in shared:
                shared[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            param = shared[param]
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


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
    """Initial values of a model's parameters.

    With `init_parameter` the model is built on the meta device and each parameter is drawn whole on CPU from its own
    generator, seeded by (seed, name): a rank can keep any slice, and no rank holds the whole model.
    Without it every rank builds the real model under the same seed.
    """

    def __init__(self, seed: int, init_parameter: Init | None = None) -> None:
        self.seed = seed
        self.init_parameter = init_parameter
        self.scalars: set[str] = set()
        """Names of the 0-d parameters that are registered with shape [1]."""

    def build(
        self,
        make_model: Callable[[], nn.Module],
        construction: AbstractContextManager[object] | None,
        cut_up: bool = False,
    ) -> nn.Module:
        """Build the model, with its parameters on meta if they can be drawn later.

        Args:
            construction: the engine's own context for building a model.
            cut_up: the engine shards parameters along a dimension; none may be 0-d.

        Raises:
            ConfigError: the task put buffers on meta, which loses their values.
        """
        if self.init_parameter is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                model = make_model()
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

    def draw(self, fqn: str, shape: torch.Size) -> torch.Tensor:
        """Draw a whole parameter in fp32 on CPU."""
        assert self.init_parameter is not None
        digest = hashlib.blake2b(f"{self.seed}\0{fqn}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        full = torch.empty(() if fqn in self.scalars else shape, dtype=torch.float32)
        with torch.no_grad():
            self.init_parameter(fqn, full, generator)
        return full.view(shape)

    def materialise(self, model: nn.Module, device: torch.device) -> None:
        """Put a whole, unsharded model on `device`; draw meta parameters and keep tied ones tied."""
        real: dict[int, nn.Parameter] = {}
        for fqn, param in model.named_parameters():
            if param.is_meta:
                value = self.draw(fqn, param.shape).to(device=device, dtype=param.dtype)
                real[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
        for module in model.modules():
            for name, held in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(held) in real:
                    setattr(module, name, real[id(held)])
        model.to(device)
