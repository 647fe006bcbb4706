"""Write model folders whose weights take no space on the disk: files with holes in place of the numbers.

A program loads such a folder as it loads the real one: names, shapes, types and sizes are right, and every number is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...config.schema import RunConfig
from ...errors import ConfigError
from ...parallel.compat import from_config
from ...parallel.weights import parameters_on_meta
from ...tasks.load import model_config
from ..native.reader import TensorSpec
from .folder import TOKENIZER, copy_tokenizer, write_configs
from .hub_names import ties_of
from .targets import DTYPES, ModelFacts, as_published, exported, leave_hole, parse_size, write_safetensors
from .tensor_source import Source


@dataclass(frozen=True)
class PretendedWeights:
    """A folder of weights that are holes."""

    class_name: str  # the class of transformers that loads the folder
    n_parameters: int  # numbers by name
    n_bytes: int  # their bytes, of which none is on the disk
    notes: list[str]  # one line on each tensor that differs from a published folder's


def write_pretended_weights(described_by: Path, folder: Path, dtype: str | None = None) -> PretendedWeights:
    """Write a model folder for transformers from a config alone.

    `described_by`: a `config.json`, or a folder that holds one; its tokenizer is copied, if it has one. `folder`: the
    folder to write, new or empty. `dtype`: fp32, bf16 or fp16; None for the type that the config names, and bf16 where
    it names none.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already", "name a folder that does not exist")
    config = RunConfig.model_validate({
        "task": {"name": "hf_causal_lm"}, "model": {"hf_config": str(described_by)},
    })  # fmt: skip
    try:
        described = model_config(config)
    except ConfigError as error:  # the key is not the user's word here
        raise ConfigError(error.cause.replace("model.hf_config=", ""), error.fix) from None
    named = getattr(described, "dtype", None)
    default = next((candidate for candidate in DTYPES.values() if candidate == named), torch.bfloat16)
    written_dtype = DTYPES[dtype] if dtype else default
    model_class = _class_of(described, described_by)
    with parameters_on_meta():
        model: Any = from_config(model_class, described)
    facts = ModelFacts(pretrained=model)
    weights, notes = as_published(exported(_source(model, described_by), written_dtype, facts), facts)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(weights, folder, parse_size("5GB"), leave_hole)
    write_configs(model, None, folder, written_dtype)
    tokenizer = config.model.described_by.parent  # type: ignore[union-attr]
    if any((tokenizer / name).is_file() for name in TOKENIZER):
        data = config.data.model_copy(update={"tokenizer": str(tokenizer)})
        copy_tokenizer(config.model_copy(update={"data": data}), folder)
    n_parameters = sum(math.prod(spec.shape) for spec in weights.tensors.values())
    return PretendedWeights(type(model).__name__, n_parameters, weights.n_bytes, notes)


def _class_of(described: Any, described_by: Path) -> Any:
    """The class that the config names, else transformers' causal language model of its type."""
    import transformers

    names = getattr(described, "architectures", None) or []
    if not names:
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(described), None)
        cause = f"{described_by} names no architectures, and {described.model_type} has no causal language model"
        fix = 'add the class that loads it, such as "architectures": ["ViTForImageClassification"]'
    else:
        model_class = getattr(transformers, names[0], None)
        cause = f"{described_by}: transformers {transformers.__version__} has no {names[0]}"
        fix = "install a release of transformers that has it; code that comes with a model is not run"
    if model_class is None:
        raise ConfigError(cause, fix)
    return model_class


def _source(model: torch.nn.Module, described_by: Path) -> Source:
    """The model's parameters and saved buffers by name, without numbers."""
    saved = model.state_dict()
    tensors = {f"model.{name}": param for name, param in model.named_parameters()}
    tensors |= {f"buffer.{name}": saved[name] for name, _ in model.named_buffers() if name in saved}
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    # Nothing reads it: the weights are written as holes.
    return Source("transformers", described_by, specs, lambda name, start, out: None, lambda: None, ties=ties_of(model))
