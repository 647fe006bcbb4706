"""What works with what: one table, strategy × feature, read by the config check, docs/capability.md and the tests.

`python -m shardkit.config.capability` prints the table as markdown, `--write docs/capability.md` puts it
between that page's markers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from .ignored import IGNORED
from .presets import task_of
from .schema import ParallelConfig, RunConfig, StrategyName

Support = Literal[True] | str
"""True, or the reason why not."""

STRATEGIES: tuple[StrategyName, ...] = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
ZERO = ("zero1", "zero2", "zero3")
MARKERS = ("<!-- capability:begin -->", "<!-- capability:end -->")

_WHOLE = "parameters are whole on every rank: there is nothing to gather or free"
_PARAMS_STAY = "whole parameters stay on the device: use fsdp or zero3"
_PARTITIONED = "gradients are partitioned as they are produced, so each micro-batch has to reduce"
_ONE_RANK = "a single rank has nobody to exchange gradients with"
_NO_ENGINE = "only ZeRO has an engine that reads it: use zero1, zero2 or zero3"
_OPTIMIZER_WITH_PARAMS = "FSDP2 keeps the optimizer where the shards are: set parallel.offload_param=cpu too"
_NO_CPU_STEP = "only ZeRO updates on the CPU: use zero2, which works on one GPU too"
_NVME = "only ZeRO-3 swaps state to a disk: use zero3"
_ENGINE_CASTS = "DeepSpeed's engine casts the model itself, and fp8 layers would be cast with it: use fsdp"
_FLAT = "ZeRO updates flat pieces of parameters, and this optimizer needs whole matrices: use ddp or single"
_ROWS = "FSDP2 shards rows, and this optimizer keeps one number per row and column: use ddp or single"
_BLOCKS = "256 elements of its states share a scale; row shards would split such a group: use ddp"
_EIGHT_BIT = "ZeRO keeps its own flat fp32 states: use ddp, or zero2 with offload"
_ALL_AT_ONCE = "gradients are reduced over ranks before they are used: only single updates in backward"
_ZERO3_ONLY = "only ZeRO-3 has it"
_FSDP_ONLY = "only FSDP2 gathers block by block: use fsdp or hsdp"
_AUTOCAST = "its forward always runs under autocast: remove the key"
_LEFT_ALONE = "it already skips parameters without a gradient: remove the key"
_IN_BUCKETS = "ZeRO lets ranks leave out members of lists by itself, and no other parameters: remove the key or use ddp"
_HOOKS_INSIDE = "hooks gather weights in the middle of the model's forward, and each would break its graph"
_HSDP_ONLY = "only hsdp has a two-dimensional mesh"


def _row(**refused: str) -> dict[StrategyName, Support]:
    """Everything works except on the named strategies; `zero`, `zero12`, `zero23` and `fsdps` name several."""
    groups = {"zero": ZERO, "zero12": ("zero1", "zero2"), "zero23": ("zero2", "zero3"), "fsdps": ("fsdp", "hsdp")}
    reasons = {name: reason for key, reason in refused.items() for name in groups.get(key, (key,))}
    return {name: reasons.get(name, True) for name in STRATEGIES}


CAPABILITIES: dict[str, dict[StrategyName, Support]] = {
    "data_parallel": _row(single="it is one process: use ddp, fsdp, hsdp or a ZeRO stage"),
    "mesh": _row(single=_HSDP_ONLY, ddp=_HSDP_ONLY, fsdp=_HSDP_ONLY, zero=_HSDP_ONLY),
    "no_sync": _row(single=_ONE_RANK, zero23=_PARTITIONED),
    "keep_gathered": _row(
        single=_WHOLE,
        ddp=_WHOLE,
        zero12=_WHOLE,
        zero3="set parallel.ds_config.zero_optimization.stage3_max_reuse_distance instead",
    ),
    "bucket_mb": _row(single=_ONE_RANK, fsdps="FSDP2 reduces one block at a time"),
    "offload_optimizer": _row(single=_NO_CPU_STEP, ddp=_NO_CPU_STEP, fsdps=_OPTIMIZER_WITH_PARAMS),
    "offload_param": _row(single=_PARAMS_STAY, ddp=_PARAMS_STAY, zero12=_PARAMS_STAY),
    "nvme": _row(single=_NVME, ddp=_NVME, fsdps=_NVME, zero12=_NVME),
    "ds_config": _row(single=_NO_ENGINE, ddp=_NO_ENGINE, fsdps=_NO_ENGINE),
    "bf16": _row(),
    "autocast": _row(single=_AUTOCAST, ddp=_AUTOCAST),
    "reduce_dtype": _row(single=_ONE_RANK),
    "find_unused": _row(single=_LEFT_ALONE, fsdps=_LEFT_ALONE, zero=_IN_BUCKETS),
    "prefetch": _row(single=_FSDP_ONLY, ddp=_FSDP_ONLY, zero=_FSDP_ONLY),
    "hpz": _row(single=_ZERO3_ONLY, ddp=_ZERO3_ONLY, fsdps=_ZERO3_ONLY, zero12=_ZERO3_ONLY),
    "offload_ratio": _row(single=_ZERO3_ONLY, ddp=_ZERO3_ONLY, fsdps=_ZERO3_ONLY, zero12=_ZERO3_ONLY),
    "adafactor": _row(fsdps=_ROWS, zero=_FLAT),
    "muon": _row(zero=_FLAT),
    "adamw8bit": _row(fsdps=_BLOCKS, zero=_EIGHT_BIT),
    "in_backward": _row(ddp=_ALL_AT_ONCE, fsdps=_ALL_AT_ONCE, zero=_ALL_AT_ONCE),
    "ema": _row(),
    "fp16": _row(),
    "fp8": _row(zero=_ENGINE_CASTS),
    "pure_bf16": _row(),
    "tf32": _row(),
    "activation_checkpointing": _row(),
    "activation_offload": _row(),
    "compile": _row(),
    "compile_model": _row(fsdps=_HOOKS_INSIDE, zero3=_HOOKS_INSIDE),
    "tied_weights": _row(),
    "frozen_params": _row(),
    "adapter": _row(),
    "resize_embeddings": _row(),
    "unused_params": _row(
        ddp="DDP waits for a gradient of every parameter, unless `find_unused` is set",
        zero="it would still decay them and count them in its norm",
    ),
    "sync_batchnorm": _row(),
    "buffers": _row(),
}

DESCRIPTIONS: dict[str, str] = {
    "data_parallel": "more than one rank",
    "mesh": "replicate × shard mesh (`dp_replicate`, `dp_shard`)",
    "no_sync": "reduce gradients once per step (`no_sync`)",
    "keep_gathered": "keep parameters gathered until backward (`reshard_after_forward: false`)",
    "bucket_mb": "gradient bucket size (`bucket_mb`)",
    "offload_optimizer": "optimizer state on the CPU, parameters on the GPU (`offload_optimizer: cpu`)",
    "offload_param": "parameters on the CPU too (`offload_param: cpu`)",
    "nvme": "optimizer state or parameters on a local disk (`nvme`)",
    "ds_config": "raw DeepSpeed keys (`ds_config`)",
    "bf16": "bf16",
    "fp16": "fp16 with dynamic loss scaling (CUDA only)",
    "fp8": "fp8 linear layers (torchao, CUDA sm89 or newer)",
    "pure_bf16": "weights, gradients and optimizer states all bf16 (`pure_bf16`)",
    "autocast": "forward under autocast too, for models that mix types (`autocast`)",
    "reduce_dtype": "type in which gradients travel (`reduce_dtype`)",
    "find_unused": "any parameter may be left out of a step (`find_unused: true`)",
    "prefetch": "gather further ahead (`prefetch`)",
    "hpz": "second copy of the weights inside a node (`hpz`, CUDA only)",
    "offload_ratio": "offload a share of the optimizer states (`offload_ratio`)",
    "adafactor": "Adafactor",
    "muon": "Muon",
    "adamw8bit": "8-bit AdamW (torchao)",
    "in_backward": "optimizer in backward (`in_backward`)",
    "ema": "moving average of the weights (`ema_decay`)",
    "tf32": "tf32 (CUDA only)",
    "activation_checkpointing": "activation checkpointing, every policy",
    "activation_offload": "activations in host memory (`activation.offload: cpu`)",
    "compile": "torch.compile per block",
    "compile_model": "torch.compile of the whole model (`compile.scope: model`)",
    "tied_weights": "tied weights",
    "frozen_params": "frozen parameters",
    "adapter": "LoRA adapters over a frozen model (`adapter.type: lora`)",
    "resize_embeddings": "embedding rows for a tokenizer's new ids (`model.resize_embeddings`)",
    "unused_params": "parameters that the loss does not use, not frozen",
    "sync_batchnorm": "batch-norm statistics over all ranks (`sync_batchnorm`)",
    "buffers": "computed buffers that are not saved (rotary frequencies)",
}

CUDA_ONLY: dict[str, str] = {
    "fp16": "fp16 needs a GPU: use bf16 or fp32",
    "fp8": "fp8 matrix products need an NVIDIA GPU of compute capability 8.9 or newer: use bf16",
    "tf32": "tf32 is a mode of NVIDIA's matrix units: use fp32",
}


def check(config: RunConfig, *, device: str, world_size: int, local_world_size: int) -> None:
    """Refuse settings that the strategy, the device or the world size does not support, or that would do nothing.

    A key counts as set if it differs from its default, so a resolved config, which spells out every key, passes.

    Args:
        device: "cpu" or "cuda".

    Raises:
        ConfigError: a setting is refused; the message names it, the reason and the fix.
    """
    strategy = config.parallel.strategy
    for feature, setting, fix in _asked(config, world_size):
        reason = CAPABILITIES[feature][strategy]
        if reason is not True:
            raise ConfigError(f"{setting} does not work with parallel.strategy={strategy}: {reason}", fix)
    _refuse_combinations(config, device)
    mesh_shape(config, world_size, local_world_size)
    _refuse_ignored(config)
    _refuse_missing_libraries(config)


def _refuse_combinations(config: RunConfig, device: str) -> None:
    """Refuse pairs of settings that an engine, or the CPU, cannot train together."""
    strategy = config.parallel.strategy
    mode = config.precision.mode
    if device != "cuda" and mode in CUDA_ONLY:
        raise ConfigError(
            f"precision.mode={mode}, but the run is on the CPU: {CUDA_ONLY[mode]}", _without("precision.mode")
        )
    if device != "cuda" and config.memory.cap is not None and config.compile.enabled:
        raise ConfigError(
            f"memory.cap={config.memory.cap} with compile.enabled=true on the CPU: tensors are counted operator by "
            "operator, and compiled code shows none",
            "remove memory.cap, or set compile.enabled=false",
        )
    if config.parallel.offload_ratio != 1 and config.optim.name != "adamw":
        raise ConfigError(
            f"parallel.offload_ratio={config.parallel.offload_ratio:g} with optim.name={config.optim.name}: DeepSpeed "
            "updates a share on each side with its own AdamW only",
            "set optim.name=adamw, or remove parallel.offload_ratio",
        )
    offloaded = strategy in ZERO and config.parallel.offload_optimizer != "none"
    if offloaded and mode == "pure_bf16" and config.optim.name != "adamw":
        raise ConfigError(
            f"precision.mode=pure_bf16 with parallel.offload_optimizer={config.parallel.offload_optimizer} and "
            f"optim.name={config.optim.name}: DeepSpeed keeps bf16 masters on the CPU for its own AdamW only",
            "set optim.name=adamw, or precision.mode=bf16",
        )
    if strategy in ("fsdp", "hsdp") and config.parallel.offload_param == "cpu" and mode == "fp16":
        # GradScaler and fused optimizers (torch 2.9 to 2.13) copy the scale without waiting for it.
        raise ConfigError(
            f"precision.mode=fp16 with parallel.offload_param=cpu under {strategy}: torch would scale gradients on the "
            "CPU by a number that is still on its way from the GPU",
            "set precision.mode=bf16, or parallel.strategy=zero3",
        )


def _refuse_ignored(config: RunConfig) -> None:
    """Refuse settings that would do nothing beside the others."""
    for rule in IGNORED:
        if rule.applies(config):
            preset = config.model.preset
            if preset is not None and rule.key.startswith("model.") and task_of(preset) != config.task.name:
                raise ConfigError(
                    f"model.preset={preset} is not a model of task.name={config.task.name}",
                    f"set task.name={task_of(preset)}, or a preset of {config.task.name}",
                )
            raise ConfigError(
                f"{rule.key}={_value(config, rule.key)} would be ignored: {rule.reason}", _without(rule.key)
            )


def _refuse_missing_libraries(config: RunConfig) -> None:
    """Refuse settings whose library is not installed."""
    strategy = config.parallel.strategy
    if config.logging.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"logging.wandb_project={config.logging.wandb_project} needs wandb, which is not installed",
            "pip install 'shardkit[wandb]', or remove logging.wandb_project",
        )
    if strategy in ZERO and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"parallel.strategy={strategy} needs deepspeed, which is not installed",
            "pip install deepspeed, or set parallel.strategy=fsdp (shards the same state without it)",
        )


def mesh_shape(config: RunConfig, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) of the strategy; hsdp shards over the ranks of one node unless told otherwise.

    Raises:
        ConfigError: dp_replicate × dp_shard is not the world size.
    """
    parallel = config.parallel
    if parallel.strategy != "hsdp":
        shape = (1, world_size) if parallel.strategy in ("fsdp", "zero2", "zero3") else (world_size, 1)
        for key, size in zip(("dp_replicate", "dp_shard"), shape, strict=True):
            if getattr(parallel, key) not in (None, size):
                raise ConfigError(
                    f"parallel.{key}={getattr(parallel, key)}, but {parallel.strategy} on {_ranks(world_size)} has "
                    f"{key}={size}: {CAPABILITIES['mesh'][parallel.strategy]}",
                    f"remove parallel.{key}, or set parallel.strategy=hsdp",
                )
        return shape
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if shard is None:
        shard = world_size // replicate if replicate else local_world_size
    if replicate is None:
        replicate = world_size // shard
    if replicate * shard != world_size:
        raise ConfigError(_mesh_cause(parallel, world_size, local_world_size), _mesh_fix(world_size))
    return replicate, shard


def _mesh_cause(parallel: ParallelConfig, world_size: int, local_world_size: int) -> str:
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if replicate and shard:
        return (
            f"parallel.dp_replicate={replicate} × parallel.dp_shard={shard} = {replicate * shard}, "
            f"but there are {world_size} ranks"
        )
    for key, size in (("dp_replicate", replicate), ("dp_shard", shard)):
        if size:
            return f"parallel.{key}={size} does not divide the world size {world_size}"
    return f"hsdp shards over the {local_world_size} ranks of one node, which do not divide the world size {world_size}"


def _mesh_fix(world_size: int) -> str:
    pairs = [f"{n} × {world_size // n}" for n in range(1, world_size + 1) if world_size % n == 0]
    shown = ", ".join(pairs[:6]) + (", …" if len(pairs) > 6 else "")
    return f"dp_replicate × dp_shard for {_ranks(world_size)}: {shown}"


def _asked(config: RunConfig, world_size: int) -> Iterator[tuple[str, str, str]]:
    """(feature, setting as the user wrote it, fix) of every feature that the config uses."""
    parallel = config.parallel
    if world_size > 1:
        yield "data_parallel", f"a world of {world_size} ranks", "set parallel.strategy=ddp, or start one process"
    if parallel.no_sync:
        yield "no_sync", "parallel.no_sync=true", _without("parallel.no_sync")
    if not parallel.reshard_after_forward:
        yield "keep_gathered", "parallel.reshard_after_forward=false", _without("parallel.reshard_after_forward")
    if parallel.bucket_mb is not None:
        yield "bucket_mb", f"parallel.bucket_mb={parallel.bucket_mb:g}", _without("parallel.bucket_mb")
    if parallel.ds_config:
        yield "ds_config", "parallel.ds_config", _without("parallel.ds_config")
    if parallel.offload_ratio != 1:
        yield "offload_ratio", f"parallel.offload_ratio={parallel.offload_ratio:g}", _without("parallel.offload_ratio")
    yield from _offloads(parallel)
    if config.precision.mode != "fp32":
        mode = config.precision.mode
        yield mode, f"precision.mode={mode}", "set precision.mode=bf16, or another parallel.strategy"
    if config.precision.autocast:
        yield "autocast", "precision.autocast=true", _without("precision.autocast")
    if config.precision.reduce_dtype != "auto":
        setting = f"precision.reduce_dtype={config.precision.reduce_dtype}"
        yield "reduce_dtype", setting, _without("precision.reduce_dtype")
    if parallel.find_unused:
        yield "find_unused", "parallel.find_unused=true", _without("parallel.find_unused")
    if parallel.prefetch != 1:
        yield "prefetch", f"parallel.prefetch={parallel.prefetch}", _without("parallel.prefetch")
    if parallel.hpz is not None:
        yield "hpz", f"parallel.hpz={parallel.hpz}", _without("parallel.hpz")
    if config.optim.name not in ("adamw", "sgd"):
        yield config.optim.name, f"optim.name={config.optim.name}", "set optim.name=adamw"
    if config.optim.in_backward:
        yield "in_backward", "optim.in_backward=true", _without("optim.in_backward")
    if config.train.ema_decay is not None:
        yield "ema", f"train.ema_decay={config.train.ema_decay:g}", _without("train.ema_decay")
    if config.activation.policy != "none":
        setting = f"activation.policy={config.activation.policy}"
        yield "activation_checkpointing", setting, _without("activation.policy")
    if config.activation.offload != "none":
        setting = f"activation.offload={config.activation.offload}"
        yield "activation_offload", setting, _without("activation.offload")
    if config.compile.enabled:
        yield "compile", "compile.enabled=true", _without("compile.enabled")
        if config.compile.scope == "model":
            yield "compile_model", "compile.scope=model", "set compile.scope=block"
    if config.adapter.type != "none":
        yield "adapter", f"adapter.type={config.adapter.type}", _without("adapter")
    if config.model.resize_embeddings:
        yield "resize_embeddings", "model.resize_embeddings=true", _without("model.resize_embeddings")
    if config.model.sync_batchnorm:
        yield "sync_batchnorm", "model.sync_batchnorm=true", _without("model.sync_batchnorm")
    if config.model.tie_weights and config.task.factory is None:
        yield "tied_weights", "model.tie_weights=true", _without("model.tie_weights")


def _offloads(parallel: ParallelConfig) -> Iterator[tuple[str, str, str]]:
    with_params = parallel.strategy in ("fsdp", "hsdp") and parallel.offload_param == "cpu"
    for key in ("offload_optimizer", "offload_param"):
        device, setting = getattr(parallel, key), f"parallel.{key}={getattr(parallel, key)}"
        if device == "nvme":
            yield "nvme", setting, f"set parallel.strategy=zero3, or parallel.{key}=cpu where that works"
        elif device == "cpu" and not (key == "offload_optimizer" and with_params):
            works = [name for name in STRATEGIES if CAPABILITIES[key][name] is True]
            yield key, setting, f"set parallel.{key}=none, or parallel.strategy to one of {', '.join(works)}"


def markdown_table() -> str:
    """The table of docs/capability.md: a check mark, or a dash with the number of the reason below."""
    reasons: list[str] = []
    lines = [f"| | {' | '.join(STRATEGIES)} |", "|---|" + ":-:|" * len(STRATEGIES)]
    for feature, support in CAPABILITIES.items():
        cells = []
        for name in STRATEGIES:
            reason = support[name]
            if reason is True:
                cells.append("✓")
                continue
            if reason not in reasons:
                reasons.append(reason)
            cells.append(f"– <sup>{reasons.index(reason) + 1}</sup>")
        lines.append(f"| {DESCRIPTIONS[feature]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))])


def write_table(path: Path) -> None:
    """Replace the text between the markers of a markdown file.

    Raises:
        ConfigError: the file cannot be read or written, or has no markers.
    """
    begin, end = MARKERS
    try:
        text = path.read_text(encoding="utf-8")
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ConfigError(f"{path} has no {begin} … {end}", "put both markers where the table belongs")
        path.write_text(f"{before}{begin}\n{markdown_table()}\n{end}{after}", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be updated: {error}", "name a markdown file that can be written") from None


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return str(value).lower() if isinstance(value, bool) else value


def _without(key: str) -> str:
    return f"remove {key}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _main(arguments: list[str]) -> int:
    if arguments == []:
        print(markdown_table())
        return 0
    if len(arguments) == 2 and arguments[0] == "--write":
        try:
            write_table(Path(arguments[1]))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        return 0
    print("usage: python -m shardkit.config.capability [--write docs/capability.md]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
