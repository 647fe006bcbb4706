"""LoRA by peft (Hu et al. 2021) on a transformers model: frozen linear layers, each with a small product beside it.

The layers keep peft's names: `….q_proj.base_layer.weight` is frozen, `….q_proj.lora_A.default.weight` and `….lora_B.…`
are trained.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from ..config.schema import RunConfig
from ..errors import ConfigError, importing
from .hf import HFModel
from .quantized import BaseQuantizer, PackedWeight, is_packed, pack_layers

FROZEN = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""`precision.mode` → type of the frozen parameters, where it is not fp32."""
_BASE, _PARTS = ".base_layer", re.compile(r"\.lora_[AB]\.")


def base_name(fqn: str) -> str | None:
    """The name of a parameter in the model without the adapter; `None` for a parameter of the adapter."""
    return None if _PARTS.search(fqn) else fqn.replace(f"{_BASE}.", ".")


def file_name(fqn: str) -> str | None:
    """The name of a parameter in files of the model; `None` for one that no file holds as it is: the adapter's and
    packed ones."""
    return None if is_packed(fqn) else base_name(fqn)


def hf_model(config: RunConfig, task: str, attention: str | None = None, rows: int | None = None) -> HFModel:
    """The task's transformers model, with the adapter that the config asks for; `rows` (`HFModel`) go without one."""
    if config.adapter.type == "none":
        return HFModel(config.model, task, attention=attention, rows=rows)
    return AdaptedModel(config, task, attention)


class AdaptedModel(HFModel):
    """A transformers model with LoRA on some of its linear layers; all other parameters are frozen.

    With `precision.mode` bf16 or fp16 the frozen parameters have that type, because nothing updates them. With
    `model.quantize` the frozen linear layers are packed.
    """

    base_name = staticmethod(base_name)
    file_name = staticmethod(file_name)

    def __init__(self, config: RunConfig, task: str, attention: str | None = None) -> None:
        super().__init__(config.model, task, attention=attention)
        self._settings = config.adapter
        self._loads = config.model.init_from is not None
        # the type that `build` gives the frozen parameters
        self.frozen_dtype = FROZEN.get(config.precision.mode, torch.float32)
        with importing("adapter.type=lora needs peft", "pip install 'shardkit[finetune]'"):
            import peft
        self._peft: Any = peft
        quantize = config.model.quantize
        # packs the frozen linear layers; None without `model.quantize`
        self.quantizer = None if quantize is None else BaseQuantizer(self.reference, quantize)
        experts = [] if self.quantizer is None else self.quantizer.expert_weights
        names = find_targets(self.reference, config.adapter.targets, experts)
        self.targets = [name for name in names if name not in experts]  # names of the adapted linear layers
        # names of the packed weights of experts that have LoRA for each expert
        self.expert_targets = [name for name in names if name in experts]

    @property
    def settings(self) -> dict[str, Any]:
        """The adapter's settings, which must be the same in a checkpoint and the run that resumes it, whether the
        targets store transposed weights, and how the base is quantised."""
        values = self._settings.model_dump(exclude={"dropout"})
        packed = {} if self.quantizer is None else {"quantize": self.quantizer.settings.model_dump(mode="json")}
        return {**values, "fan_in_fan_out": self._transposed, **packed}

    @property
    def _transposed(self) -> bool:
        """Whether the targets are transformers' Conv1D layers, whose weights are [in, out]."""
        return bool(self.targets) and all(
            not isinstance(self.reference.get_submodule(name), nn.Linear) for name in self.targets
        )

    def build(self) -> nn.Module:
        model = super().build()
        if self.quantizer is not None:
            pack_layers(model, self.quantizer)
        settings = self._settings
        config = self._peft.LoraConfig(
            r=settings.r, lora_alpha=settings.alpha, lora_dropout=settings.dropout, use_rslora=settings.use_rslora,
            target_modules=self.targets, fan_in_fan_out=self._transposed, init_lora_weights=False,
        )  # fmt: skip
        model.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tied weights, which are never targets
            if self.targets:
                self._peft.inject_adapter_in_model(config, model)
        for name in self.expert_targets:
            weight = model.get_submodule(name)
            assert isinstance(weight, PackedWeight)
            weight.adapt(settings)
        for fqn, param in model.named_parameters():
            if base_name(fqn) is not None and param.is_floating_point() and not hasattr(param, "ds_tensor"):
                param.data = param.data.to(self.frozen_dtype)
        return model

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter: A as peft draws it, B with zeros, the base as the model's own code draws it."""
        name = base_name(fqn)
        if name is None and ".lora_A." in fqn:
            nn.init.kaiming_uniform_(full.view(-1, full.shape[-1]), a=math.sqrt(5), generator=generator)
        elif name is None or self._loads or is_packed(name):
            nn.init.zeros_(full)
        else:
            super().init_parameter(name, full, generator)

    @property
    def trained(self) -> int:
        """Number of values in the adapter, all of which are trained."""
        names = [*(f"{name}.weight" for name in self.targets), *self.expert_targets]
        shapes = [self.reference.get_parameter(name).shape for name in names]
        return self._settings.r * sum(math.prod(shape[:-2]) * (shape[-2] + shape[-1]) for shape in shapes)

    @property
    def targets_text(self) -> str:
        """What is adapted, in numbers: "64 layers and 2 weights of 8 experts each"."""
        parts = [f"{len(self.targets)} layers"] if self.targets else []
        if self.expert_targets:
            n_experts = self.reference.get_parameter(self.expert_targets[0]).shape[0]
            parts.append(f"{len(self.expert_targets)} weights of {n_experts} experts each")
        return " and ".join(parts)


def find_targets(model: nn.Module, targets: str | list[str], experts: Sequence[str] = ()) -> list[str]:
    """The names of the linear layers that `adapter.targets` selects, in the model's order, then `experts`' weights."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = [name for name, module in modules.items() if _is_linear(module) and module is not head]
    if targets == "all-linear":
        if not linear:
            raise ConfigError(f"{type(model).__name__} has no linear layers to adapt", "use a model of another type")
        _refuse_stacked_experts(model, linear, experts)
        return [*_of_one_kind(linear, modules), *experts]
    names = {
        name
        for target in ([targets] if isinstance(targets, str) else targets)
        for name in _matching(target, [*modules, *experts], [*linear, *experts], isinstance(targets, str))
    }
    for name in sorted(names - set(experts)):
        if modules[name] is head:
            raise ConfigError(
                f"adapter.targets names the output head {name}, whose weight the loss reads without its adapter",
                f"leave it out: adapter.targets=all-linear, or some of {_listed(linear)}",
            )
        if not _is_linear(modules[name]):
            raise ConfigError(
                f"adapter.targets names {name}, a {type(modules[name]).__name__}: only linear layers can be adapted",
                f"name some of {_listed(linear)}",
            )
    selected = [name for name in modules if name in names]
    return [*_of_one_kind(selected, modules), *(name for name in experts if name in names)]


def _refuse_stacked_experts(model: nn.Module, linear: list[str], adaptable: Sequence[str]) -> None:
    """Refuse `all-linear` for a model whose experts are 3-D parameters, [experts, out, in], and no linear layers.
    Convolutions hold 3-D parameters too, in torch's own modules; tokens and positions have a dimension of 1."""
    stacked = {
        f"{prefix}.{name}": param
        for prefix, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, param in module.named_parameters(recurse=False)
        if param.dim() == 3 and min(param.shape) > 1 and f"{prefix}.{name}" not in adaptable
    }
    if not stacked:
        return
    share = sum(param.numel() for param in stacked.values()) / sum(param.numel() for param in model.parameters())
    raise ConfigError(
        f"adapter.targets=all-linear would leave {share:.1%} of the parameters without an adapter: experts that are "
        f"3-D parameters and no linear layers ({_listed(list(stacked))})",
        f"name the layers to adapt, such as adapter.targets=[{_listed(linear)}], and the experts stay frozen; experts "
        "that model.quantize={bits: 4, experts: true} packs are adapted one by one",
    )


def _of_one_kind(names: list[str], modules: dict[str, nn.Module]) -> list[str]:
    """The names, if their layers all store weights the same way."""
    transposed = {name: not isinstance(modules[name], nn.Linear) for name in names}
    if len(set(transposed.values())) > 1:
        ends = {kind: _listed([n for n in names if transposed[n] is kind]) for kind in (False, True)}
        raise ConfigError(
            f"adapter.targets names layers that store [out, in] ({ends[False]}) and [in, out] ({ends[True]})",
            "adapt layers of one type",
        )
    return names


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _matching(target: str, modules: Sequence[str], linear: Sequence[str], is_pattern: bool) -> list[str]:
    """The modules that a target selects by peft's rules: as a regular expression for full names, or as names' ends."""
    if is_pattern:
        try:
            matches = [name for name in modules if re.fullmatch(target, name)]
        except re.error as error:
            raise ConfigError(
                f"adapter.targets={target} is not a regular expression: {error}",
                "write a list of names, such as 'adapter.targets=[q_proj, v_proj]'",
            ) from error
    else:
        matches = [name for name in modules if name == target or name.endswith(f".{target}")]
    if matches:
        return matches
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    near = get_close_matches(target.rpartition(".")[2], ends, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(near)}?" if near else f"name some of {_listed(linear)}"
    if target in ends:
        fix = f"write a list: adapter.targets=[{target}]; one text alone is a regular expression for whole names"
    raise ConfigError(f"adapter.targets: {target} matches no layer of the model", fix)


def _listed(linear: Sequence[str]) -> str:
    return ", ".join(list(dict.fromkeys(name.rpartition(".")[2] for name in linear))[:10])
