"""Export an adapter: as a folder for peft, or as the whole model with the adapter added to its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...config.schema import AdapterConfig
from ...errors import CheckpointError, importing
from ..frozen_base import digest_of_pieces, way_of
from ..native.reader import TensorSpec
from ..native.writer import byte_view
from ..stored_packed import holds_packed
from .detect import open_source
from .hub_names import as_the_model_names
from .tensor_source import Source, cast, find_prefix, with_prefix
from .weight_files import header_of

_NAME = ".default.weight"
_EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Experts' weights in the order in which transformers' modules hold them."""
_CONFIG, _FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class SavedAdapter:
    """A manifest's entry about the adapter that a checkpoint holds."""

    settings: AdapterConfig
    transposed: bool  # whether the adapted layers store their weights as [in, out]
    base: Mapping[str, Any]  # digest, dtype and source of the frozen model, and the kind of its checksums
    quantized: bool = False  # whether the run held the frozen model packed


def saved_adapter(source: Source) -> SavedAdapter | None:
    """The adapter that a checkpoint holds instead of a whole model; `None` if it holds a model."""
    entry = source.run.extra.get("adapter") if source.run is not None else None
    if entry is None:
        return None
    try:
        settings = {key: entry[key] for key in ("type", "r", "alpha", "targets", "use_rslora")}
        base = {key: entry["base"][key] for key in ("digest", "dtype", "source")}
        base["checksum"] = entry["base"].get("checksum", 1)
        if base["dtype"] not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {base['dtype']}")
        quantized = entry.get("quantize") is not None
        return SavedAdapter(AdapterConfig(**settings), bool(entry["fan_in_fan_out"]), base, quantized)
    except (LookupError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"{source.path} does not describe its adapter: {problem}", "restore it") from error


def _layers(source: Source) -> list[str]:
    """Names of the adapted layers, in the checkpoint's order."""
    end = f".lora_A{_NAME}"
    return [name.removeprefix("model.").removesuffix(end) for name in source.tensors if name.endswith(end)]


def _of_experts(source: Source, layer: str) -> bool:
    """Whether an adapted layer is a weight of experts, [experts, out, in], with an A and a B for each."""
    return len(source.tensors[f"model.{layer}.lora_A{_NAME}"].shape) == 3


def write_peft(source: Source, adapter: SavedAdapter, folder: Path, dtype: torch.dtype | None, model: Any) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`, for `PeftModel.from_pretrained(base, folder)`.

    `dtype`: type of the written weights; None keeps the saved types. `model`: the transformers model with its adapter,
    on meta; `None` if it cannot be built.
    """
    layers = _layers(source)
    experts = [name for name in layers if _of_experts(source, name)]
    tensors: dict[str, tuple[str, TensorSpec]] = {}
    for name, spec in source.tensors.items():
        kind, _, fqn = name.partition(".")
        if kind == "model":
            layer, _, part = fqn.removesuffix(_NAME).rpartition(".")
            shape = spec.shape
            if layer in experts:  # peft stores A as [experts · r, in], and B as [out, r · experts]
                n_experts, rows, columns = shape
                shape = (n_experts * rows, columns) if part == "lora_A" else (rows, columns * n_experts)
                # peft wraps the experts once for each of their adapted weights; the last wrapper is the outer one.
                prefix = layer.rpartition(".")[0]
                adapted = [weight for name in _EXPERT_WEIGHTS if (weight := f"{prefix}.{name}") in experts]
                layer = prefix + ".base_layer" * (len(adapted) - 1 - adapted.index(layer))
            tensors[f"base_model.model.{layer}.{part}.weight"] = name, TensorSpec(shape, dtype or spec.dtype)
    with (folder / _FILE).open("xb") as out:
        out.write(header_of((name, spec) for name, (_, spec) in tensors.items()))
        for name, spec in tensors.values():
            shape, pieces = source.tensors[name].shape, source.pieces(name, spec.dtype)
            if len(shape) == 3 and ".lora_B." in name:  # peft counts experts last
                pieces = iter([cast(source.read(name).view(shape).permute(1, 2, 0).contiguous(), spec.dtype, name)])
            for piece in pieces:
                out.write(byte_view(piece))
    with importing("--to peft needs peft", "pip install 'shardkit[finetune]'", CheckpointError):
        import peft
    settings = adapter.settings
    kind = type(model).__name__
    peft.LoraConfig(
        r=settings.r, lora_alpha=settings.alpha, use_rslora=settings.use_rslora, fan_in_fan_out=adapter.transposed,
        target_modules=_targets([name for name in layers if name not in experts], 1, model),
        target_parameters=_targets(experts, 2, model) or None,
        base_model_name_or_path=adapter.base["source"], inference_mode=True,
        task_type="CAUSAL_LM" if "CausalLM" in kind or "LMHead" in kind else None,
    ).save_pretrained(str(folder))  # fmt: skip


def _targets(adapted: list[str], n_parts: int, model: Any) -> list[str]:
    """The last parts of the adapted names (`q_proj`, `experts.down_proj`), or all of each if others end like them."""
    if model is None:
        return sorted(adapted)
    ends = sorted({".".join(name.split(".")[-n_parts:]) for name in adapted})
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    matching = [name for name in names if f".{name}".endswith(tuple(f".{end}" for end in ends))]
    return ends if len(matching) == len(adapted) else sorted(adapted)


def merged(
    source: Source,
    adapter: SavedAdapter,
    base: Path | None,  # path of the frozen model's weights; None means the path from which the run read them
    reference: Any,  # the model without its adapter, a transformers model on meta
    parameters: list[str],  # names of the frozen model's parameters
    dtype: torch.dtype | None,  # type of the merged weights; None keeps the base's types
) -> Source:
    """A source of the whole model, whose adapted layers read as W + scaling · B·A, a piece of a tensor at a time."""
    base_path = base or adapter.base["source"]
    if base_path is None:
        raise CheckpointError(
            f"{source.path} was trained on a model with drawn weights, which are in no file", "name them with --base"
        )
    base_source = open_source(Path(base_path), weights_only=True)
    try:
        base_source = as_the_model_names(base_source, reference)
        return _merged(source, adapter, base_source, parameters, dtype)
    except BaseException:
        base_source.close()
        raise


def _merged(
    source: Source, adapter: SavedAdapter, base_source: Source, parameters: list[str], dtype: torch.dtype | None
) -> Source:
    """`merged`, once the base is open; checks that it is the one that the adapter was trained on."""
    if holds_packed(base_source):
        raise CheckpointError(
            f"the run's base, {base_source.path}, is packed in 4 bits: an adapter is never added to packed weights",
            "export the adapter with --to peft, and let peft merge it into the 16-bit model",
        )
    saved = base_source.by_plain_name()
    prefix = find_prefix(parameters, saved)
    missing = [name for name in parameters if with_prefix(name, prefix) not in saved]
    if missing:
        raise CheckpointError(f"{base_source.path} has no {missing[0]}", "name the frozen model's weights with --base")
    base_tensors = {name: saved[with_prefix(name, prefix)] for name in parameters}
    as_trained = getattr(torch, adapter.base["dtype"])
    pieces = ((name, base_source.pieces(base_name, as_trained)) for name, (base_name, _) in base_tensors.items())
    digest = digest_of_pieces(pieces, way_of(adapter.base))
    if digest != adapter.base["digest"]:
        raise CheckpointError(
            f"{base_source.path} is not the model that the adapter of {source.path} was trained on: "
            "their weights differ",
            f"name it with --base; the run read {adapter.base['source'] or 'no file'}",
        )
    scaling, products = adapter.settings.scaling, _Products(source, adapter.transposed)
    layers = {name if _of_experts(source, name) else f"{name}.weight" for name in _layers(source)}
    tensors = {
        f"model.{name}": TensorSpec(spec.shape, dtype if dtype and spec.dtype.is_floating_point else spec.dtype)
        for name, (_, spec) in base_tensors.items()
    }

    def read_into(name: str, start: int, out: torch.Tensor) -> None:
        if name not in tensors:  # a buffer
            source.read_into(name, start, out)
            return
        fqn = name.removeprefix("model.")
        base_name, spec = base_tensors[fqn]
        base_weights = base_source.read(base_name, start, out.numel())
        if fqn in layers:
            base_weights = base_weights.float()
            base_weights += scaling * products.piece(fqn, tuple(spec.shape), start, out.numel())
        out.copy_(base_weights if base_weights.dtype == out.dtype else cast(base_weights, out.dtype, name))

    def close() -> None:
        base_source.close()
        source.close()

    buffers = {name: spec for name, spec in source.tensors.items() if name.startswith("buffer.")}
    return replace(
        source, kind="shardkit adapter", tensors={**tensors, **buffers}, read_into=read_into, close=close, scalars={}
    )


class _Products:
    """Computes ranges of the flattened products B·A. It keeps the factors of one layer, which take little memory."""

    def __init__(self, source: Source, transposed: bool) -> None:
        self._source, self._transposed = source, transposed
        self._layer, self._factors = "", (torch.empty(0), torch.empty(0))

    def _read(self, layer: str) -> Iterator[torch.Tensor]:
        """Read a layer's B, then its A, in float32."""
        for part in ("B", "A"):
            name = f"model.{layer}.lora_{part}{_NAME}"
            yield self._source.read(name).view(self._source.tensors[name].shape).float()

    def piece(self, weight: str, shape: tuple[int, ...], start: int, length: int) -> torch.Tensor:
        """Elements [start, start + length) of the flattened product for a weight of this shape: [out, in], or
        [experts, out, in]."""
        layer = weight.removesuffix(".weight")
        if layer != self._layer:
            b, a = self._read(layer)
            left, right = (a.t(), b.t()) if self._transposed and b.dim() == 2 else (b, a)
            self._layer, self._factors = layer, (left.view(-1, *left.shape[-2:]), right.view(-1, *right.shape[-2:]))
        left_factors, right_factors = self._factors
        n_rows, columns = shape[-2:]
        first_row, end_row = start // columns, -(-(start + length) // columns)
        rows = []
        for expert in range(first_row // n_rows, -(-end_row // n_rows)):
            span = slice(max(0, first_row - expert * n_rows), end_row - expert * n_rows)
            rows.append(left_factors[expert, span] @ right_factors[expert])
        return torch.cat(rows).view(-1)[start - first_row * columns :][:length]
