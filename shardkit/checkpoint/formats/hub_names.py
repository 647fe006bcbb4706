"""Map the tensors of a published model folder to the tensors of the transformers model that loads it.

transformers 5 renames some tensors when it loads a folder, and fuses others: all experts of a layer become one tensor.
This module runs transformers' own conversion rules on tensors without memory and reads from the resulting strides which
elements of a model's tensor each published tensor holds. So folders keep their published layout, and are still read and
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
from .tensor_source import Extent, FileTensor, Source, file_source, logical

_MOST_RUNS = 2**22
"""Most runs of one tensor; their list takes 8 bytes for each."""


@dataclass(frozen=True)
class Region:
    """The elements of a model's tensor that one published tensor holds: a strided view into it. A run is a stretch of
    consecutive elements of the model's tensor."""

    name: str  # name of the model's tensor, in the model
    shape: tuple[int, ...]  # shape of the published tensor
    stride: tuple[int, ...]  # strides of the view, in elements
    offset: int  # index of the first element in the model's flattened tensor

    @property
    def has_ascending_runs(self) -> bool:
        """Whether the region consists of runs in ascending order, few enough to list."""
        strides = [stride for stride, size in zip(self.stride, self.shape, strict=True) if size > 1]
        outer, _ = self._split()
        return strides == sorted(strides, reverse=True) and math.prod(self.shape[:outer]) <= _MOST_RUNS

    def _split(self) -> tuple[int, int]:
        """The number of leading axes that count the runs, and the length of a run."""
        axis, run = len(self.shape), 1
        while axis and (self.stride[axis - 1] == run or self.shape[axis - 1] == 1):
            axis -= 1
            run *= self.shape[axis]
        return axis, run

    def runs(self) -> tuple[npt.NDArray[np.int64], int]:
        """The index of each run's first element in the model's flattened tensor, ascending; and the runs' length."""
        outer, run = self._split()
        starts = np.array([self.offset], dtype=np.int64)
        for size, stride in zip(self.shape[:outer], self.stride[:outer], strict=True):
            starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return starts, run


@dataclass(frozen=True)
class Published:
    """The layout of a model's published folder."""

    regions: dict[str, Region]  # published name → the elements of the model that it holds
    unknown: list[str]  # names of the model's tensors whose published form is not made of runs; no region covers them

    @property
    def differs(self) -> bool:
        """Whether a tensor's published name differs from its name in the model."""
        return any(name != region.name for name, region in self.regions.items())


class _Views(TorchFunctionMode):
    """Inside this mode, `Tensor.contiguous` makes no copy, so that a result's strides still show where its elements
    come from."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def reference_of(model: nn.Module) -> Any:
    """A copy on meta of a model of a class of transformers, as before an engine wrapped it; None for other models."""
    transformers = sys.modules.get("transformers")  # a model of it cannot exist unless it was imported
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    plain = next((k for k in type(model).__mro__ if k.__module__.startswith("transformers.models.")), None)
    if plain is None:
        return None
    with torch.device("meta"):  # as `from_pretrained` builds it: transformers then draws no values
        return from_config(plain, model.config)


def published(reference: Any) -> Published:
    """The folder layout in which transformers saves a model (`reference`, on meta), by its own conversion rules."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {name: tensor.detach().to("meta") for name, tensor in reference.state_dict().items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    with _Views():
        saved = revert_weight_conversion(reference, dict(tensors))
    regions = {}
    for name, tensor in saved.items():
        owner = names.get(id(tensor)) or names.get(id(owner_of(tensor)))
        if owner is not None:
            region = Region(owner, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
            if region.has_ascending_runs:
                regions[name] = region
    n_covered: dict[str, int] = {}
    for region in regions.values():
        n_covered[region.name] = n_covered.get(region.name, 0) + math.prod(region.shape)
    unknown = [name for name, tensor in tensors.items() if n_covered.get(name) != tensor.numel()]
    return Published({name: region for name, region in regions.items() if region.name not in unknown}, unknown)


def names_in_model(reference: Any, names: Iterable[str]) -> dict[str, str]:
    """Map a folder's names to the model's, as transformers does: old names, other prefixes, heads of another task. A
    name that belongs to a part of a fused tensor, or to no tensor of the model, maps to itself."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(reference)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state: Mapping[str, Any] = reference.state_dict()
    model_names = {}
    for name in names:
        for rules in ((renamings, converters), ([], [])):
            new, fused = rename_source_key(name, *rules, reference.base_model_prefix, state)
            if new in state:
                break
        model_names[name] = new if new in state and fused is None else name
    return model_names


def as_the_model_names(source: Source, reference: Any) -> Source:
    """Present a folder's weights under the names and in the shapes of the model that reads them, without copying them.
    `source`: weights of another tool. `reference`: a transformers model whose parameters are on meta."""
    saved = {name.partition(".")[2]: tensor for name, tensor in source.tensors.items()}
    files = {name: tensor for name, tensor in saved.items() if isinstance(tensor, FileTensor)}
    if len(files) < len(saved):
        return source  # a checkpoint of shardkit, which has the model's names
    model_names = names_in_model(reference, files)
    tensors = {model_names[name]: tensor for name, tensor in files.items()}
    missing = set(reference.state_dict()) - set(tensors)
    parts: dict[str, dict[str, Region]] = {}
    for name, region in published(reference).regions.items() if missing else ():
        if region.name in missing and name in files:
            parts.setdefault(region.name, {})[name] = region
    shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    for name, regions in parts.items():
        if sum(math.prod(region.shape) for region in regions.values()) == math.prod(shapes[name]):
            tensors[name] = _fused(shapes[name], {part: (files[part], region) for part, region in regions.items()})
            for part in regions:
                del tensors[part]
    for alias, name in ties_of(reference).items():
        if alias in tensors:
            tensors.setdefault(name, tensors[alias])
            del tensors[alias]
    named = {logical(name, tensor.dtype): tensor for name, tensor in tensors.items()}
    source.close()
    return file_source(source.kind, source.path, named, ties={}, notes=source.notes)


def ties_of(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to its first name."""
    first_names: dict[int, str] = {}
    ties = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first_names.setdefault(id(param), name) != name:
            ties[name] = first_names[id(param)]
    return ties


def _fused(shape: tuple[int, ...], parts: Mapping[str, tuple[FileTensor, Region]]) -> FileTensor:
    """One tensor of the model, put together from several tensors of the files."""
    dtypes = {tensor.dtype for tensor, _ in parts.values()}
    extents = []
    for name, (tensor, region) in parts.items():
        extent = tensor.extents[0] if len(tensor.extents) == 1 else None
        if len(dtypes) > 1 or tensor.shape != region.shape or extent is None or len(extent.starts) != 1:
            raise CheckpointError(
                f"{name} is {list(tensor.shape)} of {tensor.dtype}; "
                f"{list(region.shape)} of its neighbours' type is due",
                "set model.init_from to weights of this model, with its sizes",
            )
        starts, run = region.runs()
        extents.append(Extent(extent.content, starts, run))
    return FileTensor(shape, dtypes.pop(), tuple(extents))
