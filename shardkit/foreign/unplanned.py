"""Keys of other tools that change memory and that no plan here models: a plan that has one is no verdict.

The keys are known by name, in any file and section: scripts read arguments of their own beside the Trainer's, and
releases move keys from one section to another.
"""

from __future__ import annotations

import re
from typing import Any

_OFF = ("", "none", "null", "no", "false", "off", "0")
_SIZE = re.compile(r".*(?:_size|_degree|tensor_parallel)")
_TENSOR = "tensor parallelism divides each layer's weights and activations over ranks"
_TOKENS = "the tokens of a sample, and so the activations, are divided over ranks"
_QUANTISED = "the model's weights are stored in fewer bits"
_SECTION = r"(?:^|.*\.)"
_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        rf"{_SECTION}(?:parallelism_config_)?(?:tp_size|tp_degree|autotp_size|tensor_parallel(?:_size|_degree)?"
        r"|tensor_model_parallel_size|tp_plan)",
        _TENSOR,
    ),
    (
        rf"{_SECTION}(?:parallelism_config_)?(?:cp_size|sp_size|context_parallel_(?:size|degree)"
        r"|sequence_parallel_(?:size|degree)|ulysses_(?:size|degree|sequence_parallel_size))",
        _TOKENS,
    ),
    (
        rf"{_SECTION}(?:parallelism_config_)?(?:ep_size|autoep_size|expert_parallel_(?:size|degree)"
        r"|expert_model_parallel_size|expert_tensor_parallel_size)|expert_parallel\.enabled",
        "the experts are divided over ranks",
    ),
    (
        rf"{_SECTION}(?:parallelism_config_)?(?:pp_size|pipeline_(?:model_)?parallel_(?:size|degree))",
        "the layers are divided over ranks",
    ),
    (r"parallelism_config\.dp_replicate_size", "groups of ranks each hold all the shards"),
    (rf"{_SECTION}_?load_in_(?:4|8)bit", _QUANTISED),
    (rf"{_SECTION}quantization_config(?:\.(?:quant_method|bits|quant_type))?", _QUANTISED),
    (r"quantization_(?!config\b)\w+", _QUANTISED),
    (
        r"zero_optimization\.(?:zero_quantized_\w+)|weight_quantization\.(?:.*\.)?enabled",
        "weights or gradients are quantised for communication, with buffers of their own",
    ),
    (r"zero_optimization\.zenflow\..*", "ZenFlow splits the update between device and host"),
    (r"zero_optimization\.leaf_module\..*", "the named modules are gathered whole, with everything in them"),
    (
        r"zero_optimization\.offload_optimizer\.super_offload",
        "the optimizer's state moves to the host in another order",
    ),
    (r"torch_autocast\.enabled", "weights stay in fp32, and forward runs under torch's autocast"),
    (r"compile\.deepcompile", "DeepCompile gathers and frees parameters in an order of its own"),
    (r"hybrid_engine\.enabled", "the model is kept for generation too"),
    (r"(?:bf16|fp16)\.\w+_master_weights_and_grads", "master weights and gradients are kept in 16 bits"),
    (r"use_liger_kernel", "Liger's kernels keep fewer activations, and no logits"),
)


def effect_of(key: str, value: Any) -> str:
    """What an active key does to memory that no plan here has.

    Args:
        key: dotted, as in the tool's file.
        value: switches, sizes and names; sizes of 1 and values that switch a key off have no effect. A switch may be
            on by the number 1, and other numbers may be fractions.

    Returns:
        A clause for a message, or "" if the plan holds.
    """
    if is_off(key, value) or (key.endswith(".quant_method") and value == "bitsandbytes"):
        return ""
    return next((effect for pattern, effect in _PATTERNS if re.fullmatch(pattern, key)), "")


def is_off(key: str, value: Any) -> bool:
    """Whether a value switches its key off, or divides nothing where the key is a size."""
    if _SIZE.fullmatch(key) and value in (1, -1, "1", "-1"):  # one part, or as many as the tool chooses
        return True
    return value.lower() in _OFF if isinstance(value, str) else not value
