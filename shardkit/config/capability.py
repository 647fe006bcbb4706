"""Refuses settings that a strategy, a device or other settings cannot honour, and makes the table of them.

The rows of the table, and their refusals, are declared on the config's fields (`schema`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from ..errors import ConfigError
from .presets import task_of
from .schema import DOCUMENT_KEYS, SHARDING, STRATEGIES, Capability, RunConfig, Section, TaskName, sections

_BEYOND_KEYS = (
    Capability(
        "more than one rank",
        {"single": "it is one process: use ddp, fsdp, hsdp or a ZeRO stage"},
        name="data_parallel",
        fix="set parallel.strategy=ddp, or start one process",
    ),
    Capability(
        "replicate × shard mesh (`dp_replicate`, `dp_shard`)",
        {"single ddp fsdp zero1 zero2 zero3": "only hsdp has a two-dimensional mesh"},
        name="mesh",
    ),
    Capability("frozen parameters", name="frozen_params"),
    Capability(
        "parameters that the loss does not use, not frozen",
        {"zero1 zero2 zero3": "it would still decay them and count them in its norm"},
        name="unused_params",
    ),
    Capability("computed buffers that are not saved (rotary frequencies)", name="buffers"),
)
"""Rows that no key asks for by its value alone: the ranks or the model do."""


@dataclass(frozen=True)
class Declared:
    """A capability that a key's value can ask for."""

    section: str
    key: str
    capability: Capability

    @property
    def name(self) -> str:
        return self.capability.name or self.key

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.key}"

    def asks(self, config: RunConfig) -> bool:
        section = getattr(config, self.section)
        setting = getattr(section, self.key)
        choices = self.capability.choices
        is_set = setting in choices if choices else setting != type(section).model_fields[self.key].default
        return is_set and self.capability.beside(section)

    @property
    def fix(self) -> str:
        """The way out for a strategy that cannot do it."""
        fix = self.capability.fix or f"remove {self.dotted}"
        return fix.format(key=self.dotted, works=", ".join(self.capability.works))


def declared(section: str, model: type[Section]) -> Iterator[Declared]:
    """The capabilities that a section's fields declare."""
    for key, hint in get_type_hints(model, include_extras=True).items():
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, Capability):
                yield Declared(section, key, annotation)


DECLARED = [entry for section, model in sections().items() for entry in declared(section, model)]
"""The capabilities of all keys, in the order of the config."""
CAPABILITIES: dict[str, Capability] = {row.name: row for row in _BEYOND_KEYS} | {
    entry.name: entry.capability for entry in DECLARED
}
"""The rows of the table, by their short names."""


def check(config: RunConfig, *, device: str, world_size: int, local_world_size: int) -> None:
    """Refuse settings that the strategy, the device or the world size does not support, or that would do nothing.

    A key counts as set if it differs from its default, so a resolved config, which spells out every key, passes.

    `device`: "cpu" or "cuda".
    """
    if world_size > 1:
        ranks = CAPABILITIES["data_parallel"]
        _refuse(config, ranks, f"a world of {world_size} ranks", ranks.fix)
    requests = [entry for entry in DECLARED if entry.asks(config)]
    for entry in requests:
        _refuse(config, entry.capability, config.setting(entry.dotted), entry.fix)
    for entry in requests:
        if device != "cuda" and entry.capability.on_cpu:
            cause = f"{config.setting(entry.dotted)}, but the run is on the CPU: {entry.capability.on_cpu}"
            raise ConfigError(cause, f"remove {entry.dotted}")
    if device != "cuda" and config.memory.cap is not None and config.compile.enabled:
        raise ConfigError(
            f"memory.cap={config.memory.cap} with compile.enabled=true on the CPU: tensors are counted operator by "
            "operator, and compiled code shows none",
            "remove memory.cap, or set compile.enabled=false",
        )
    _check_groups(config, world_size, local_world_size)
    mesh_shape(config, world_size, local_world_size)
    _check_experts(config, world_size, local_world_size)
    profiled = config.profile.ranks
    if config.profile.start is not None and profiled != "all" and max(profiled) >= world_size:
        raise ConfigError(
            f"profile.ranks={profiled}, but the run's ranks are 0 to {world_size - 1}",
            "name ranks that exist, or set profile.ranks=all",
        )
    for rule in IGNORED:
        if rule.applies(config):
            preset = config.model.preset
            if preset is not None and rule.key.startswith("model.") and task_of(preset) != config.task.name:
                raise ConfigError(
                    f"model.preset={preset} is not a model of task.name={config.task.name}",
                    f"set task.name={task_of(preset)}, or a preset of {config.task.name}",
                )
            raise ConfigError(f"{config.setting(rule.key)} would be ignored: {rule.reason}", f"remove {rule.key}")
    _refuse_missing_libraries(config)


def _refuse(config: RunConfig, capability: Capability, setting: str, fix: str) -> None:
    strategy = config.parallel.strategy
    if strategy in capability.reasons:
        reason = capability.reasons[strategy]
        raise ConfigError(f"{setting} does not work with parallel.strategy={strategy}: {reason}", fix)


def _refuse_missing_libraries(config: RunConfig) -> None:
    """Refuse settings whose library is not installed."""
    project, strategy, optimizer = config.logging.wandb_project, config.parallel.strategy, config.optim.name
    wandb, quantize = "pip install 'shardkit[wandb]', or", "pip install 'shardkit[quantize]', or"
    sharded = "pip install deepspeed, or set parallel.strategy=fsdp (shards the same state without it)"
    for is_set, setting, library, fix in (
        (project, f"logging.wandb_project={project}", "wandb", f"{wandb} remove logging.wandb_project"),
        (config.model.quantize is not None, "model.quantize", "bitsandbytes", f"{quantize} remove model.quantize"),
        (optimizer == "adamw_bnb_8bit", f"optim.name={optimizer}", "bitsandbytes", f"{quantize} set optim.name=adamw"),
        (SHARDING[strategy].stage > 0, f"parallel.strategy={strategy}", "deepspeed", sharded),
    ):
        if is_set and importlib.util.find_spec(library) is None:
            raise ConfigError(f"{setting} needs {library}, which is not installed", fix)


def mesh_shape(config: RunConfig, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) of the strategy; hsdp shards over the ranks of one node unless told otherwise. Ranks
    that share layers count once."""
    parallel = config.parallel
    ranks = _ranks(world_size)
    if parallel.tp > 1:
        ranks = f"{ranks} / parallel.tp={parallel.tp} = {world_size // parallel.tp}"
    world_size, local_world_size = world_size // parallel.tp, max(1, local_world_size // parallel.tp)
    if parallel.strategy != "hsdp":
        shape = (1, world_size) if parallel.strategy in ("fsdp", "zero2", "zero3") else (world_size, 1)
        for key, size in zip(("dp_replicate", "dp_shard"), shape, strict=True):
            if getattr(parallel, key) not in (None, size):
                raise ConfigError(
                    f"parallel.{key}={getattr(parallel, key)}, but {parallel.strategy} on {ranks} has "
                    f"{key}={size}: {CAPABILITIES['mesh'].reasons[parallel.strategy]}",
                    f"remove parallel.{key}, or set parallel.strategy=hsdp",
                )
        return shape
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if shard is None:
        shard = world_size // replicate if replicate else local_world_size
    if replicate is None:
        replicate = world_size // shard
    if replicate * shard != world_size:
        pairs = [f"{n} × {world_size // n}" for n in range(1, world_size + 1) if world_size % n == 0]
        fix = f"dp_replicate × dp_shard for {ranks}: {', '.join(pairs[:6])}{', …' * (len(pairs) > 6)}"
        cause = f"hsdp shards over the {shard} ranks of one node, which do not divide the {ranks}"
        if parallel.dp_replicate and parallel.dp_shard:
            product = f"parallel.dp_replicate={replicate} × parallel.dp_shard={shard} = {replicate * shard}"
            cause = f"{product}, but there are {ranks}"
        elif sizes := [f"{k}={n}" for k in ("dp_replicate", "dp_shard") if (n := getattr(parallel, k))]:
            cause = f"parallel.{sizes[0]} does not divide the {ranks}"
        raise ConfigError(cause, fix)
    return replicate, shard


def _check_groups(config: RunConfig, world_size: int, local_world_size: int) -> None:
    """Refuse `parallel.tp` and `parallel.cp` that do not fit the ranks, and `parallel.cp` that does not fit the
    sequences."""
    parallel, seq_len = config.parallel, config.train.seq_len
    # The ranks that share layers are neighbours; those that share sequences are the next ones.
    for key, size, inner in (("tp", parallel.tp, 1), ("cp", parallel.cp, parallel.tp)):
        if size == 1:
            continue
        group = f"parallel.{key}={size}"
        if inner > 1:
            group = f"parallel.tp={inner} × {group} = {inner * size}"
        if world_size % (size * inner):
            raise ConfigError(
                f"{group} does not divide the {_ranks(world_size)}",
                one_of(f"parallel.{key}", divisors(world_size // inner)),
            )
        if local_world_size % (size * inner) and not getattr(parallel, f"{key}_across_nodes"):
            raise ConfigError(
                f"{group}, but a node has {_ranks(local_world_size)}: some groups would reach across nodes, and each "
                "layer would wait for the network",
                f"{one_of(f'parallel.{key}', divisors(max(1, local_world_size // inner)))}, or set "
                f"parallel.{key}_across_nodes=true",
            )
    size = parallel.cp
    if seq_len % size and config.task.factory is None:
        raise ConfigError(
            f"parallel.cp={size} does not divide train.seq_len={seq_len}",
            f"set train.seq_len={seq_len // size * size or size}",
        )


def _check_experts(config: RunConfig, world_size: int, local_world_size: int) -> None:
    """Refuse `parallel.ep` that does not divide the ranks that shard parameters."""
    size, (_, shard) = config.parallel.ep, mesh_shape(config, world_size, local_world_size)
    shard *= config.parallel.tp
    if shard % size:
        raise ConfigError(
            f"parallel.ep={size} does not divide the {_ranks(shard)} of a copy of the parameters",
            one_of("parallel.ep", divisors(shard)),
        )


_SHARED = {
    "n_heads": ("tp", "cp"), "num_attention_heads": ("tp", "cp"), "num_key_value_heads": ("tp",),
    "num_experts": ("ep",), "num_local_experts": ("ep",), "n_routed_experts": ("ep",),
}  # fmt: skip
"""A model's number of heads or experts → the keys of `parallel` whose product must divide it."""


def check_model(config: RunConfig) -> None:
    """Refuse a task's model that ranks cannot share, where the config itself names its sizes: others are known when the
    task is made. `check` does not do it: a loop of the user's own has another model than the config."""
    parallel, model = config.parallel, config.model
    if parallel.ep > 1 and config.task.factory is None and config.task.name not in ("hf_causal_lm", "hf_masked_lm"):
        raise ConfigError(
            f"parallel.ep={parallel.ep} with task.name={config.task.name}: among the built-in tasks only language "
            "models of transformers have experts",
            "remove parallel.ep, or set task.name=hf_causal_lm",
        )
    sizes = {f"model.hf.{key}": size for key, size in model.hf.items()}
    if config.task.name == "causal_lm":
        sizes = {"model.n_heads": model.n_heads, "model.vocab_size": model.vocab_size}
    for dotted, n in sizes.items() if config.task.factory is None else ():
        key = dotted.rpartition(".")[2]
        axes = [axis for axis in _SHARED.get(key, ()) if getattr(parallel, axis) > 1]
        product = math.prod(getattr(parallel, axis) for axis in axes)
        if axes and isinstance(n, int) and n % product:
            outer = product // getattr(parallel, axes[-1])
            raise ConfigError(
                f"{' × '.join(f'parallel.{axis}={getattr(parallel, axis)}' for axis in axes)} does not divide "
                f"{dotted}={n}",
                one_of(f"parallel.{axes[-1]}", [size for size in divisors(n) if n % (size * outer) == 0]),
            )
        if key == "vocab_size" and isinstance(n, int) and parallel.tp not in sharing_rows(n):
            raise ConfigError(
                f"parallel.tp={parallel.tp}: {dotted}={n} leaves a rank without any row",
                one_of("parallel.tp", sharing_rows(n)),
            )


def divisors(n: int) -> list[int]:
    return [size for size in range(1, n + 1) if n % size == 0]


def sharing_rows(n: int) -> list[int]:
    """The numbers of ranks that can share `n` rows so that each has one: a rank has n / ranks of them, rounded up."""
    return [size for size in range(1, n + 1) if -(-n // size) * (size - 1) < n]


def one_of(key: str, sizes: Sequence[int]) -> str:
    """The fix that names the sizes that fit."""
    fits = [size for size in sizes if size > 1]
    dots = ", …" * (len(fits) > 8)
    return f"set {key} to one of 1, {', '.join(map(str, fits[:8]))}{dots}" if fits else f"remove {key}"


@dataclass(frozen=True)
class Ignored:
    """A key that has no effect beside certain other settings."""

    key: str
    beside: Callable[[RunConfig], bool]
    reason: str

    def applies(self, config: RunConfig) -> bool:
        section, _, name = self.key.partition(".")
        model = getattr(config, section)
        return bool(getattr(model, name) != type(model).model_fields[name].default and self.beside(config))


def _cpu_adam(config: RunConfig) -> bool:
    offloaded = config.parallel.strategy.startswith("zero") and config.parallel.offload_optimizer != "none"
    return offloaded and config.optim.name == "adamw"


def _not_for(*tasks: TaskName) -> Callable[[RunConfig], bool]:
    """Whether the task is built in and none of these; a user's own task may read any key."""
    return lambda config: config.task.factory is None and config.task.name not in tasks


_REFERENCE = ("vocab_size", "max_seq_len", "d_model", "n_layers", "n_heads", "dropout", "tie_weights")
_TEXT: tuple[TaskName, ...] = ("causal_lm", "hf_causal_lm", "hf_masked_lm")
_IMAGES: tuple[TaskName, ...] = ("image_classification", "super_resolution")
_FOR_ONE: dict[str, tuple[TaskName, ...]] = {
    **{f"model.{key}": ("causal_lm",) for key in _REFERENCE},
    "model.resize_embeddings": ("hf_causal_lm", "hf_masked_lm"),
    **dict.fromkeys(("model.hf", "model.hf_config"), ("hf_causal_lm", "hf_masked_lm", *_IMAGES)),
    **dict.fromkeys(("train.seq_len", "model.loss_chunk_size", "data.bin_dtype", "data.cache_dir"), _TEXT),
    **dict.fromkeys(
        ("train.sample_prompts", "train.sample_tokens", "train.sample_temperature"), ("causal_lm", "hf_causal_lm")
    ),
    **dict.fromkeys(("data.packing", "data.streaming"), ("causal_lm", "hf_causal_lm")),
    **dict.fromkeys((f"data.{key}" for key in ("tokenizer", *DOCUMENT_KEYS)), _TEXT),
    **dict.fromkeys(("data.mask_fraction", "data.mask_token"), ("hf_masked_lm",)),
    **dict.fromkeys(("data.crops_per_image", "data.augment"), _IMAGES),
    "data.crop_size": ("super_resolution",),
}
"""Keys that only some built-in tasks read."""

IGNORED: tuple[Ignored, ...] = (
    *(
        Ignored(key, _not_for(*tasks), f"among the built-in tasks it is a key of {', '.join(tasks)} only")
        for key, tasks in _FOR_ONE.items()
    ),
    Ignored("compile.scope", lambda c: not c.compile.enabled, "compile.enabled=false"),
    Ignored("precision.loss_scale_init_power", lambda c: c.precision.mode != "fp16", "only fp16 scales the loss"),
    Ignored("precision.loss_scale_window", lambda c: c.precision.mode != "fp16", "only fp16 scales the loss"),
    Ignored("precision.autocast", lambda c: c.precision.mode in ("fp32", "tf32"), "the model computes in fp32"),
    Ignored(
        "precision.output_dtype", lambda c: c.precision.mode in ("fp32", "tf32"), "the model computes in fp32 already"
    ),
    Ignored(
        "parallel.offload_ratio", lambda c: c.parallel.offload_optimizer == "none", "no optimizer states are offloaded"
    ),
    Ignored("parallel.tp_sequence", lambda c: c.parallel.tp == 1, "parallel.tp=1"),
    *(
        Ignored(f"adapter.{key}", lambda c: c.adapter.type == "none", "adapter.type=none")
        for key in ("r", "alpha", "dropout", "targets", "use_rslora")
    ),
    Ignored("compile.mode", lambda c: not c.compile.enabled, "compile.enabled=false"),
    Ignored("activation.every_k", lambda c: c.activation.policy != "every_k", "activation.policy is not every_k"),
    Ignored("activation.budget", lambda c: c.activation.policy != "budget", "activation.policy is not budget"),
    Ignored("activation.offload_min_bytes", lambda c: c.activation.offload == "none", "activation.offload=none"),
    Ignored(
        "activation.block_classes",
        lambda c: not c.activation.recomputes and c.activation.offload == "none",
        "neither activation.policy nor activation.offload changes a block",
    ),
    Ignored("data.prefetch", lambda c: c.data.workers == 0, "data.workers=0 loads in the training process"),
    Ignored("data.val_fraction", lambda c: c.data.val_path is not None, "data.val_path names the validation data"),
    Ignored("data.val_fraction", lambda c: c.train.eval_samples == 0, "train.eval_samples=0: all data train"),
    Ignored(
        "data.val_fraction",
        lambda c: c.task.factory is None and c.task.name == "image_classification" and c.data.path is None,
        "the lower part of scikit-image's pictures is the validation data",
    ),
    Ignored("data.val_path", lambda c: c.train.eval_samples == 0, "train.eval_samples=0 turns evaluation off"),
    Ignored("train.sample_prompts", lambda c: c.train.eval_samples == 0, "train.eval_samples=0 turns evaluation off"),
    Ignored("train.sample_tokens", lambda c: not c.train.sample_prompts, "train.sample_prompts is empty"),
    Ignored("train.sample_temperature", lambda c: not c.train.sample_prompts, "train.sample_prompts is empty"),
    Ignored("train.eval_every", lambda c: c.train.eval_samples == 0, "train.eval_samples=0 turns evaluation off"),
    Ignored("optim.min_lr_ratio", lambda c: c.optim.schedule == "constant", "optim.schedule=constant never falls"),
    Ignored("optim.implementation", _cpu_adam, "ZeRO's offloaded AdamW steps with DeepSpeedCPUAdam"),
    Ignored(
        "parallel.no_sync",
        lambda c: c.parallel.strategy == "zero1" and c.parallel.no_sync is False,
        "ZeRO-1 always reduces gradients once per step",
    ),
)


def markdown_table() -> str:
    """The table of docs/capability.md: a check mark, or a dash with the number of the reason below."""
    reasons: list[str] = []
    lines = [f"| | {' | '.join(STRATEGIES)} |", "|---|" + ":-:|" * len(STRATEGIES)]
    for row in CAPABILITIES.values():
        reasons += [reason for reason in dict.fromkeys(row.reasons.values()) if reason not in reasons]
        numbers = {name: reasons.index(reason) + 1 for name, reason in row.reasons.items()}
        cells = [f"– <sup>{numbers[name]}</sup>" if name in numbers else "✓" for name in STRATEGIES]
        lines.append(f"| {row.words} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))])


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
