"""Optimizers, their parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..config.schema import OptimConfig
from ..errors import ConfigError, importing
from .blocks import find_blocks

T = TypeVar("T")


def make_optimizer(
    config: OptimConfig, model: nn.Module, block_classes: Sequence[type[nn.Module]] = ()
) -> torch.optim.Optimizer:
    """The optimizer that the config names, over the model's trainable parameters. All hyperparameters are explicit.

    `block_classes`: the module types that are blocks for Muon, as in `find_blocks`.
    """
    groups = parameter_groups(config, model)
    if not groups:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameter", "set requires_grad on the parameters to train"
        )
    lr, weight_decay = config.lr, config.weight_decay
    if config.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr, weight_decay=weight_decay)
    adam: dict[str, Any] = dict(lr=lr, betas=config.betas, eps=config.eps, weight_decay=weight_decay)
    if config.name == "adamw8bit":
        return _adamw8bit(groups, adam)
    if config.name == "adamw_bnb_8bit":
        fix = "pip install 'shardkit[quantize]', or set optim.name=adamw"
        with importing("optim.name=adamw_bnb_8bit needs bitsandbytes", fix):
            from bitsandbytes.optim.adamw import AdamW8bit
        # Parameters of fewer than 4,096 elements keep fp32 moments, as is its default.
        optimizer: torch.optim.Optimizer = AdamW8bit(groups, **adam)  # type: ignore[no-untyped-call]
        return optimizer
    params = [param for group in groups for param in group["params"]]
    kernel = _kernel(config, next((param for param in params if param.is_complex()), params[0]))
    if config.name == "muon":
        return MuonAdamW(groups, matrices_of_blocks(model, block_classes), adam, kernel)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **adam, **kernel)
    return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, weight_decay=weight_decay, **kernel)


def _adamw8bit(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    fix = "pip install 'shardkit[torchao]', or set optim.name=adamw"
    with importing("optim.name=adamw8bit needs torchao", fix):
        from torchao.optim import AdamW8bit
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, **settings)

    def lr_as_tensor(*_: Any) -> None:
        """Put the learning rate into a tensor, from which the compiled update reads it; a schedule writes a number."""
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

    optimizer.register_step_pre_hook(lr_as_tensor)
    return optimizer


def matrices_of_blocks(model: nn.Module, block_classes: Sequence[type[nn.Module]] = ()) -> set[int]:
    """The ids of the 2-D parameters inside the model's repeated blocks, so without embeddings and the output head."""
    return {id(p) for block in find_blocks(model, block_classes) for p in block.parameters() if p.dim() == 2}


class MuonAdamW(torch.optim.Optimizer):
    """Muon for some matrices, AdamW for everything else, as one optimizer with one state.

    Muon's updates are rescaled to AdamW's usual size (Liu et al. 2025, section 2.2): one learning rate and one weight
    decay serve both. `matrices`: ids of the parameters that Muon updates. `settings`: AdamW's lr, betas, eps,
    weight_decay; Muon uses the same lr and weight_decay.
    """

    def __init__(
        self, groups: list[dict[str, Any]], matrices: set[int], settings: dict[str, Any], kernel: dict[str, Any]
    ) -> None:
        if not matrices:
            raise ConfigError(
                "optim.name=muon, but the model has no matrix inside repeated blocks", "set optim.name=adamw"
            )
        by_kind: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            for is_matrix in by_kind:
                params = [p for p in group["params"] if (id(p) in matrices) is is_matrix]
                if params:
                    by_kind[is_matrix].append({**group, "params": params})
        self._muon = torch.optim.Muon(
            by_kind[True], lr=settings["lr"], weight_decay=settings["weight_decay"], adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW(by_kind[False], **settings, **kernel) if by_kind[False] else None
        parts = [self._muon, *([self._adamw] if self._adamw else [])]
        super().__init__([{**group, "muon": part is self._muon} for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not supported."""
        for part, is_muon in ((self._muon, True), (self._adamw, False)):
            groups = [group for group in self.param_groups if group["muon"] is is_muon]
            if part is not None and groups:
                part.param_groups = groups
                part.step()  # type: ignore[no-untyped-call]


def _kernel(config: OptimConfig, param: torch.Tensor) -> dict[str, Any]:
    """The optimizer's `fused` and `foreach` arguments; `None` leaves the choice to torch."""
    # torch registers no sharding rule for the fused SGD kernel on DTensors (importing that class takes 0.4 s).
    # On the CPU that kernel leaves most half-precision weights unchanged (torch 2.13).
    half_on_cpu = param.device.type == "cpu" and param.dtype in (torch.bfloat16, torch.float16)
    has_fused = config.name == "adamw" or not (hasattr(param, "placements") or half_on_cpu)
    has_fused = has_fused and not param.is_complex()
    if config.implementation == "auto":
        return {"fused": True if has_fused else None, "foreach": None}
    if config.implementation == "fused" and not has_fused:
        raise ConfigError(
            f"optim.implementation=fused, but torch has no fused {config.name} for complex parameters, nor a fused sgd "
            "for FSDP2's shards or half precision on the CPU",
            "set optim.implementation=auto",
        )
    return {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}


def parameter_groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Divide parameters into a group with weight decay and one without: norms, biases, and embeddings. Where some are
    cut over other ranks than the rest, each group is divided further.

    Parameters are in the model's order, and empty groups are left out. The group that most ranks share comes first.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        is_spared = isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower()
        for name, param in module.named_parameters(recurse=False):
            if id(param) in seen or not param.requires_grad:
                continue
            seen.add(id(param))
            no_decay = (is_spared or name.endswith("bias")) and not config.decay_norm_bias_embed
            (plain if no_decay else decayed).append(param)
    groups: list[dict[str, Any]] = []
    groups += [{"params": members, "weight_decay": config.weight_decay} for members in by_mesh(decayed)]
    spared = 0.0 if not config.decay_norm_bias_embed else config.weight_decay
    groups += [{"params": members, "weight_decay": spared} for members in by_mesh(plain)]
    # fp16's scaler looks for overflows in all gradients, and agrees about them over the ranks that hold parts of the
    # first one: that must be one of which every rank has a part.
    return sorted(groups, key=lambda group: -_n_parts(group["params"][0]))


def _n_parts(param: Any) -> int:
    """Ranks that hold different parts of a parameter."""
    placements = enumerate(getattr(param, "placements", ()))
    n: int = math.prod(param.device_mesh.size(dim) for dim, placement in placements if not placement.is_replicate())
    return n


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Divide tensors by the ranks that hold parts of them and those that hold copies: torch's operators for lists take
    tensors of one mesh."""
    groups: dict[Any, list[T]] = {}
    for tensor in tensors:
        copies = tuple(placement.is_replicate() for placement in getattr(tensor, "placements", ()))
        groups.setdefault((getattr(tensor, "device_mesh", None), copies), []).append(tensor)
    return [*groups.values()]


def lr_at(config: OptimConfig, step: int, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (1-based).

    Linear warm-up reaches the peak `lr` at step `warmup_steps` (at step 1 without warm-up); the schedule then falls to
    lr · min_lr_ratio exactly at `max_steps`.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    peak_at = max(1, config.warmup_steps)
    if config.schedule == "constant" or step <= peak_at:
        return config.lr
    floor = config.lr * config.min_lr_ratio
    progress = (step - peak_at) / (max_steps - peak_at)
    if progress >= 1:
        return floor
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return floor + (config.lr - floor) * shape
