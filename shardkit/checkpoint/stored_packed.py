"""Read a base that bitsandbytes has packed already: the folder's own bytes and scales, as transformers saves them.

Beside a packed weight `W` such a folder holds `W.absmax` (the blocks' scales), `W.quant_map` (the 16 numbers that codes
stand for), `W.quant_state.bitsandbytes__nf4` (its settings as JSON, in bytes) and, with double quantisation,
`W.nested_absmax` and `W.nested_quant_map`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..config.schema import QuantizeConfig
from ..errors import CheckpointError
from .formats.tensor_source import Source, find_prefix, with_prefix

_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MOST_BYTES = 4096
"""Longest settings of a layer that are read."""
_NESTED_BLOCK = 256


def holds_packed(source: Source) -> bool:
    """Whether a folder holds weights that bitsandbytes packed."""
    return any(_STATE in name for name in source.tensors)


def packed_weights(source: Source) -> set[str]:
    """Names of the weights that a folder holds packed."""
    return {name.partition(".")[2].partition(_STATE)[0] for name in source.tensors if _STATE in name}


def packed_names(source: Source) -> set[str]:
    """The source's names of packed weights and of all that belongs to them."""
    weights = packed_weights(source)
    plain_names = {name: name.partition(".")[2] for name in source.tensors}
    ends = tuple(f".{part}" for part in _PARTS)
    return {
        name
        for name, plain in plain_names.items()
        if plain in weights or _STATE in plain or (plain.endswith(ends) and plain.rpartition(".")[0] in weights)
    }


def refuse_other_layers(source: Source, shapes: Mapping[str, object]) -> None:
    """Refuse a folder that has packed other layers than the model, whose packed weights are the keys of `shapes`."""
    stored = packed_weights(source)
    prefix = find_prefix(list(shapes), dict.fromkeys(stored))
    weights = {with_prefix(name, prefix) for name in shapes}
    for missing in sorted(weights - stored):
        if not missing.endswith(".weight"):
            raise CheckpointError(
                f"{source.path} holds the experts {missing} unpacked, and model.quantize.experts packs them",
                "remove experts from model.quantize",
            )
        end = missing.removesuffix(".weight").rpartition(".")[2]
        raise CheckpointError(
            f"{source.path} holds {missing} unpacked, and model.quantize packs it",
            f"leave such layers as they are: model.quantize.skip=[{end}]",
        )
    for beyond in sorted(stored - weights):
        raise CheckpointError(
            f"{source.path} holds {beyond} packed, which the model holds unpacked",
            "shorten model.quantize.skip, or start from the 16-bit model that the folder was made from",
        )


class StoredLayers:
    """The packed layers of a folder. `shapes`: of the model's packed weights, unpacked; `code`: the type's numbers."""

    def __init__(
        self, source: Source, shapes: Mapping[str, tuple[int, ...]], settings: QuantizeConfig, code: torch.Tensor
    ) -> None:
        refuse_other_layers(source, shapes)
        self._source, self._settings, self._code = source, settings, code
        self._names = {name.partition(".")[2]: name for name in source.tensors}
        prefix = find_prefix(list(shapes), self._names)
        self._weights = {name: with_prefix(name, prefix) for name in shapes}
        self._means = {name: self._check(name, shape) for name, shape in shapes.items()}

    def read_into(self, weight: str, part: str, start: int, out: torch.Tensor) -> None:
        """Fill `out`, 1-D, with bytes of a layer's parameter from byte `start` on. `weight`: the layer's weight in the
        model without the adapter. `part`: packed, absmax or nested."""
        fqn = self._weights[weight]
        if part == "nested":
            block_scales, levels = (self._whole(f"{fqn}.{name}") for name in ("nested_absmax", "nested_quant_map"))
            numbers = torch.cat([block_scales, torch.tensor([self._means[weight]]), levels]).view(torch.uint8)
            out.copy_(numbers[start : start + out.numel()])
            return
        name = self._names[fqn if part == "packed" else f"{fqn}.absmax"]
        dtype = self._source.tensors[name].dtype
        first, last = start // dtype.itemsize, -(-(start + out.numel()) // dtype.itemsize)
        values = self._source.read(name, first, last - first)
        begin = start - first * dtype.itemsize
        out.copy_(values.view(torch.uint8)[begin : begin + out.numel()])

    def _whole(self, fqn: str) -> torch.Tensor:
        return self._source.read(self._names[fqn])

    def _check(self, weight: str, shape: tuple[int, ...]) -> float:
        """Check that a layer was packed as the settings say; returns the mean of its scales if they are quantised."""
        fqn, settings = self._weights[weight], self._settings
        state = self._state(fqn)
        n_scales = math.prod(shape) // settings.block_size
        expected: dict[str, Any] = {
            "quant_type": settings.type, "blocksize": settings.block_size, "shape": list(shape),
            "nested_blocksize": _NESTED_BLOCK if settings.double else None,
        }  # fmt: skip
        for key, wanted in expected.items():
            if state.get(key) != wanted:
                raise CheckpointError(
                    f"{fqn} in {self._source.path} was packed with {key}={state.get(key)}, not {wanted}",
                    "set model.quantize to what the folder was packed with (its config.json has quantization_config)",
                )
        sizes: dict[str, tuple[int, torch.dtype | None]] = {
            fqn: (math.prod(shape) // 2, None),
            f"{fqn}.absmax": (n_scales * (1 if settings.double else 4), None),
            f"{fqn}.quant_map": (16 * 4, torch.float32),
        }
        if settings.double:
            sizes[f"{fqn}.nested_absmax"] = (-(-n_scales // _NESTED_BLOCK) * 4, torch.float32)
            sizes[f"{fqn}.nested_quant_map"] = (256 * 4, torch.float32)
        for name, (n_bytes, dtype) in sizes.items():
            spec = self._source.tensors.get(self._names.get(name, ""))
            size = None if spec is None else math.prod(spec.shape) * spec.dtype.itemsize
            if spec is None or size != n_bytes or spec.dtype != (dtype or spec.dtype):
                raise self._damaged(name)
        if not torch.allclose(self._whole(f"{fqn}.quant_map"), self._code, atol=1e-6, rtol=0):
            raise CheckpointError(
                f"{fqn} in {self._source.path} has other numbers than those of {settings.type}",
                "start from the 16-bit model that the folder was made from",
            )
        mean = state.get("nested_offset", 0.0)
        if isinstance(mean, bool) or not isinstance(mean, int | float):
            raise self._damaged(fqn)
        return float(mean)

    def _state(self, fqn: str) -> dict[str, Any]:
        name = next(self._names[name] for name in self._names if name.startswith(fqn + _STATE))
        spec = self._source.tensors[name]
        n_bytes = math.prod(spec.shape)
        if spec.dtype != torch.uint8 or not 0 < n_bytes <= _MOST_BYTES:
            raise self._damaged(name)
        try:
            state = json.loads(bytes(self._source.read(name).tolist()))
        except (ValueError, RecursionError):
            raise self._damaged(name) from None
        if not isinstance(state, dict):
            raise self._damaged(name)
        return state

    def _damaged(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{name} in {self._source.path} is not as bitsandbytes saves it", "download or save the folder again"
        )
