"""Read DeepSpeed's folders (`global_step*`) of ZeRO-1, 2 and 3: fp32 masters, moments, frozen weights and buffers.

The layout that deepspeed 0.19 writes (`zero/stage_1_and_2.py`, `zero/stage3.py`, `utils/zero_to_fp32.py`):

- ZeRO-1/2, `[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt`: a flat fp32 partition per parameter group, its moments,
  and each parameter's slice of it (`param_slice_mappings`); a parameter continues where the previous rank ends.
- ZeRO-3: flat partitions of sub-groups; each parameter is cut into world_size equal parts, the last one padded, and
  rank R's parts follow each other in the order of `param_shapes`.
- `*_model_states.pt`: shapes, tied names, buffers, frozen weights, the step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..native.manifest import whole_numbers
from .tensor_source import RESTORE, Extent, FileTensor, Source, canonical, file_source, map_file, reading
from .unpickle import Archive, PickledObject, TensorRef

_OPTIM = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_WEIGHTS_ONLY = "pass --weights-only to leave the optimizer state behind"


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder has a file of DeepSpeed's model states."""
    return any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def open_deepspeed(folder: Path, weights_only: bool = False) -> Source:
    """Open a `global_step*` folder."""
    if (folder / "zero").is_dir():
        raise CheckpointError(f"{folder} is in DeepSpeed's universal layout", "convert the folder it was made from")
    with reading(folder, "use a folder made by deepspeed 0.9 or newer, all of its files in place"):
        return _Folder(folder, weights_only).source()


class _Folder:
    """Collects the tensors of a folder from the files of all ranks."""

    def __init__(self, folder: Path, weights_only: bool) -> None:
        self.path, self._weights_only = folder, weights_only
        self._models = _by_rank(folder, _MODEL)
        self._optims = _by_rank(folder, _OPTIM)
        self._extents: dict[str, list[Extent]] = {}
        self._tensors: dict[str, FileTensor] = {}
        self._scalars: dict[str, float] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._reached: dict[str, int] = {}

    def source(self) -> Source:
        """Read the index of all files, and return their tensors under shardkit's names."""
        model: Mapping[str, Any] = self._models[0].content
        groups: list[Mapping[str, tuple[int, ...]]] = [_shapes(group) for group in model.get("param_shapes") or ()]
        shapes = {name: shape for group in groups for name, shape in group.items()}
        step = int(model["global_steps"])
        if groups and not self._optims:
            raise CheckpointError(f"{self.path} has no *_optim_states.pt, which hold the weights of ZeRO", RESTORE)
        if not self._optims:
            if model.get("optimizer") is not None and not self._weights_only:
                raise CheckpointError(f"{self.path} holds optimizer state without names of parameters", _WEIGHTS_ONLY)
            shapes = {}  # ZeRO is off: the module's state holds the weights
        else:
            self._read_partitions(groups)
        for name, extents in self._extents.items():
            kind, _, tail = name.partition(".")
            fqn = tail if kind == "model" else tail.rpartition(".")[0]
            self._tensors[name] = FileTensor(shapes[fqn], self._dtypes[name], tuple(extents))
        ties = dict(model.get("shared_params") or {})
        self._read_module(model, shapes, ties)
        renamed = canonical([*shapes, *ties, *(n.partition(".")[2] for n in self._tensors)])
        return file_source(
            "deepspeed", self.path,
            {_rename(name, renamed): tensor for name, tensor in self._tensors.items()},
            scalars={_rename(name, renamed): number for name, number in self._scalars.items()},
            step=step,
            ties={renamed[alias]: renamed[name] for alias, name in ties.items()},
        )  # fmt: skip

    def _read_partitions(self, groups: list[Mapping[str, tuple[int, ...]]]) -> None:
        """Find each parameter's masters and moments in the flat partitions of all ranks."""
        rank_0 = self._optims[0].content["optimizer_state_dict"]
        count = rank_0["partition_count"]
        counts = set(count) if isinstance(count, list) else {count}
        if counts != {len(self._optims)} or set(self._optims) != set(range(len(self._optims))):
            raise CheckpointError(
                f"{self.path} was written by {'/'.join(map(str, sorted(counts)))} ranks, "
                f"{len(self._optims)} of their *_optim_states.pt are there",
                "copy all of them; expert-parallel jobs cannot be read",
            )
        stage = rank_0.get("zero_stage", 1)  # a number, or an enum's member
        stage3 = int(stage.args[0] if isinstance(stage, PickledObject) else stage) == 3
        for rank in range(len(self._optims)):
            archive = self._optims[rank]
            state = archive.content["optimizer_state_dict"]
            pieces = _stage3(state, groups, rank, len(self._optims)) if stage3 else _stage12(state)
            for name, index, at, length in pieces:
                masters = state["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"]
                numel = math.prod(next(group[name] for group in groups if name in group))
                start = rank * -(-numel // len(self._optims)) if stage3 else self._reached.get(name, 0)
                self._reached[name] = start + length
                self._add(archive, f"model.{name}", masters[index], at, start, length)
                if not self._weights_only:
                    self._add_states(archive, name, _base_state(state, index), masters[index], at, start, length)

    def _add(self, archive: Archive, name: str, flat: TensorRef, at: int, start: int, length: int) -> None:
        """Add an extent to the tensor `name`."""
        if not isinstance(flat, TensorRef) or at + length > flat.numel:
            raise CheckpointError(f"{archive.file} does not hold all of its part of {name}", RESTORE)
        if self._dtypes.setdefault(name, flat.dtype) != flat.dtype:
            raise CheckpointError(f"{name} has two dtypes in {self.path}", RESTORE)
        self._extents.setdefault(name, []).append(Extent(archive.elements(flat, name, at, length), (start,), length))

    def _add_states(
        self, archive: Archive, name: str, state: Mapping[str, Any], master: TensorRef, at: int, start: int, length: int
    ) -> None:
        """Add the optimizer's states of one parameter: moments, which lie as the master does, and step counters."""
        for key, state_value in state.items():
            state_name = f"optim.{name}.{key}"
            if isinstance(state_value, TensorRef) and state_value.shape:
                # In the last partition, moments have padding and masters have none.
                if len(state_value.shape) != 1 or state_value.numel < master.numel:
                    raise CheckpointError(f"{state_name} in {archive.file} is not one value per element", _WEIGHTS_ONLY)
                self._add(archive, state_name, state_value, at, start, length)
            elif state_value is not None:
                self._scalars[state_name] = archive.number(state_value, state_name)

    def _read_module(self, model: Mapping[str, Any], trained: Mapping[str, Any], ties: Mapping[str, str]) -> None:
        """Add buffers, and weights that no optimizer holds; ZeRO-3 stores a part of such a weight per rank."""
        frozen = _shapes(model.get("frozen_param_shapes") or {})
        buffers = set(model.get("buffer_names") or ())
        for name, ref in model["module"].items():
            if name in trained or name in ties or not isinstance(ref, TensorRef):
                continue
            if name in frozen and ref.numel != math.prod(frozen[name]):
                extents, numel = [], math.prod(frozen[name])
                for rank in sorted(self._models):
                    part: TensorRef = self._models[rank].content["frozen_param_fragments"][name]
                    start = min(numel, rank * part.numel)
                    content = self._models[rank].elements(part, name)
                    extents.append(Extent(content, (start,), min(part.numel, numel - start)))
                self._tensors[f"model.{name}"] = FileTensor(frozen[name], part.dtype, tuple(extents))
            else:
                kind = "buffer" if name in buffers else "model"
                self._tensors[f"{kind}.{name}"] = self._models[0].tensor(ref, name)


def _shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: whole_numbers(shape) for name, shape in sizes.items()}


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Archive]:
    """The files that match `pattern`, by rank."""
    archives: dict[int, Archive] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match and int(match.group(2)):
            raise CheckpointError(
                f"{path} is from a tensor-parallel job", "convert the folder to a plain one with DeepSpeed's own tools"
            )
        if match:
            with reading(path):
                content = map_file(path)
            archives[int(match.group(1) or 0)] = Archive(path, content)
    return archives


def _stage12(state: Mapping[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Yield (parameter, group, first element in its partition, length) for one rank's partitions of ZeRO-1/2."""
    for index, mapping in enumerate(state["param_slice_mappings"]):
        for name, fragment in mapping.items():
            start, length = whole_numbers([fragment.get("start"), fragment.get("numel")])
            yield name, index, start, length


def _stage3(
    state: Mapping[str, Any], groups: list[Mapping[str, tuple[int, ...]]], rank: int, world: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield (parameter, sub-group, first element in its partition, length without padding) for one rank's ZeRO-3 parts.
    A part never crosses the end of a sub-group."""
    flats: list[TensorRef] = state["fp32_flat_groups"]
    index, at = 0, 0
    for group in groups:
        for name, shape in group.items():
            numel = math.prod(shape)
            part = -(-numel // world)
            while at == flats[index].numel:
                index, at = index + 1, 0
            yield name, index, at, max(0, min(part, numel - rank * part))
            at += part


def _base_state(state: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The base optimizer's states of flat partition `index`; FusedAdam has its step counter in the parameter group."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    if isinstance(base, list):  # an elastic checkpoint
        step = state.get("base_optimizer_state_step")
        return {**base[index], **({} if step is None else {"step": step})}
    owners = [(key, group) for group in base["param_groups"] for key in group["params"]]
    key, group = owners[index]
    states: dict[str, Any] = dict(base["state"].get(key, {}))
    if "step" in group and "exp_avg" in states:
        states.setdefault("step", group["step"])
    return states


def _rename(name: str, renamed: Mapping[str, str]) -> str:
    """A tensor's name with its parameter's name replaced as `renamed` says."""
    kind, _, tail = name.partition(".")
    if kind != "optim":
        return f"{kind}.{renamed[tail]}"
    fqn, _, key = tail.rpartition(".")
    return f"optim.{renamed[fqn]}.{key}"
