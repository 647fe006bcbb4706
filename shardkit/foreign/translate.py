"""`shardkit plan --from`: the config that trains as Accelerate's and DeepSpeed's files say, and how far it does not.

The plan is one of shardkit's own loop with these settings. Memory that Accelerate's loop takes beyond it is listed with
its size, and a key that changes memory in a way that no plan has takes the verdict's place.

The tables hold the keys that change memory, with the keys here that say the same; of Accelerate also the others, so
that a newer release's key can be told from them (`section.*` stands for every key of a section). tests/foreign compares
them with the installed packages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..config.errors import combined, shown
from ..config.load import Layers, LoadedConfig, as_override, merged, split_override
from ..config.other_tools import other_tool_error, tool_of
from ..config.presets import TASKS
from ..config.schema import SHARDING
from ..config.yaml import Document, read_text, read_yaml
from ..errors import ConfigError, gib, one_line
from ..files import read_regular

Settings = dict[str, Any]
Convert = Callable[[Any], Settings]
"""A value of the tool → keys here with their values."""
STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
PASSED = "parallel.ds_config."


class NoCounterpart(Exception): ...  # a value that changes memory and that shardkit cannot train, so not plan


def truth(value: Any) -> bool:  # files hold `true`, `"true"`, `"yes"` and `1` for the same
    if str(value).lower() not in ("true", "yes", "1", "false", "no", "0"):
        raise ValueError("it is neither true nor false")
    return str(value).lower() in ("true", "yes", "1")


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        raise ValueError("it is not a whole number")
    return int(value)


def _norm(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("it is not a number")
    return value or None  # 0 turns clipping off in both tools


def _stage(value: Any) -> str:
    if isinstance(value, bool) or value not in STAGES:
        raise ValueError("it is none of the stages 0, 1, 2, 3")
    return STAGES[value]


def _to(setting: str, convert: Callable[[Any], Any] = lambda value: value) -> Convert:
    return lambda value: {setting: convert(value)}


def _if_on(setting: str, counterpart: Any) -> Convert:
    return lambda value: {setting: counterpart} if truth(value) else {}


def _parts(value: Any) -> Settings:  # both tools' sequence parallelism is Ulysses by DeepSpeed, as parallel.cp
    return {"parallel.cp": whole(value)} if whole(value) > 1 else {}


_COUNTS = """
    reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
    stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance
"""
_SWITCHES = """
    overlap_comm contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients parameter_alignment
    memory_efficient_linear stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
"""
_OFFLOADS = """
    offload_optimizer.pin_memory offload_optimizer.buffer_count offload_optimizer.pipeline_read
    offload_optimizer.pipeline_write offload_optimizer.fast_init offload_param.pin_memory offload_param.buffer_count
    offload_param.buffer_size offload_param.max_in_cpu
"""


def _passed_through(names: str, convert: Callable[[Any], Any]) -> dict[str, Convert]:  # to DeepSpeed
    return {f"zero_optimization.{name}": _to(f"{PASSED}zero_optimization.{name}", convert) for name in names.split()}


def _adam(value: Any) -> Settings:
    if str(value).lower() not in ("adam", "adamw"):  # its Adam decays as AdamW does
        raise NoCounterpart("shardkit has only adam and adamw of DeepSpeed's optimizers")
    return {"optim.name": "adamw"}


DEEPSPEED: dict[str, Convert | None] = {
    "train_micro_batch_size_per_gpu": _to("train.micro_batch_size", whole),
    "train_batch_size": _to("train.global_batch_size", whole),
    "gradient_accumulation_steps": _to("train.grad_accum_steps", whole),
    "gradient_clipping": _to("train.max_norm", _norm),
    "zero_optimization.stage": _to("parallel.strategy", _stage),
    "zero_optimization.offload_optimizer.device": _to("parallel.offload_optimizer"),
    "zero_optimization.offload_param.device": _to("parallel.offload_param"),
    "zero_optimization.offload_optimizer.nvme_path": _to("parallel.nvme_path"),
    "zero_optimization.offload_param.nvme_path": _to("parallel.nvme_path"),
    "zero_optimization.offload_optimizer.ratio": _to("parallel.offload_ratio"),
    "zero_optimization.zero_hpz_partition_size": lambda value: {} if value == 1 else {"parallel.hpz": whole(value)},
    "zero_optimization.cpu_offload": _if_on("parallel.offload_optimizer", "cpu"),
    "zero_optimization.cpu_offload_param": _if_on("parallel.offload_param", "cpu"),
    **_passed_through(_COUNTS, whole),
    **_passed_through(_SWITCHES, truth),
    **_passed_through(_OFFLOADS, lambda value: value),
    "fp16.enabled": _to("fp16", truth),
    "bf16.enabled": _to("bf16", truth),
    "bfloat16.enabled": _to("bf16", truth),
    "bf16.bf16_optimizer_states": _if_on("precision.mode", "pure_bf16"),
    "communication_data_type": _to("precision.reduce_dtype"),
    "data_types.grad_accum_dtype": _to(f"{PASSED}data_types.grad_accum_dtype"),
    "optimizer.type": _adam,
    "sequence_parallel_size": _parts,
    # near others, and no typos
    **dict.fromkeys(("communication_data_type_op", "zero_optimization.legacy_stage1", "data_parallel_size")),
}
DEEPSPEED_DEFAULTS: Settings = {
    "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.allgather_bucket_size": 500_000_000,
    "zero_optimization.contiguous_gradients": True,
}
"""DeepSpeed's own defaults, where they differ from shardkit's."""

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _sharding(value: Any) -> Settings:  # FSDP1's strategy by name or number, or FSDP2's `reshard_after_forward`
    if str(value).lower() in ("true", "false"):
        return {"parallel.reshard_after_forward": truth(value)}
    name = _SHARDING[int(value) - 1] if str(value) in tuple("12345") else str(value).upper()
    if name not in _SHARDING:
        raise ValueError(f"it is none of {', '.join(_SHARDING)}")
    if name == "NO_SHARD":
        return {"parallel.strategy": "ddp"}
    strategy = "hsdp" if name.startswith("HYBRID") else "fsdp"
    return {"parallel.strategy": strategy, "parallel.reshard_after_forward": name in ("FULL_SHARD", "HYBRID_SHARD")}


def _halves(value: Any) -> Settings:  # one `precision.mode` is made of all files' fp16 and bf16 later
    word = "no" if value is False else str(value)  # YAML reads an unquoted no as false
    if word not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError("it is none of no, fp16, bf16, fp8")
    return {"precision.mode": "fp8"} if word == "fp8" else {"fp16": word == "fp16", "bf16": word == "bf16"}


def _engine(value: Any) -> Settings:
    engines = {"no": "single", "multi_gpu": "ddp", "multi_cpu": "ddp", "fsdp": "fsdp", "deepspeed": "zero2"}
    if str(value).lower() not in engines:
        raise NoCounterpart(f"shardkit plans only {', '.join(engines)}")
    return {"engine": engines[str(value).lower()]}


def _classes(value: Any) -> Settings:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return {"activation.block_classes": [name.strip() for name in names if name.strip()]}


_ACCELERATES_OTHERS = """
    compute_environment debug enable_cpu_affinity main_training_function machine_rank gpu_ids main_process_ip
    main_process_port rdzv_backend same_network downcast_bf16 tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm
    tpu_zone command_file commands mpirun_config.* ipex_config.* fp8_config.* parallelism_config.*
    fsdp_config.fsdp_version fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_min_num_params
    fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_use_orig_params
    fsdp_config.fsdp_ignored_modules fsdp_config.fsdp_limit_all_gathers fsdp_config.fsdp_cpu_ram_efficient_loading
    fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_state_dict_type deepspeed_config.zero3_init_flag
    deepspeed_config.zero3_save_16bit_model deepspeed_config.deepspeed_config_file
    deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile
    deepspeed_config.deepspeed_inclusion_filter deepspeed_config.deepspeed_exclusion_filter
    deepspeed_config.deepspeed_moe_layer_cls_names dynamo_config.dynamo_use_dynamic
    dynamo_config.dynamo_use_fullgraph dynamo_config.dynamo_use_regional_compilation megatron_lm_config.*
"""
"""Keys that change no memory, or that `unplanned_effect` knows."""
ACCELERATE: dict[str, Convert | None] = {
    "distributed_type": _engine,
    "mixed_precision": _halves,
    "num_processes": _to("gpus", whole),
    "num_machines": _to("machines", whole),
    "use_cpu": _if_on("run.device", "cpu"),
    "parallelism_config.parallelism_config_dp_replicate_size": lambda value: (
        {"parallel.strategy": "hsdp", "parallel.dp_replicate": whole(value)} if whole(value) > 1 else {}
    ),
    "parallelism_config.parallelism_config_dp_shard_size": _to("parallel.dp_shard", whole),
    "parallelism_config.parallelism_config_sp_size": _parts,
    "fsdp_config.fsdp_sharding_strategy": _sharding,
    "fsdp_config.fsdp_reshard_after_forward": _sharding,
    "fsdp_config.fsdp_activation_checkpointing": _if_on("activation.policy", "full"),
    "fsdp_config.fsdp_activation_checkpointing_offload": _if_on("activation.offload", "cpu"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": _classes,
    "fsdp_config.fsdp_offload_params": _if_on("parallel.offload_param", "cpu"),
    "deepspeed_config.zero_stage": _to("parallel.strategy", _stage),
    "deepspeed_config.gradient_clipping": _to("train.max_norm", _norm),
    "deepspeed_config.gradient_accumulation_steps": _to("train.grad_accum_steps", whole),
    "deepspeed_config.offload_optimizer_device": _to("parallel.offload_optimizer"),
    "deepspeed_config.offload_param_device": _to("parallel.offload_param"),
    **dict.fromkeys(
        ("deepspeed_config.offload_optimizer_nvme_path", "deepspeed_config.offload_param_nvme_path"),
        lambda value: {} if value == "none" else {"parallel.nvme_path": value},
    ),
    "dynamo_config.dynamo_backend": lambda value: {"compile.enabled": str(value).lower() not in ("no", "false")},
    "dynamo_config.dynamo_mode": _to("compile.mode"),
    **dict.fromkeys(_ACCELERATES_OTHERS.split()),
}
KEYS = {"Accelerate": ACCELERATE, "DeepSpeed": DEEPSPEED}

# Keys are known by name in any section, because releases move them from one section to another.
_IN = r"(?:^|.*\.)(?:parallelism_config_)?"
_UNPLANNED = (
    (rf"{_IN}(?:tp_size|autotp_size|tensor_parallel(?:_size)?)", "tensor parallelism divides weights and activations"),
    (
        rf"{_IN}(?:cp_size|context_parallel_size)",
        "torch's ring attention passes keys and values around, and parallel.cp exchanges heads, as sp_size does",
    ),
    (rf"{_IN}(?:sp_size|sequence_parallel_size)", "the tokens of a sample are divided over ranks"),
    (rf"{_IN}(?:ep_size|autoep_size|expert_parallel_size)|expert_parallel\.enabled", "experts are divided over ranks"),
    (r"zero_optimization\.zero_quantized_\w+|weight_quantization\.(?:.*\.)?enabled", "values travel in fewer bits"),
    (r"zero_optimization\.zenflow\..*", "ZenFlow splits the update between device and host"),
    (r"zero_optimization\.leaf_module\..*", "the named modules are gathered whole, with everything in them"),
    (r"zero_optimization\.offload_optimizer\.super_offload", "optimizer state moves to the host in another order"),
    (r"torch_autocast\.enabled", "weights stay in fp32, and forward runs under torch's autocast"),
    (r"compile\.deepcompile", "DeepCompile gathers and frees parameters in an order of its own"),
    (r"hybrid_engine\.enabled", "the model is kept for generation too"),
    (r"(?:bf16|fp16)\.\w+_master_weights_and_grads", "master weights and gradients are kept in 16 bits"),
)


def unplanned_effect(key: str, value: Any) -> str:
    """What a key changes in memory that no plan has; empty if it is off, a size of 1, or has no such effect."""
    is_size = key.endswith(("_size", "tensor_parallel"))
    is_off = str(value).lower() in ("", "none", "null", "no", "false", "0", "[]")
    if is_off or (is_size and value in (1, -1, "1", "-1")):
        return ""
    return next((effect for pattern, effect in _UNPLANNED if re.fullmatch(pattern, key)), "")


def find(tool: str, key: str) -> tuple[bool, Convert | None]:
    """Whether a tool has a dotted key, and its counterpart here; a key of a listed section counts as the tool's."""
    parts = key.split(".")
    names = [key, *(".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1))]
    name = next((name for name in names if name in KEYS[tool]), None)
    return name is not None, None if name is None else KEYS[tool][name]


class Release(NamedTuple):
    """The installed Accelerate: keys at the top of its file, options of `accelerate launch` (its sections' keys)."""

    version: str
    names: frozenset[str]
    options: dict[str, Any]

    def knows(self, key: str) -> bool:
        section, _, option = key.partition(".")
        return section in self.names and (not option or option.partition(".")[0] in self.options)


@lru_cache
def accelerate_release() -> Release:
    from accelerate import __version__  # late, because it imports torch
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    options = dict.fromkeys(f"fsdp_{entry.name}" for entry in fields(FullyShardedDataParallelPlugin))
    options |= dict.fromkeys(entry.name for entry in fields(DeepSpeedPlugin))  # some keys of the file are no options
    options |= vars(launch_command_parser().parse_args(["script"]))
    return Release(__version__, frozenset(entry.name for entry in fields(ClusterConfig)), options)


def read_content(content: dict[str, Any], name: str) -> dict[str, Any]:
    """A file's content as Accelerate's class holds it, with keys of earlier releases under their names of today."""
    from accelerate.commands.config.config_args import ClusterConfig

    release = accelerate_release()
    try:
        converted = ClusterConfig.process_config(dict(content))
        config = ClusterConfig(**{key: converted[key] for key in converted if key in release.names}).to_dict()
    except (ValueError, TypeError) as error:
        cause = f"{name}: Accelerate {release.version} refuses it: {one_line(error).rstrip('.')}"
        raise ConfigError(cause, "correct the file; `accelerate config` writes one") from None
    if config.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(f"{name} is a job of Amazon SageMaker", "name one whose compute_environment is LOCAL_MACHINE")
    has_old_keys = not content.keys() <= converted.keys()
    # Keys that the class does not have stay, to be named as unknown.
    keys = [key for key in converted if key in content or (has_old_keys and converted[key])]
    return {key: config.get(key, converted[key]) for key in keys}


_REHEARSE = "shardkit rehearse -- accelerate launch train.py runs the program itself on emulated GPUs"
_FSDP1_ONLY = ("sharding_strategy", "use_orig_params", "sync_module_states", "backward_prefetch", "forward_prefetch")


@dataclass(frozen=True)
class FileKey:
    file: str
    tool: str
    key: str
    value: Any
    fate: str  # mapped, default; absent: no memory; ignored, unknown by the tool; unplanned: memory, no plan
    settings: Settings = field(default_factory=dict)
    note: str = ""  # the reason of a fate, or the source of a value that fills in `auto`


def read_job(
    paths: Sequence[str | Path],  # files; one that another names is read too
    model: str | Path | None = None,  # a transformers `config.json`, or a folder that holds one
    gpus: int | None = None,  # ranks of the job; default: what the files say, else 1
    overrides: Sequence[str] = (),  # of `load` later; an `auto` that one of them sets counts as filled
) -> ForeignJob:
    """Read Accelerate's file, DeepSpeed's file, or both of one job."""
    files: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in map(Path, paths):
        name, content = one_line(str(path)), _parse(path)
        if error := other_tool_error(name, content, in_from=True):
            raise error
        tool = tool_of(content)
        if not tool:
            some = ", ".join(shown(key) for key in [*content][:3])
            fix = "name accelerate's config file or ds_config.json; a config of shardkit needs no --from"
            raise ConfigError(f"{name} is no file of Accelerate or DeepSpeed: none of them has {some}", fix)
        if tool in files:
            raise ConfigError(f"{files[tool][0]} and {name} are both files of {tool}", "name the files of one job")
        files[tool] = (name, content)
    if "Accelerate" in files:
        name, content = files["Accelerate"]
        files["Accelerate"] = name, (content := read_content(content, name))
        inner = _flat("Accelerate", content).get("deepspeed_config.deepspeed_config_file")
        if isinstance(inner, str) and "DeepSpeed" not in files and content.get("distributed_type") == "DEEPSPEED":
            path = next((p for p in (Path(inner), Path(name).parent / inner) if p.is_file()), Path(inner))
            files["DeepSpeed"] = one_line(str(path)), _parse(path)
    return ForeignJob(files, _read_model(model), model, gpus, dict(map(split_override, overrides)))


def _parse(path: Path) -> dict[str, Any]:
    name = one_line(str(path))
    try:
        text = read_text(path, name, "config", "name the file in it; a model's folder belongs to --model")
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist", "check the path") from None
    value = read_yaml(text.replace("\t", " "), name).value  # JSON is YAML but for tabs, which its values do not hold
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{name} is {'a list' if value else 'empty'}, not a mapping of keys", "name a config file")
    return value


def _read_model(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    location = Path(path).expanduser()
    file = location / "config.json" if location.is_dir() else location
    try:
        config = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        fix = "name a transformers config.json, or the folder that holds one"
        raise ConfigError(f"--model {file} cannot be read: {one_line(error)}", fix) from None
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("architectures")):
        cause = f"--model {one_line(str(file))} is no transformers config: it has no model_type"
        raise ConfigError(cause, "name the model's own config.json")
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"--model {file} is an encoder-decoder, which no built-in task trains", _REHEARSE)
    return config


def _flat(tool: str, tree: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Dotted keys of a file as the tables spell them, without None."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{section}{name}"
        # Accelerate's sections also take keys without their prefix, and DeepSpeed keys of stage 3 without `stage3_`.
        if section in ("fsdp_config.", "dynamo_config.", "fp8_config.") and not name.startswith(section[:-7]):
            key = f"{section}{section[:-7]}{name}"
        if tool == "DeepSpeed" and key not in DEEPSPEED and f"{section}stage3_{name}" in DEEPSPEED:
            key = f"{section}stage3_{name}"
        values |= _flat(tool, value, f"{key}.") if isinstance(value, dict) else {} if value is None else {key: value}
    return values


class ForeignJob:
    """The job of these files: each of their keys, the settings here, and what no setting expresses.

    `files`: tool → name and content of its file. `path`: where `model`, a transformers config, was read. `gpus`: ranks,
    if the command says it. `command_line`: settings that `load` will get.
    """

    def __init__(
        self, files: Mapping[str, tuple[str, dict[str, Any]]], model: dict[str, Any], path: str | Path | None,
        gpus: int | None, command_line: Settings,
    ) -> None:  # fmt: skip
        self.name = " + ".join(Path(name).name for name, _ in files.values())
        flat = {tool: _flat(tool, content) for tool, (_, content) in files.items()}
        self.accelerate, self.deepspeed = flat.get("Accelerate", {}), flat.get("DeepSpeed", {})
        self.model, self.path, self.command_line = model, path, command_line
        self.file_keys: list[FileKey] = []
        self.settings: Settings = {}
        self.added: list[tuple[str, Any, str]] = []  # settings without a key in any file, each with its reason
        self.problems: list[tuple[str, str, str]] = []  # (cause, fix, the key here that settles it)
        self.kind = str(self.accelerate.get("distributed_type", ""))
        stage: Any = self.deepspeed.get("zero_optimization.stage", 0) if self.deepspeed else None
        if not self.deepspeed and self.kind == "DEEPSPEED":
            stage = self.accelerate.get("deepspeed_config.zero_stage", 2)
        self.stage = stage if isinstance(stage, int) and stage in STAGES else None
        self.on_cpu = str(self.accelerate.get("use_cpu")).lower() == "true"  # there it shards nothing: DDP
        is_fsdp = self.kind == "FSDP" and not self.on_cpu
        has_fsdp2 = is_fsdp and accelerate_release().knows("fsdp_config.fsdp_version")  # older ones have FSDP1 alone
        version = str(self.accelerate.get("fsdp_config.fsdp_version", 1)) if has_fsdp2 else "1"
        self.fsdp = int(version) if is_fsdp and version in ("1", "2") else None
        if is_fsdp and self.fsdp is None:
            raise ConfigError(f"fsdp_config.fsdp_version={version} is neither FSDP1 nor FSDP2", "set it to 2")
        if is_fsdp and self.deepspeed:
            raise ConfigError("the files ask for FSDP and for DeepSpeed at once", "name one of the two files")
        head = str((model.get("architectures") or ["ForCausalLM"])[0])
        self.task = next((task for end, task in TASKS.items() if head.endswith(end)), "")
        self.is_text = self.task in ("hf_causal_lm", "hf_masked_lm", "")
        for tool, (name, _) in files.items():
            self.file_keys += [self._read(tool, name, key, value) for key, value in flat[tool].items()]
        # DeepSpeed's own defaults, where they differ from shardkit's and no file sets the same.
        defaults = {**DEEPSPEED_DEFAULTS, "zero_optimization.overlap_comm": self.stage == 3}
        defaults |= {"zero_optimization.stage3_prefetch_bucket_size": 50_000_000} if self.stage == 3 else {}
        defaults |= {"gradient_clipping": 0.0} if self.deepspeed else {}
        claimed = {setting for entry in self.file_keys for setting in entry.settings}
        for key, value in defaults.items() if self.stage else ():
            entry = self._read("DeepSpeed", "DeepSpeed's default", key, value, "default")
            if entry.settings and not claimed & entry.settings.keys():
                self.file_keys.append(entry)
        self._settle()
        machines, file_gpus = self.settings.pop("machines", 1), self.settings.pop("gpus", None)
        self.gpus = max(1, gpus or file_gpus or 1)
        self.gpus_per_node = None if self.gpus % machines else self.gpus // machines  # None: the files contradict it
        half = self._engine_and_precision(self.gpus)
        self._batch(self.gpus)
        self._task_and_loop()
        self._drop_what_does_nothing()
        self.added = [entry for entry in self.added if entry[0] in self.settings]
        self.left_out = [*self._left_out(half)]  # beyond the plan: (text, bytes for each value, for each token)
        if SHARDING[self.settings["parallel.strategy"]].state and not (gpus or file_gpus):
            self.left_out.append(("more than one rank to shard over: name them with --gpus N", 0, 0))

    @property
    def not_planned(self) -> list[str]:
        """A line for each key that changes memory and that no plan models; with one there is no verdict."""
        return [
            f"not planned: {entry.key}={shown(entry.value)} in {entry.file}: {entry.note}"
            for entry in self.file_keys
            if entry.fate == "unplanned"
        ]

    def load(self, overrides: Sequence[str] = ()) -> LoadedConfig:
        """The config here, validated; `["train.seq_len=2048"]` wins over the files and settles open points."""
        pairs = [split_override(item) for item in overrides]
        keys = {key for key, _ in pairs}
        if adapter := next((f"{key}={value}" for key, value in pairs if key.startswith("adapter.")), None):
            raise ConfigError(f"{adapter}: the script puts adapters into its model, which no file shows", _REHEARSE)
        if open_points := [ConfigError(cause, fix) for cause, fix, setting in self.problems if setting not in keys]:
            raise combined(open_points)
        tree: dict[str, Any] = {}
        for dotted, value in self.settings.items():
            for part in reversed(dotted.split(".")):
                value = {part: value}
            tree = merged(tree, value)
        layers = Layers()
        layers.add_file(self.name, Document(tree))
        layers.add_override("train.eval_samples", 0, raw=False)  # shardkit's evaluation is no part of Accelerate's loop
        for dotted, text in pairs:
            layers.add_override(dotted, text, raw=True)
        return LoadedConfig(*layers.resolve())

    def unplanned_memory(self, n_params: int, tokens: int, needed: int, limit: int | None) -> Iterator[str]:
        """Lines about memory that the plan lacks, with its size, and whether the job still fits with it."""
        total = 0
        for text, per_value, per_token in self.left_out:
            amount = per_value * n_params + per_token * tokens
            total += amount
            yield f"not part of the plan: {text}" + (f": {gib(amount)} at most" if amount else "")
        if limit is not None and needed <= limit < needed + total:
            yield f"the job may not fit: it needs up to {gib(needed + total)} of {gib(limit)}"

    def mapping(self) -> Iterator[str]:
        for name in dict.fromkeys(entry.file for entry in self.file_keys):
            keys = [entry for entry in self.file_keys if entry.file == name]
            yield name if "default" in name else f"{name} ({keys[0].tool})"
            for entry in (entry for entry in keys if entry.fate != "absent"):
                settings = ", ".join(self._shown(setting, value) for setting, value in entry.settings.items())
                end = [f"→ {settings}"] if settings else []
                end += [] if entry.fate in ("mapped", "default") else [entry.fate]
                key_and_value = f"{entry.key}: {as_override(entry.value)}"
                yield f"  {key_and_value:<46}  {': '.join([*end, entry.note]).rstrip(': ')}"
            if absent := [entry.key for entry in keys if entry.fate == "absent"]:
                yield f"  without a counterpart here: {', '.join(absent)}"
        if self.added:
            yield "set because the loop differs"
            yield from (f"  {f'{key}={as_override(value)}':<46}  {reason}" for key, value, reason in self.added)

    def _shown(self, setting: str, value: Any) -> str:
        if setting in ("fp16", "bf16"):
            return f"precision.mode={self.settings['precision.mode']}" if value else f"not {setting}"
        setting = "parallel.strategy" if setting == "engine" else setting
        return f"{setting}={as_override(self.settings.get(setting, value))}"

    def _read(self, tool: str, file: str, key: str, value: Any, fate: str = "mapped") -> FileKey:
        is_known, convert = find(tool, key)
        is_installed = tool == "DeepSpeed" or accelerate_release().knows(key)
        others = () if is_known and is_installed else (name for name in KEYS[tool] if name != key)
        near = get_close_matches(key, others, 1, 0.85)
        settings: Settings = {}
        note = "" if convert else unplanned_effect(key, value)
        if not note and is_installed and not is_known and tool == "Accelerate":
            note = "shardkit does not know the effect of this key of the installed Accelerate"
        if note:
            fate = "unplanned"
        elif near or not is_installed:
            fate, note = "unknown", f"did you mean {near[0]}?" if near else f"no key of {tool}"
        elif note := self._ignored(tool, key):
            fate = "ignored"
        elif convert is None:
            fate = "absent"
        elif value == "auto":
            settings, note = self._filled(file, key)
        else:
            try:
                settings = convert(value)
            except NoCounterpart as error:
                fate, note = "unplanned", str(error)
            except ValueError as error:  # a value that the tool itself refuses
                raise ConfigError(f"{file}: {key}={shown(value)} is wrong: {error}", "correct it") from None
        return FileKey(file, tool, key, value, fate, settings, note)

    def _ignored(self, tool: str, key: str) -> str:
        """Why the tool does not read a key in this job; empty if it does."""
        section, _, name = key.partition(".")
        is_of_stage_3 = name.startswith(("stage3_", "offload_param")) or name == "sub_group_size"
        if is_of_stage_3 and section in ("zero_optimization", "deepspeed_config") and (self.stage or 0) < 3:
            return f"it belongs to stage 3, and the stage is {self.stage}"
        kind = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}.get(section, self.kind)
        if tool == "Accelerate" and self.kind != kind:
            return f"distributed_type is {self.kind}"
        if section == "fsdp_config" and self.on_cpu:
            return "on CPUs Accelerate shards nothing and trains with DDP"
        if section == "fsdp_config" and name.removeprefix("fsdp_") in _FSDP1_ONLY and self.fsdp == 2:
            return "FSDP2 has no such setting"
        if name == "fsdp_reshard_after_forward" and self.fsdp == 1:
            return "FSDP1 goes by fsdp_sharding_strategy"
        if section == "deepspeed_config" and self.deepspeed and find(tool, key)[1] is not None:
            return "the DeepSpeed file decides it"
        return ""

    def _filled(self, file: str, key: str) -> tuple[Settings, str]:
        """The settings that an `auto` becomes, as Accelerate fills it in, with the source; else it is a problem."""
        name = key.rpartition(".")[2]
        setting = {
            "train_micro_batch_size_per_gpu": "train.micro_batch_size", "enabled": "precision.mode",
            "gradient_accumulation_steps": "train.grad_accum_steps",
        }.get(name, f"{PASSED}{key}")  # fmt: skip
        sizes = self.model.get("text_config") or self.model
        hidden = next((sizes[size] for size in ("hidden_size", "n_embd", "d_model", "dim") if sizes.get(size)), 0)
        factors = {"reduce_bucket_size": hidden, "stage3_prefetch_bucket_size": 0.9 * hidden}
        factors["stage3_param_persistence_threshold"] = 10
        if setting in self.command_line:
            return {}, f"from the command line: {setting}"
        if name == "train_batch_size":
            return {}, "micro-batch × accumulation × ranks"
        if name == "gradient_clipping":
            return {"train.max_norm": 1.0}, "planned with clipping, which the script decides"
        if self.accelerate and name == "enabled":
            half = key.partition(".")[0].replace("bfloat16", "bf16")
            return {half: self.accelerate.get("mixed_precision") == half}, "from mixed_precision"
        if self.accelerate and name == "gradient_accumulation_steps":
            return {setting: self.accelerate.get(f"deepspeed_config.{name}", 1)}, "Accelerate's"
        if hidden and name in factors:
            return {setting: int(factors[name] * hidden)}, f"from the model's hidden size {hidden}"
        value = {"train.micro_batch_size": "4", "train.grad_accum_steps": "1", "precision.mode": "bf16"}.get(setting)
        fix = f"add it to the command, such as {setting}={value}" if value else "write its value"
        fix = "pass --model, whose hidden size decides it" if name in factors and not self.model else fix
        self.problems.append((f'{file}: {key}="auto", but no file says what it becomes', fix, setting))
        return {}, ""

    def _settle(self) -> None:
        """One value for each setting; two different ones in the files are a problem."""
        claims: dict[str, FileKey] = {}
        for entry in (entry for entry in self.file_keys if entry.settings):
            for setting, value in entry.settings.items():
                first = claims.setdefault(setting, entry)
                if setting in ("fp16", "bf16"):
                    # One file that turns half precision on wins over another's `no`, as in Accelerate.
                    self.settings[setting] = self.settings.get(setting, False) or value
                    continue
                if first.settings[setting] != value:
                    cause = f"{first.key}={shown(first.value)} contradicts {entry.key}={shown(entry.value)}"
                    fix = f"make them equal; to plan anyway, set {setting} on the command line"
                    self.problems.append((cause, fix, setting))
                self.settings[setting] = value

    def _set(self, setting: str, value: Any, reason: str) -> None:
        self.settings[setting] = value
        self.added.append((setting, value, reason))

    def _engine_and_precision(self, gpus: int) -> bool:
        settings, engine = self.settings, self.settings.pop("engine", None)
        if self.stage is not None:
            settings["parallel.strategy"] = STAGES[self.stage]
        elif self.fsdp is not None:
            settings.setdefault("parallel.strategy", engine)
        elif "parallel.strategy" not in settings:
            reason = f"no file shards anything; the number of ranks is {gpus}"
            self._set("parallel.strategy", "ddp" if gpus > 1 else "single", reason)
        halves = [half for half in ("fp16", "bf16") if settings.pop(half, None)]
        if len(halves) == 2:
            cause, fix = "fp16 and bf16 are both on: only one half-precision type can be", "turn one of the two off"
            self.problems.append((cause, fix, "precision.mode"))
        if self.stage == 0 and halves:
            cause = "zero_optimization.stage=0: DeepSpeed in half precision then keeps fp32 copies of its own"
            self.problems.append((cause, "set stage 1 or higher, or rehearse the program", "parallel.strategy"))
        by_fsdp = SHARDING[settings["parallel.strategy"]].by_fsdp
        settings.setdefault("precision.mode", halves[0] if halves else "fp32")
        stored = str(self.model.get("dtype") or self.model.get("torch_dtype") or "").removeprefix("torch.")
        if stored == "bfloat16" and halves != ["fp16"] and self.stage is None and not (halves and by_fsdp):
            reason = "the model's dtype is bfloat16, which from_pretrained keeps for weights, gradients and moments"
            self._set("precision.mode", "pure_bf16", reason)
        elif halves and by_fsdp:
            self._set("precision.reduce_dtype", halves[0], "Accelerate reduces FSDP's gradients in that type")
            if self.fsdp == 1:
                self._set("precision.autocast", True, "Accelerate runs FSDP1's forward under autocast too")
        return bool(halves)

    def _batch(self, gpus: int) -> None:
        gpus //= self.settings.get("parallel.cp", 1)  # ranks that share sequences have the same samples
        total = self.settings.pop("train.global_batch_size", None)
        micro, accum = self.settings.get("train.micro_batch_size"), self.settings.get("train.grad_accum_steps")
        if total is not None and micro and accum and total != micro * accum * gpus:
            cause = f"train_batch_size={total} is not micro-batch × accumulation × ranks = {micro} × {accum} × {gpus}"
            fix = f"set it to {micro * accum * gpus}; --gpus sets the ranks"
            self.problems.append((cause, fix, "train.micro_batch_size"))
        elif total is not None and not micro:
            self.settings["train.micro_batch_size"] = max(1, total // (gpus * (accum or 1)))
        elif total is not None and micro and not accum:
            self.settings["train.grad_accum_steps"] = max(1, total // (gpus * micro))
        if "train.micro_batch_size" not in {*self.settings, *(setting for _, _, setting in self.problems)}:
            fix = "the script decides it: add it to the command, such as train.micro_batch_size=4"
            self.problems.append(("no file says how many samples a micro-batch has", fix, "train.micro_batch_size"))

    def _task_and_loop(self) -> None:
        """Set the task, and the differences of Accelerate's loop that keys here express."""
        if self.path is None:
            self.problems.append(("no file says which model it is", "pass --model, its config.json or its folder", ""))
            return
        if not self.task:
            cause = f"no built-in task has the head of {self.model['architectures'][0]}"
            fix = f"set task.name=hf_causal_lm to plan its body with that head; {_REHEARSE}"
            self.problems.append((cause, fix, "task.name"))
        self.settings["task.name"] = self.task or "hf_causal_lm"
        self.settings["model.hf_config"] = str(Path(self.path).expanduser().resolve())
        if self.is_text:
            fix = "the script decides it: add it to the command, such as train.seq_len=2048"
            self.problems.append(("no file says how many tokens a sample has", fix, "train.seq_len"))
            self._set("model.loss_chunk_size", 0, "transformers computes the logits of all tokens at once")
        if self.task == "hf_masked_lm":
            self._set("data.mask_fraction", 1.0, "transformers computes the logits of every token, masked or not")
        self._set("optim.decay_norm_bias_embed", True, "an optimizer over model.parameters() has one group")
        if "optimizer.type" not in self.deepspeed or self.deepspeed.get("optimizer.params.torch_adam"):
            on_cpu = "cpu" in (self.settings.get("run.device"), self.command_line.get("run.device"))
            self._set("optim.implementation", "for_loop" if on_cpu else "foreach", "torch's own choice for AdamW")

    def _drop_what_does_nothing(self) -> None:
        """Remove settings that have no effect in this job: shardkit would refuse them."""
        settings = self.settings
        sharding = SHARDING[settings["parallel.strategy"]]
        offloads = [settings.get(f"parallel.offload_{part}") for part in ("optimizer", "param")]
        drop = {
            "parallel.dp_shard": not sharding.replicates,
            "parallel.reshard_after_forward": not sharding.by_fsdp,
            "parallel.nvme_path": "nvme" not in offloads,
            "precision.reduce_dtype": settings["parallel.strategy"] == "single",
            "activation.block_classes": settings.get("activation.policy") is None,
            "compile.mode": not settings.get("compile.enabled"),
            "optim.implementation": sharding.stage > 0 and offloads[0] not in (None, "none"),
        }
        for key in [*settings]:
            if drop.get(key) or (key.startswith(PASSED) and not sharding.stage):
                del settings[key]

    def _left_out(self, half: bool) -> Iterator[tuple[str, int, int]]:
        model = self.model
        yield "the script's own loop: planned are transformers' forward and one AdamW", 0, 0
        if model.get("auto_map"):
            yield "the model folder's own code (auto_map), which is never run: transformers' class is planned", 0, 0
        if not (model.get("dtype") or model.get("torch_dtype")):
            yield "the type of the weights, which config.json does not name: planned is fp32", 0, 0
        if self.fsdp == 1:
            yield "FSDP1's flat parameters: planned as FSDP2, which shards each parameter", 0, 0
        if self.settings["parallel.strategy"] == "ddp":
            n_bytes = 2 if self.settings["precision.mode"] == "pure_bf16" else 4
            yield "DDP's buckets, which hold the gradients a second time", n_bytes, 0
        if half and self.stage is None and self.fsdp != 2 and self.is_text:
            yield "fp32 copies of half-precision logits", 0, 4 * int(model.get("vocab_size") or 0)
        names = ("num_attention_heads", "num_hidden_layers", "hidden_size")
        heads, layers, hidden = (size if isinstance(size := model.get(name), int) else 0 for name in names)
        if self.is_text and model.get("use_cache") is not False and hidden and heads and layers:
            width = int(model.get("head_dim") or hidden // heads) * int(model.get("num_key_value_heads") or heads)
            text = "copies of keys and values until forward ends, unless the script sets use_cache=False"
            yield text, 0, 2 * layers * width * (2 if half else 4)
