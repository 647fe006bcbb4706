"""Published names of a transformers model's weights, and where each published tensor lies in a tensor of the model.

transformers 5 holds some models otherwise than their folders do: it renames, and it fuses (the experts of a layer are
one tensor). Its own rules run here on tensors without memory, so that folders keep their layout and are still read and
written a piece at a time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...errors import CheckpointError
from ...parallel.compat import from_config, owner_of
from ...parallel.weights import parameters_on_meta
from .tensor_source import Extent, FileTensor, Source, file_source, logical

_MOST_RUNS = 2**22
"""Runs that are listed in memory for one tensor."""


@dataclass(frozen=True)
class Place:
    """The elements of a model's tensor that a published tensor holds, in order: `shape` over strides from `offset` on.

    Attributes:
        name: the model's tensor, under the model's own name.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def is_runs(self) -> bool:
        """Whether its elements are stretches of the model's tensor in ascending order, few enough to list."""
        strides = [step for step, size in zip(self.stride, self.shape, strict=True) if size > 1]
        outer, _ = self._split()
        return strides == sorted(strides, reverse=True) and math.prod(self.shape[:outer]) <= _MOST_RUNS

    def _split(self) -> tuple[int, int]:
        """How many leading axes go over the runs, and the length of a run."""
        axis, run = len(self.shape), 1
        while axis and (self.stride[axis - 1] == run or self.shape[axis - 1] == 1):
            axis -= 1
            run *= self.shape[axis]
        return axis, run

    def runs(self) -> tuple[npt.NDArray[np.int64], int]:
        """The first element of each run in the flattened tensor of the model, ascending, and the runs' length."""
        outer, run = self._split()
        starts = np.array([self.offset], dtype=np.int64)
        for size, stride in zip(self.shape[:outer], self.stride[:outer], strict=True):
            starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return starts, run


@dataclass(frozen=True)
class Published:
    """The folder layout of a model.

    Attributes:
        places: published name → the elements it holds; for every parameter and saved buffer that has such a layout.
        unknown: names of the model's tensors whose published form is no rearrangement by runs.
    """

    places: dict[str, Place]
    unknown: list[str]

    @property
    def differs(self) -> bool:
        """Whether a published name or shape is not the model's own."""
        return any(name != place.name for name, place in self.places.items())


class _Views(TorchFunctionMode):
    """`contiguous` inside makes no copy: the result still says by its strides where its elements came from."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def reference_of(model: nn.Module) -> Any:
    """A copy of a transformers model without memory, of the class it had before an engine wrapped it; else None."""
    transformers = sys.modules.get("transformers")  # a model of it cannot exist unless it was imported
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    plain = next((k for k in type(model).__mro__ if k.__module__.startswith("transformers.models.")), None)
    if plain is None:
        return None  # a class of the user's own
    with parameters_on_meta():
        return from_config(plain, model.config)


def published(reference: Any) -> Published:
    """The layout in which transformers saves the model, by its own rules.

    Args:
        reference: a transformers model whose parameters are on meta.
    """
    from transformers.core_model_loading import revert_weight_conversion

    held = {name: tensor.detach().to("meta") for name, tensor in reference.state_dict().items()}
    names = {id(tensor): name for name, tensor in held.items()}
    with _Views():
        saved = revert_weight_conversion(reference, dict(held))
    places = {}
    for name, tensor in saved.items():
        owner = names.get(id(tensor)) or names.get(id(owner_of(tensor)))
        if owner is not None:
            place = Place(owner, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
            if place.is_runs:
                places[name] = place
    covered: dict[str, int] = {}
    for place in places.values():
        covered[place.name] = covered.get(place.name, 0) + math.prod(place.shape)
    unknown = [name for name, tensor in held.items() if covered.get(name) != tensor.numel()]
    return Published({name: place for name, place in places.items() if place.name not in unknown}, unknown)


def renamed(reference: Any, names: Iterable[str]) -> dict[str, str]:
    """Names in a folder → names of the model: old names, other prefixes, heads of another task, as transformers maps
    them. A name that belongs to a fused tensor, or to nothing, stays as it is."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(reference)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    held: Mapping[str, Any] = reference.state_dict()
    found = {}
    for name in names:
        for rules in ((renamings, converters), ([], [])):
            new, fused = rename_source_key(name, *rules, reference.base_model_prefix, held)
            if new in held:
                break
        found[name] = new if new in held and fused is None else name
    return found


def as_the_model_names(source: Source, reference: Any) -> Source:
    """A folder's weights under the names and in the shapes of the model that reads them; the same files, no copy.

    Args:
        source: weights of another tool.
        reference: a transformers model whose parameters are on meta.

    Raises:
        CheckpointError: the parts of a fused tensor differ in type.
    """
    held = {name.partition(".")[2]: tensor for name, tensor in source.tensors.items()}
    files = {name: tensor for name, tensor in held.items() if isinstance(tensor, FileTensor)}
    if len(files) < len(held):
        return source  # shardkit's own checkpoint: these are the model's names
    new = renamed(reference, files)
    tensors = {new[name]: tensor for name, tensor in files.items()}
    missing = set(reference.state_dict()) - set(tensors)
    parts: dict[str, dict[str, Place]] = {}
    for name, place in published(reference).places.items() if missing else ():
        if place.name in missing and name in files:
            parts.setdefault(place.name, {})[name] = place
    shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    for name, places in parts.items():
        if sum(math.prod(place.shape) for place in places.values()) == math.prod(shapes[name]):
            tensors[name] = _fused(shapes[name], {part: (files[part], place) for part, place in places.items()})
            for part in places:
                del tensors[part]
    for alias, name in ties_of(reference).items():
        if alias in tensors:
            tensors.setdefault(name, tensors[alias])
            del tensors[alias]
    named = {logical(name, tensor.dtype): tensor for name, tensor in tensors.items()}
    source.close()
    return file_source(source.kind, source.path, named, ties={}, notes=source.notes)


def ties_of(model: nn.Module) -> dict[str, str]:
    """Other names of a parameter → its first name."""
    first: dict[int, str] = {}
    ties = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            ties[name] = first[id(param)]
    return ties


def _fused(shape: tuple[int, ...], parts: Mapping[str, tuple[FileTensor, Place]]) -> FileTensor:
    """One tensor of the model, whose elements lie in several tensors of the files."""
    dtypes = {tensor.dtype for tensor, _ in parts.values()}
    extents = []
    for name, (tensor, place) in parts.items():
        whole = tensor.extents[0] if len(tensor.extents) == 1 else None
        if len(dtypes) > 1 or tensor.shape != place.shape or whole is None or len(whole.starts) != 1:
            raise CheckpointError(
                f"{name} is {list(tensor.shape)} of {tensor.dtype}; {list(place.shape)} of its neighbours' type is due",
                "set model.init_from to weights of this model, with its sizes",
            )
        starts, run = place.runs()
        extents.append(Extent(whole.file, whole.offset, starts, run))
    return FileTensor(shape, dtypes.pop(), tuple(extents))
