"""Dtypes of forward, backward, reduction and master weights, the loss scale of fp16; nested batches on a device."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..config.schema import PrecisionConfig
from ..errors import ConfigError, importing
from .compat import TREES, tree_map

_COMPUTE = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16,
    "pure_bf16": torch.bfloat16,
}  # fmt: skip
_MIXED = re.compile(
    r"(?=.*(BFloat16|Half|\bb?float16))(?=.*(same d?type|scalar type|should be the same|dtypes match|mixed dtype))"
)
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(config: PrecisionConfig) -> torch.dtype:
    """The dtype of the inputs of matrix products. tf32 keeps fp32 tensors; fp8 casts bf16 inputs of linear layers."""
    return _COMPUTE[config.mode]


def master_dtype(config: PrecisionConfig) -> torch.dtype:
    """The dtype of the weights that the optimizer updates."""
    return torch.bfloat16 if config.mode == "pure_bf16" else torch.float32


def reduce_dtype(config: PrecisionConfig) -> torch.dtype:
    """The dtype in which DDP and FSDP2 reduce gradients over ranks."""
    return master_dtype(config) if config.reduce_dtype == "auto" else _TYPES[config.reduce_dtype]


def set_matmul_precision(config: PrecisionConfig) -> None:
    """Allow or forbid TF32 tensor cores for fp32 products and convolutions, process-wide."""
    torch.set_float32_matmul_precision("high" if config.mode == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = config.mode == "tf32"  # torch allows it by default


def loss_scaler(config: PrecisionConfig, device: torch.device) -> GradScaler:
    """A dynamic loss scaler for fp16; for every other mode, a scaler that does nothing."""
    return GradScaler(
        device.type,
        init_scale=2.0**config.loss_scale_init_power,
        growth_interval=config.loss_scale_window,
        enabled=config.mode == "fp16",
    )


def cast_parameters(model: nn.Module, config: PrecisionConfig) -> None:
    """Cast floating parameters to bf16 in place, if the mode is pure_bf16. Buffers keep their dtype.

    Tied parameters stay tied.
    """
    if config.mode != "pure_bf16":
        return
    for param in model.parameters():
        if param.is_floating_point() and not hasattr(param, "ds_tensor"):
            param.data = param.data.to(torch.bfloat16)


_ROUTERS = ("gate", "router")
"""The names of routers beside `experts`, in transformers' models."""


def routers_of(model: nn.Module, config: PrecisionConfig) -> list[nn.Module]:
    """The routers that compute in fp32 although the mode is narrower: those of transformers' experts."""
    if not config.router_fp32 or compute_dtype(config) == torch.float32:
        return []
    parents = [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
    beside = [getattr(module, name, None) for module in parents for name in _ROUTERS]
    return [
        router
        for router in beside
        if isinstance(router, nn.Module) and type(router).__module__.startswith("transformers.")
    ]


def route_in_fp32(model: nn.Module, config: PrecisionConfig, device: torch.device) -> None:
    """Let routers compute in fp32: in 16 bits, close logits become equal, and the choice is one of rounding."""
    for router in routers_of(model, config):
        for part in router.modules():  # each by itself, as ZeRO-3 gathers weights for the call of their module
            part.forward = partial(_in_fp32, part, part.forward, device.type)


def _in_fp32(module: nn.Module, forward: Callable[..., Any], device_type: str, *args: Any) -> Any:
    narrow = {name: p for name, p in module.named_parameters(recurse=False) if p.dtype != torch.float32}
    parameters = {name: param.float() for name, param in narrow.items()}  # none under autocast: nothing to compile anew
    vars(module).update(parameters)  # attributes of the object itself come before registered parameters
    try:
        with torch.autocast(device_type, enabled=False):
            return forward(*map(_as_fp32, args))
    finally:
        for name in parameters:
            del vars(module)[name]


def autocast_forward(model: nn.Module, device: torch.device, config: PrecisionConfig) -> None:
    """Make the model's forward run under autocast; backward uses the dtypes that forward chose."""
    dtype = compute_dtype(config)
    to_fp32 = config.output_dtype == "fp32"
    if dtype == torch.float32:
        return
    forward: Any = model.forward
    as_fp32 = partial(tree_map, _as_fp32) if to_fp32 and TREES.works() else _as_fp32

    @functools.wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            out = forward(*args, **kwargs)
        return as_fp32(out) if to_fp32 else out

    model.forward = under_autocast


def engine_forward(
    model: nn.Module, device: torch.device, config: PrecisionConfig, strategy: str, *, cast_inputs: bool = False
) -> None:
    """Adapt the forward for an engine that casts weights: run it under autocast if the config says so, or else explain
    errors about mixed dtypes.

    `cast_inputs`: cast the forward's floating inputs to the compute type, for an engine that does not cast them.
    """
    if config.autocast:
        autocast_forward(model, device, config)
        return
    forward: Any = model.forward
    cast_one = partial(_as_type, compute_dtype(config))
    cast = partial(tree_map, cast_one) if TREES.works() else cast_one

    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        if cast_inputs:
            args, kwargs = tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if not _MIXED.search(str(error)):
                raise
            raise ConfigError(
                f"the model mixes fp32 tensors into precision.mode={config.mode} ({str(error).splitlines()[0]}): "
                f"parallel.strategy={strategy} casts weights and inputs, not the tensors that forward makes",
                "set precision.autocast=true (as single and ddp run it), or precision.mode=fp32",
            ) from error

    if compute_dtype(config) != torch.float32:
        model.forward = explained


def _as_type(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


_as_fp32 = partial(_as_type, torch.float32)


def convert_to_fp8(model: nn.Module, config: PrecisionConfig) -> None:
    """fp8: let torchao's `Float8Linear` compute the products of the model's linear layers, in place.

    Layers whose sizes are not multiples of 16 (the hardware's unit) and output heads stay bf16, routers fp32.
    """
    if config.mode != "fp8":
        return
    fix = "pip install 'shardkit[torchao]', or set precision.mode=bf16"
    with importing("precision.mode=fp8 needs torchao", fix):
        from torchao.float8 import convert_to_float8_training

    routing = {part for router in routers_of(model, config) for part in router.modules()}

    def qualifies(module: nn.Module, fqn: str) -> bool:
        if module in routing:
            return False
        if not isinstance(module, nn.Linear) or "head" in fqn.rsplit(".", 1)[-1]:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    if not any(qualifies(module, fqn) for fqn, module in model.named_modules()):
        raise ConfigError(
            "precision.mode=fp8, but no linear layer has sizes that are multiples of 16",
            "choose a width that is a multiple of 16, or set precision.mode=bf16",
        )
    convert_to_float8_training(model, module_filter_fn=qualifies)


Change = Callable[[torch.Tensor], torch.Tensor]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device` (asynchronously if pinned); containers keep their types."""
    return map_tensors(
        batch, lambda tensor: tensor.to(device, non_blocking=True), convert=lambda holder: holder.to(device)
    )


def map_tensors(batch: Any, change: Change, convert: Callable[[Any], Any] | None = None) -> Any:
    """The batch with `change(tensor)` in place of each tensor, in new containers of the same types.

    Mappings, lists, tuples, named tuples and dataclasses are walked, frozen ones too; a dataclass is copied without a
    call of its constructor. The given batch is not changed. `convert`: converts other objects that have a method `to`
    of their own, such as torch's `PackedSequence`; None leaves them as they are.
    """
    within = partial(map_tensors, change=change, convert=convert)
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, type):
        return batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: within(member) for key, member in batch.items()})
    if convert is not None and callable(getattr(batch, "to", None)):
        return convert(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(within, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(within, batch))
    if dataclasses.is_dataclass(batch):
        changed = copy.copy(batch)
        names = {field.name for field in dataclasses.fields(batch)} | set(getattr(batch, "__dict__", ()))
        for name in names:
            if hasattr(batch, name):
                object.__setattr__(changed, name, within(getattr(batch, name)))
        return changed
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors that `map_tensors` would change."""
    held: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    map_tensors(batch, note)
    return held


def _like(mapping: Mapping[Any, Any], members: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type with these members."""
    if type(mapping) is dict:
        return members
    try:
        if isinstance(mapping, MutableMapping):
            changed = copy.copy(mapping)
            for key, member in members.items():
                changed[key] = member
            return changed
        return type(mapping)(members)  # type: ignore[call-arg]
    except Exception as error:  # a user's class may raise anything
        if all(member is mapping[key] for key, member in members.items()):
            return mapping
        raise ConfigError(
            f"a batch holds a {type(mapping).__name__}, which cannot be copied with its tensors on another device: "
            f"{type(error).__name__}: {' '.join(str(error).split())}",
            "return a dict, a tuple or a dataclass from the task's collate",
        ) from error
