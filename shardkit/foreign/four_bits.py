"""A base in 4 bits, as axolotl 0.18 and LLaMA-Factory 0.9.6 load one with bitsandbytes: planned where it is known.

Both hold the packed base whole on every rank, in one process, under DDP and under ZeRO-1 and 2, and leave the output
head, tied weights and everything that is no linear layer in the type of `precision.mode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config.strategy import SHARDING
from .tables import Settings
from .together import FileKey, Together

SECTION = "model.quantize."
_SIZES = ("hidden_size", "intermediate_size", "n_embd", "d_model", "ffn_dim", "n_inner", "ffn_hidden_size")
_BLOCK = 64
_CONV1D = ("gpt2", "openai-gpt")


def settle(job: Together, halves: Sequence[str], stored: str) -> Settings:
    """Complete the settings of a base in 4 bits, or make its key one that is not planned.

    Args:
        halves: `fp16` and `bf16`, as far as they are on.
        stored: the type in which the tool loads the weights.

    Returns:
        Settings that no file has; empty if the base is not in 4 bits.
    """
    if f"{SECTION}bits" in job.settings:
        reason = _not_planned(job, halves, stored)
        if not reason:
            added = {f"{SECTION}double": True, f"{SECTION}type": "nf4"}
            added = {key: choice for key, choice in added.items() if key not in job.settings}
            job.settings |= added
            return added
        job.file_keys = [_named(file_key, reason) for file_key in job.file_keys]
    for key in [key for key in job.settings if key.startswith(SECTION)]:
        del job.settings[key]
    return {}


def bnb_layers(settings: Settings) -> Settings:
    """The loop's trait that belongs to a base in 4 bits."""
    return {"bnb_layers": True} if f"{SECTION}bits" in settings else {}


def _named(file_key: FileKey, reason: str) -> FileKey:
    """The key as one that is not planned if it is the switch; as one without counterpart if it belongs to it."""
    if not any(setting.startswith(SECTION) for setting in file_key.settings):
        return file_key
    if f"{SECTION}bits" in file_key.settings:
        return replace(file_key, fate="unplanned", settings={}, note=reason)
    return replace(file_key, fate="absent", settings={})


def _not_planned(job: Together, halves: Sequence[str], stored: str) -> str:
    """Why the plan here would not be that of the tool; empty if it would."""
    settings = job.settings | job.command_line
    compute = {"bf16": "bfloat16", "fp16": "float16"}.get(halves[0] if halves else "", "float32")
    if not job.adapted:
        return "weights in 4 bits have no gradient, and no adapter is trained over them"
    if job.recipe == "axolotl" and job.value("axolotl", "adapter") != "qlora":
        return "axolotl packs weights with adapter: qlora alone"
    if SHARDING[settings["parallel.strategy"]].parameters:
        return "tools copy or shard packed weights under FSDP and ZeRO-3 as no plan here does"
    if len(halves) > 1 or stored != compute:
        return f"the weights are loaded in {stored or 'an unknown type'}, and forward runs in {compute}"
    if settings.get("compile.enabled"):
        return "compiled layers in 4 bits keep other memory"
    return _unlike(job.model)


def _unlike(model: dict[str, Any]) -> str:
    """Why bitsandbytes packs other layers of a model than shardkit does; empty if no number of its config says so."""
    if any("expert" in key and isinstance(size, int) and size > 1 for key, size in model.items()):
        return "routers and experts are packed otherwise than in a plan here"
    if model.get("model_type") in _CONV1D:
        return "its layers of type Conv1D are packed, which no plan here has"
    sizes = {key: model[key] for key in _SIZES if isinstance(model.get(key), int)}
    uneven = next((key for key, size in sizes.items() if size % _BLOCK), "")
    return (
        f"blocks of {_BLOCK} weights cross the rows of {uneven}={sizes[uneven]}, which no plan here has"
        if uneven
        else ""
    )
