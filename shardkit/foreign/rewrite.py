"""Change the files of a job so that they mean other settings, and read the changed files again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..config.load import LoadedConfig, as_override, split_override
from ..config.strategy import SHARDING
from ..errors import ConfigError
from .files import File, flatten
from .gather import prefixed
from .phrases import Tool, phrase
from .tools import RECIPES, base
from .translate import ForeignJob, nested

READERS: tuple[Tool, ...] = ("trainer", "trl", "llamafactory", "axolotl", "accelerate", "deepspeed")
"""Tools whose files are changed."""
_ENGINES: tuple[Tool, ...] = ("accelerate", "trainer", "trl", "llamafactory", "axolotl", "deepspeed")
"""Which file decides the engine if a job has several, the first first."""
_TECHNIQUES = ("parallel.", "precision.", "activation.", "model.loss_chunk_size")


class NoKey(ConfigError):
    """No key of a job's files means a setting."""


@dataclass(frozen=True)
class ChangedJob:
    """A job whose files were changed.

    Attributes:
        text: the change, in keys of the files or in words about the script.
        job: the job of the changed files.
        overrides: settings that no file has.
    """

    text: str
    job: ForeignJob
    overrides: tuple[str, ...]

    def load(self) -> LoadedConfig:
        """The config of the changed job.

        Raises:
            ConfigError: the changed files contradict each other, or a value is refused.
        """
        return self.job.load(self.overrides)


def change_files(
    job: ForeignJob, overrides: Sequence[str], settings: Sequence[str], has_checkpointing: bool = True
) -> ChangedJob:
    """Write settings, such as `parallel.strategy=zero2`, into a job's files, and read the changed files again.

    Args:
        overrides: settings that no file has.
        has_checkpointing: as for `phrase`.

    Raises:
        ConfigError: the files have no key for a setting, or mean something else by it.
    """
    requested = dict(split_override(setting) for setting in settings)
    engine_before = job.load(overrides).config.parallel.strategy
    engine = requested.get("parallel.strategy", engine_before)
    overridden_keys = {split_override(override)[0] for override in overrides}
    files, all_overrides, script_changes = list(job.files), list(overrides), list[str]()
    for key, value in sorted(requested.items(), key=lambda setting: setting[0] != "parallel.strategy"):
        if key == "parallel.strategy" and _kind(engine) != _kind(engine_before) and key not in overridden_keys:
            files = _without_engine(job)
            if _kind(engine) == "":
                continue
        phrase_engine = engine_before if key == "parallel.strategy" else engine
        for tool in _tools_to_change(job, files, key, engine):
            text = phrase(tool, f"{key}={value}", phrase_engine, has_checkpointing)
            if text is None:
                raise NoKey(f"no key of {_file_names(job)} means {key}={value}", "set it in a config of shardkit")
            tree = None if key in overridden_keys else as_mapping(text)
            if tree is None:
                script_changes.append(text)
                all_overrides = [override for override in all_overrides if split_override(override)[0] != key]
                all_overrides.append(f"{key}={value}")
            else:
                files = _with_keys(files, tool, tree)
    changed_job = _reread(job, files, all_overrides, script_changes)
    config = changed_job.load().config
    if changed_job.job.not_planned and not job.not_planned:
        raise NoKey(f"with {changed_job.text}: {changed_job.job.not_planned[0]}", "plan another change")
    for key, value in requested.items():
        setting: Any = config
        for name in key.split("."):
            setting = getattr(setting, name, None)
        if not _means(setting, value):
            raise NoKey(f"{changed_job.text} does not mean {key}={value}", "set it in a config of shardkit")
    return changed_job


def without_techniques(job: ForeignJob, overrides: Sequence[str]) -> ChangedJob:
    """The job without engine, half precision and checkpointing, as far as its files decide them."""
    is_sharded = _kind(job.settings["parallel.strategy"]) != ""
    files = []
    for file in _without_engine(job) if is_sharded else job.files:
        off: dict[str, Any] = {}
        for key in file.values if file.tool != "model" else ():
            if key == "mixed_precision" and file.values[key] in ("fp16", "bf16"):
                off[key] = "no"
            elif key in ("bf16", "fp16", "bf16.enabled", "fp16.enabled") or key.endswith(_RECOMPUTES):
                off[key] = False
        if file.tool in RECIPES:
            off |= {"bf16": False, "fp16": False}
            off |= {"disable_gradient_checkpointing": True} if file.tool == "llamafactory" else {_RECOMPUTES[0]: False}
        files.append(replace(file, values={**file.values, **off}))
    return _reread(job, files, [override for override in overrides if not override.startswith(_TECHNIQUES)], [])


_RECOMPUTES = ("gradient_checkpointing", "activation_checkpointing")


def _reread(
    job: ForeignJob, files: Sequence[File], overrides: Sequence[str], script_changes: Sequence[str]
) -> ChangedJob:
    """The job of changed files. Settings of the loop that the changed files lost become overrides."""
    assert job.reread is not None
    changed = job.reread(files)
    lost_keys = [key for key in job.settings if key.startswith("train.") and key not in changed.settings]
    overridden_keys = {split_override(override)[0] for override in overrides}
    lost = [f"{key}={json.dumps(job.settings[key])}" for key in lost_keys if key not in overridden_keys]
    settled_keys = {problem.setting for problem in job.problems} | overridden_keys | set(lost_keys)
    new_problems = [problem for problem in changed.problems if problem.setting not in settled_keys]
    if new_problems:
        raise ConfigError(new_problems[0].cause, new_problems[0].fix)
    text = "; ".join([*_differences(job, files), *script_changes])
    return ChangedJob(text, changed, (*lost, *overrides))


def _kind(strategy: str) -> str:
    return "zero" if SHARDING[strategy].stage else "fsdp" if SHARDING[strategy].by_fsdp else ""


def _file_names(job: ForeignJob) -> str:
    return " + ".join(Path(file.name).name for file in job.files if file.tool in READERS)


def _tools_to_change(job: ForeignJob, files: Sequence[File], key: str, engine: str) -> list[Tool]:
    """The tools whose files decide a setting now; if no file does, the tool in whose file it belongs."""
    tools = {file.tool for file in files}
    if key == "parallel.strategy":
        if _kind(engine) == "zero" and "deepspeed" in tools:
            return ["deepspeed"]
        return [next(tool for tool in _ENGINES if tool in tools)]
    names = ("bf16", "fp16", "tf32", "precision.mode") if key == "precision.mode" else (key,)
    mapped_keys = [file_key for file_key in job.file_keys if file_key.fate == "mapped"]
    deciding = tools & {file_key.tool for file_key in mapped_keys if any(name in file_key.settings for name in names)}
    if deciding:
        return [tool for tool in READERS if tool in deciding]
    if key.startswith("parallel.") and "deepspeed" in tools:
        return ["deepspeed"]
    candidates = _ENGINES if key.startswith("parallel.") else READERS
    return [next(tool for tool in candidates if tool in tools)]


def _means(setting: Any, requested: str) -> bool:
    """Whether a config's setting is the requested one, as written on the command line."""
    text = as_override(setting)
    return text == requested or (requested, text) == ("bf16", "pure_bf16")  # a bf16 model keeps its type there


def _without_engine(job: ForeignJob) -> list[File]:
    """The files of plain data parallelism; DeepSpeed's own is kept, at stage 0, if there is no other."""
    tools = {file.tool for file in job.files}
    files = []
    for file in job.files:
        values = dict(file.values)
        if base(file.tool) == "trainer":
            values = {key: setting for key, setting in values.items() if key.split(".")[0] not in _ENGINE_SECTIONS}
        elif file.tool == "accelerate":
            data_parallel = "MULTI_CPU" if values.get("use_cpu") else "MULTI_GPU"
            values = {key: setting for key, setting in values.items() if not key.startswith("parallelism_config")}
            values["distributed_type"] = data_parallel if job.gpus > 1 else "NO"
        elif file.tool == "deepspeed" and tools & {"trainer", "accelerate", *RECIPES}:
            continue
        elif file.tool == "deepspeed":
            values = {key: setting for key, setting in values.items() if not key.startswith("zero_optimization.")}
            values["zero_optimization.stage"] = 0
        files.append(replace(file, values=values))
    return files


_ENGINE_SECTIONS = ("fsdp", "fsdp_config", "fsdp_version", "deepspeed", "dp_shard_size", "dp_replicate_size")


def _with_keys(files: Sequence[File], tool: Tool, tree: Mapping[str, Any]) -> list[File]:
    """The files with more keys; a whole DeepSpeed config in the Trainer's file becomes a file of its own."""
    deepspeed_tree = tree.get("deepspeed") if base(tool) == "trainer" else None
    tool_tree = {key: setting for key, setting in tree.items() if key != "deepspeed" or deepspeed_tree is None}
    changed = [
        replace(file, values={**file.values, **prefixed(tool, flatten(tool_tree))}) if file.tool == tool else file
        for file in files
    ]
    if deepspeed_tree is None:
        return changed
    if any(file.tool == "deepspeed" for file in changed):
        return _with_keys(changed, "deepspeed", deepspeed_tree)
    name = next(file.name for file in changed if base(file.tool) == "trainer")
    return [*changed, File(f"{name}: deepspeed", "deepspeed", flatten(deepspeed_tree))]


def _differences(job: ForeignJob, files: Sequence[File]) -> Iterator[str]:
    """What changed, file by file, as one would write it there."""
    old_files = {file.tool: file for file in job.files}
    n_files = sum(file.tool in READERS and ": " not in file.name for file in job.files)
    changes: dict[str, list[str]] = {}
    for file in (file for file in files if file.tool in READERS):
        old_values = old_files[file.tool].values if file.tool in old_files else {}
        changed = {key: setting for key, setting in file.values.items() if old_values.get(key) != setting}
        removed = {key.split(".")[0] for key in old_values} - {key.split(".")[0] for key in file.values}
        texts = [_as_yaml(changed)] if changed else []
        texts += [f"no {key}" for key in sorted(removed)]
        name, _, section = file.name.partition(": ")
        changes.setdefault(Path(name).name, []).extend(
            [f"{section}: {{{text}}}" for text in texts] if section else texts
        )
    left_out = "deepspeed" in old_files and not any(file.tool == "deepspeed" for file in files)
    if left_out and not any("no deepspeed" in texts for texts in changes.values()):
        name, _, section = old_files["deepspeed"].name.partition(": ")
        changes.setdefault(Path(name).name if section else "", []).append(f"no {section or Path(name).name}")
    for name, texts in changes.items():
        if texts:
            yield (f"{name}: " if n_files > 1 and name else "") + ", ".join(texts)


def _as_yaml(values: Mapping[str, Any]) -> str:
    """Dotted keys as the inside of a YAML mapping."""
    tree = nested(dict(values))
    return str(yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=10_000)).strip()[1:-1]


def as_mapping(text: str) -> dict[str, Any] | None:
    """The keys in a phrase; `None` for a phrase about the script."""
    try:
        tree = yaml.safe_load("{" + text + "}")
    except yaml.YAMLError:
        return None
    return tree if isinstance(tree, dict) and None not in tree.values() else None
