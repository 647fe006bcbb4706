"""Build transformers models from a config, and draw each parameter's random weights as the model's own code does.

A model is built twice. The reference has its parameters on the meta device and real buffers: it answers questions about
the architecture, and `init_parameter` runs the rules of its modules. The model to train is built in its engine's own
context.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.presets import task_of
from ..config.schema import ModelConfig, QuantizeConfig
from ..errors import ConfigError, importing
from ..parallel.compat import from_config, init_weights_of, is_persistent, ties_only
from ..parallel.weights import parameters_on_meta


@torch.no_grad()
def init_as_the_model_does(model: nn.Module, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    """Fill `full` as the model's `_init_weights` fills the parameter `fqn`, from the generator's state alone.

    transformers calls `_init_weights(module)` for every module, children first, and a parent's call may overwrite a
    child's result (GPT-2's residual projections). So this function calls it for the parameter's module and for each
    module around it. Only this parameter is real in them: on parameters on meta, `_init_weights` draws nothing.
    """
    from transformers import PreTrainedModel

    path = fqn.split(".")
    around = [model.get_submodule(".".join(path[:end])) for end in range(len(path))]
    owner, name = around[-1], path[-1]
    placeholder = getattr(owner, name)
    setattr(owner, name, nn.Parameter(full, requires_grad=False))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(generator.get_state())
            for depth in reversed(range(len(around))):
                # Each part of a composite model has its own rule: that of the innermost transformers model.
                models = (module for module in reversed(around[: depth + 1]) if isinstance(module, PreTrainedModel))
                init_weights_of(next(models), around[depth])
    finally:
        setattr(owner, name, placeholder)


MAPPINGS = {
    "hf_causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "hf_masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "super_resolution": "MODEL_FOR_IMAGE_TO_IMAGE_MAPPING",
}
"""Task name → the table in transformers that maps a config's class to its model's class."""


class HFModel:
    """A transformers architecture for one task, as `model.preset`, `model.hf_config` and `model.hf` describe it.

    `attention`: a name in transformers' table of attention functions; None = transformers chooses. `rows`: least number
    of embedding rows (`model.resize_embeddings`); None = as many as the config says.
    """

    def __init__(
        self, model: ModelConfig, task: str, attention: str | None = None, rows: int | None = None, **defaults: Any
    ) -> None:
        self._options = {} if attention is None else {"attn_implementation": attention}
        transformers = import_transformers(task)
        self.config = read_config(transformers, model, defaults)
        if rows is not None and hasattr(self.config, "vocab_size"):
            self.config.vocab_size = max(rows, self.config.vocab_size)
        _refuse_special_ids(self.config, model)
        mapping = getattr(transformers, MAPPINGS[task])
        try:
            self._class = mapping[type(self.config)]
        except KeyError:
            model_types = sorted({key.model_type for key in mapping})
            close = get_close_matches(self.config.model_type, model_types, n=3)
            fix = f"set model.hf.model_type to one that has, for example {', '.join(close or model_types[:5])}"
            if model.preset is not None:
                fix = f"set task.name={task_of(model.preset)}, which model.preset={model.preset} is made for"
            raise ConfigError(
                f"model_type={self.config.model_type} has no model for task.name={task} in transformers", fix
            ) from None
        # with `rows`, the names of the parameters that have a row for each id; otherwise empty
        self.resized = frozenset() if rows is None else self._parameters_with_rows()

    def _parameters_with_rows(self) -> frozenset[str]:
        """Names of the parameters with a row for each token id, found by building the model with one id more."""
        larger = deepcopy(self.config)
        if hasattr(larger, "vocab_size"):
            larger.vocab_size += 1
        with parameters_on_meta():
            enlarged = from_config(self._class, larger, **self._options)
        before, after = _shapes(self.reference), _shapes(enlarged)
        changed = {name for name, shape in after.items() if shape != before.get(name)}
        as_rows = before.keys() == after.keys() and all(
            (before[name][:1], after[name]) == ((larger.vocab_size - 1,), (larger.vocab_size, *before[name][1:]))
            for name in changed
        )
        if not as_rows or not _ends_of(self.reference) <= changed:
            raise ConfigError(
                f"model.resize_embeddings=true: the embeddings of {self._class.__name__} cannot be resized, because "
                "not all of them have one row for each id of vocab_size",
                "use a tokenizer whose ids fit, or another model",
            )
        return frozenset(changed)

    @cached_property
    def reference(self) -> nn.Module:
        """The model with parameters on meta, and with buffers as its constructor and its init rule set them."""
        with parameters_on_meta():
            return self._construct()

    def build(self) -> nn.Module:
        """Build the model in the caller's context, with the reference's buffers."""
        with ties_only():
            model = self._construct()
        fixed: list[tuple[nn.Module, str, torch.Tensor]] = []
        for name, buffer in self.reference.named_buffers(remove_duplicate=False):
            prefix, _, key = name.rpartition(".")
            module = model.get_submodule(prefix)
            setattr(module, key, buffer.clone())  # an engine's context may have cast it
            if not is_persistent(module, key) and buffer.is_floating_point():
                fixed.append((module, key, buffer))
        if fixed:
            model.register_forward_pre_hook(partial(_restore, fixed))
        return model

    def _construct(self) -> nn.Module:
        return from_config(self._class, self.config, **self._options)

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        """Fill `full` with the initial values of the parameter `fqn`, drawn as the model's own code draws them."""
        init_as_the_model_does(self.reference, fqn, full, generator)

    @cached_property
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        """The types of the layers to which transformers itself applies activation checkpointing."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        classes = {type(m): None for m in self.reference.modules() if isinstance(m, GradientCheckpointingLayer)}
        return tuple(classes)


def _ends_of(model: Any) -> set[str]:
    """Names of the weights of the input embedding and of the output head. The set holds an empty name, which no
    parameter has, if the model does not say which modules these are."""
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    try:
        ends = [model.get_input_embeddings(), model.get_output_embeddings() or model.get_input_embeddings()]
    except NotImplementedError:
        ends = [None]
    return {names.get(id(getattr(module, "weight", None)), "") for module in ends}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def import_transformers(needed_by: str) -> Any:
    """Import transformers for a task and return it, with its warnings off."""
    with importing(f"task.name={needed_by} needs transformers", "pip install shardkit[hf]"):
        import transformers
    transformers.logging.set_verbosity_error()
    return transformers


_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
"""Sizes that most configs of transformers have; transformers does not check that they are positive."""


def read_config(transformers: Any, model: ModelConfig, defaults: dict[str, Any]) -> Any:
    """The model's transformers config: `defaults`, overridden by the model's config file, overridden by `model.hf`."""
    keys = {**defaults, **_file_keys(model), **model.hf}
    model_type = keys.pop("model_type", None)
    config_classes = transformers.CONFIG_MAPPING
    if model_type is None and model.init_from is not None and not Path(model.init_from).expanduser().exists():
        cause = f"model.init_from={model.init_from} does not exist"
        raise ConfigError(cause, "name a folder of transformers, a run or a checkpoint")
    if model_type is None:
        raise ConfigError(
            "model.hf has no model_type, and neither model.hf_config nor model.init_from names a config.json",
            "set model.preset (gpt2, bert-base, vit-b, swin2sr, …), model.hf.model_type, or model.hf_config",
        )
    if model_type not in config_classes and "auto_map" in keys:
        raise ConfigError(
            f"model_type={model_type} is not a model of transformers {transformers.__version__}: its code is in its "
            "own folder (auto_map), and is never run",
            "give a model of transformers, or write a task of your own that builds it (task.name=package.module:Class)",
        )
    if model_type not in config_classes:
        close = get_close_matches(str(model_type), list(config_classes), n=3)
        raise ConfigError(
            f"model.hf.model_type={model_type} is not a model of transformers {transformers.__version__}",
            f"did you mean {' or '.join(close)}?" if close else "see the model types in transformers' documentation",
        )
    _refuse_unknown(config_classes[model_type], model_type, model.hf)
    try:
        config = config_classes[model_type](**keys)
    except Exception as error:  # transformers' validators raise anything
        raise ConfigError(
            f"transformers refuses the {model_type} config: {' '.join(str(error).split())}",
            "change the keys of model.hf that it names",
        ) from error
    for size in _SIZES:
        value = getattr(config, size, None)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"the {model_type} config has {size}={value}", f"set model.hf.{size} to 1 or more")
    if hasattr(config, "use_cache"):
        config.use_cache = False  # the cache is for generation, and would hold every layer's keys and values
    return config


def _file_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of the config.json that describes the model, without those that name kernels; empty without a file."""
    file = model.described_by
    if file is None:
        return {}
    named = f"model.hf_config={model.hf_config}" if model.hf_config is not None else str(file)
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for, and a device has no end
            raise ValueError("not a regular file")
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{named} cannot be read: {error}",
            "name a transformers config.json, or the directory that holds one; nothing is downloaded",
        ) from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{named} is not a mapping of keys", "name a transformers config.json")
    if "quantization_config" in keys:
        _check_stored(named, keys.pop("quantization_config"), model.quantize)
    return _without_kernels(keys)


def _check_stored(named: str, stored: Any, quantize: QuantizeConfig | None) -> None:
    """Refuse a folder of quantised weights, unless `model.quantize` says how bitsandbytes has packed them in 4 bits."""
    stored = stored if isinstance(stored, dict) else {}
    method = stored.get("quant_method")
    if method != "bitsandbytes" or stored.get("load_in_4bit") is not True:
        raise ConfigError(
            f"{named} is of a quantised model{f' ({method})' if isinstance(method, str) else ''}, whose weights cannot "
            "be trained or packed again",
            "use the 16-bit model it was made from; with an adapter, model.quantize={bits: 4} packs its weights",
        )
    kind = "nf4" if stored.get("bnb_4bit_quant_type") == "nf4" else "fp4"
    double = stored.get("bnb_4bit_use_double_quant") is True
    if quantize is None or (quantize.type, quantize.double) != (kind, double):
        raise ConfigError(
            f"{named} is of a model that bitsandbytes has packed in 4 bits ({kind}{', double' if double else ''}), and "
            + ("model.quantize is not set" if quantize is None else "model.quantize says otherwise"),
            f"set adapter.type=lora 'model.quantize={{bits: 4, type: {kind}, double: {str(double).lower()}}}'",
        )


_KERNEL_KEY = re.compile(r"_?\w*_implementation(_internal)?|checkpoint_path")
"""Keys whose value may name a repository of compiled kernels, which transformers would download and import, or a pickle
that timm would load. They affect how a model is computed, not what it computes: a stranger's file loses nothing
without them."""


def _without_kernels(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config, and of the configs nested in it, without those that can name kernels."""
    return {
        key: _without_kernels(value) if isinstance(value, dict) else value
        for key, value in keys.items()
        if not _KERNEL_KEY.fullmatch(key)
    }


def _refuse_special_ids(config: Any, model: ModelConfig) -> None:
    """Refuse a special token, set by the config file or the user, whose id is outside the vocabulary."""
    vocab_size = getattr(config, "vocab_size", None)
    keys = {**_file_keys(model), **model.hf}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = keys.get(key)
        for token_id in ids if isinstance(ids, list) else [ids]:
            if isinstance(token_id, int) and vocab_size is not None and token_id >= vocab_size:
                raise ConfigError(
                    f"{key}={token_id} of the model's config is outside its vocabulary of {vocab_size} tokens",
                    f"set model.hf.{key} below {vocab_size}, or a larger model.hf.vocab_size",
                )


def _refuse_unknown(config_class: Any, model_type: str, user_keys: dict[str, Any]) -> None:
    """Refuse keys that load code, and those that the config class does not have, which transformers would ignore."""
    if _without_kernels(user_keys) != user_keys:
        raise ConfigError(
            "model.hf names code or a file to load (…_implementation or checkpoint_path)",
            "remove that key; model.init_from names weights",
        )
    defaults = config_class()
    names = {*defaults.to_dict(), *config_class.attribute_map, *(n for n in dir(defaults) if not n.startswith("_"))}
    for key in user_keys:
        if key != "model_type" and key not in names:
            close = get_close_matches(key, names, n=1)
            raise ConfigError(
                f"unknown key model.hf.{key} for model_type={model_type}",
                f"did you mean model.hf.{close[0]}?" if close else f"see the config of {model_type} in transformers",
            )


def _restore(fixed: list[tuple[nn.Module, str, torch.Tensor]], *_: Any) -> None:
    """Restore computed buffers that an engine has cast: with rotary frequencies in bf16, positions are off by turns."""
    for module, key, buffer in fixed:
        current = getattr(module, key)
        if current.dtype != buffer.dtype:
            setattr(module, key, buffer.to(current.device))


# Architectures in which each token meets every matrix of a block once, and each layer attends to the whole sequence.
_PLAIN = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "olmo2"})


def hf_flops_per_token(model: nn.Module, seq_len: float, adapter: int | None = None) -> float | None:
    """Training FLOPs per token of a transformers causal LM: 6 N_matmul + 12 L (heads × head width) T.

    `adapter`: number of values of an adapter, if there is one. The frozen model then needs no gradients of its weights:
    4 N_matmul, and 6 for each of the adapter's values. Returns None if the formula does not fit: experts (a token meets
    few of them), state spaces, sliding windows.
    """
    config: Any = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if config.model_type not in _PLAIN or layer_types != {"full_attention"} or (window and window < seq_len):
        return None
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(head.weight)}
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention: float = 12.0 * config.num_hidden_layers * config.num_attention_heads * width * seq_len
    frozen_share = 6.0 if adapter is None else 4.0
    return frozen_share * float(matrices + head.weight.numel()) + 6.0 * (adapter or 0) + attention
