"""Settings in the keys of the tool that runs the loop, planned where that tool's files say what the job is."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from ..config.layers import split_override
from ..config.load import LoadedConfig
from ..errors import ConfigError, ShardkitError, gib
from ..oom.advice import Advice
from ..plan.advise import Change, changes_that_fit
from ..plan.client import Planner
from ..plan.model.estimate import MemoryEstimate
from ..plan.search.ladder import Rung, Step
from ..plan.target import Target
from .files import File, flatten
from .gather import prefixed
from .tools import RECIPES, base
from .translate import Job, nested

Tool = Literal["trainer", "trl", "llamafactory", "axolotl", "accelerate", "deepspeed", "lightning", "torch"]
LIMIT_S = 90.0
"""Most seconds for the plans of one post-mortem."""
_ZERO = ("zero1", "zero2", "zero3")
_SHARDED = ("fsdp", "hsdp")
_AUTOS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_READERS: tuple[Tool, ...] = ("trainer", "trl", "llamafactory", "axolotl", "accelerate", "deepspeed")
_ENGINES: tuple[Tool, ...] = ("accelerate", "trainer", "trl", "llamafactory", "axolotl", "deepspeed")
"""Who decides the engine if there are several."""
_TECHNIQUES = ("parallel.", "precision.", "activation.", "model.loss_chunk_size")
_RECOMPUTE = "model.gradient_checkpointing_enable()"
_LOADER = "batch_size={} in the DataLoader"
Phrase = str | Callable[[Any, str], str | None] | None
"""A text with a place for the value, or (value, strategy) → text; `None` if the tool has no such setting."""


def _trainer_engine(value: str, strategy: str) -> str | None:
    if value in _ZERO:  # without the others DeepSpeed refuses the file, and nothing is clipped
        autos = "" if strategy in _ZERO else "".join(f"{key}: auto, " for key in _AUTOS)
        return f"deepspeed: {{{autos}zero_optimization: {{stage: {value[-1]}}}}}"
    return "fsdp: true, fsdp_config: {version: 2}" if value == "fsdp" else None


def _axolotl_engine(value: str, strategy: str) -> str | None:
    if value == "fsdp":
        return "fsdp_version: 2, fsdp_config: {reshard_after_forward: true}"
    return _trainer_engine(value, strategy)


def _accelerate_engine(value: str, strategy: str) -> str | None:
    if value in _ZERO:
        return f"distributed_type: DEEPSPEED, deepspeed_config: {{zero_stage: {value[-1]}}}"
    return "distributed_type: FSDP, fsdp_config: {fsdp_version: 2}" if value == "fsdp" else None


def _lightning_engine(value: str, strategy: str) -> str | None:
    names = {**{zero: f"deepspeed_stage_{zero[-1]}" for zero in _ZERO}, "fsdp": "fsdp"}
    return f'Trainer(strategy="{names[value]}")' if value in names else None


def _of_engine(under_zero: str | None, under_fsdp: str | None) -> Callable[[Any, str], str | None]:
    return lambda value, strategy: under_zero if strategy in _ZERO else under_fsdp


_TRAINER: dict[str, Phrase] = {
    "train.micro_batch_size": "per_device_train_batch_size: {}",
    "train.grad_accum_steps": "gradient_accumulation_steps: {}",
    "activation.policy=full": "gradient_checkpointing: true",
    "precision.mode=bf16": "bf16: true",
    "optim.name=adamw8bit": "optim: adamw_torch_8bit",
    "parallel.strategy": _trainer_engine,
    "parallel.offload_optimizer=cpu": "deepspeed: {zero_optimization: {offload_optimizer: {device: cpu}}}",
    "parallel.offload_param=cpu": _of_engine(
        "deepspeed: {zero_optimization: {offload_param: {device: cpu}}}", "fsdp_config: {cpu_offload: true}"
    ),
    "parallel.reshard_after_forward=true": "fsdp_config: {reshard_after_forward: true}",
    "data.workers": "dataloader_num_workers: {}",
}
_PHRASES: dict[Tool, dict[str, Phrase]] = {
    "trainer": _TRAINER,
    "trl": _TRAINER,
    "llamafactory": {**_TRAINER, "activation.policy=full": "disable_gradient_checkpointing: false"},
    "axolotl": {
        **_TRAINER,
        "train.micro_batch_size": "micro_batch_size: {}",
        "optim.name=adamw8bit": "optimizer: adamw_torch_8bit",
        "parallel.strategy": _axolotl_engine,
        "parallel.offload_param=cpu": _of_engine(
            "deepspeed: {zero_optimization: {offload_param: {device: cpu}}}", "fsdp_config: {offload_params: true}"
        ),
    },
    "accelerate": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "Accelerator(gradient_accumulation_steps={})",
        "activation.policy=full": lambda value, strategy: (
            "fsdp_config: {fsdp_activation_checkpointing: true}" if strategy == "fsdp" else _RECOMPUTE
        ),
        "precision.mode=bf16": "mixed_precision: bf16",
        "parallel.strategy": _accelerate_engine,
        "parallel.offload_optimizer=cpu": "deepspeed_config: {offload_optimizer_device: cpu}",
        "parallel.offload_param=cpu": _of_engine(
            "deepspeed_config: {offload_param_device: cpu}", "fsdp_config: {fsdp_offload_params: true}"
        ),
        "parallel.reshard_after_forward=true": "fsdp_config: {fsdp_reshard_after_forward: true}",
        "data.workers": "num_workers={} in the DataLoader",
    },
    "deepspeed": {
        "train.micro_batch_size": "train_micro_batch_size_per_gpu: {}",
        "train.grad_accum_steps": "gradient_accumulation_steps: {}",
        "activation.policy=full": _RECOMPUTE,
        "precision.mode=bf16": "bf16: {enabled: true}",
        "parallel.strategy": lambda value, strategy: (
            f"zero_optimization: {{stage: {value[-1]}}}" if value in _ZERO else None
        ),
        "parallel.offload_optimizer=cpu": "zero_optimization: {offload_optimizer: {device: cpu}}",
        "parallel.offload_param=cpu": "zero_optimization: {offload_param: {device: cpu}}",
        "data.workers": "num_workers={} in the DataLoader",
    },
    "lightning": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "Trainer(accumulate_grad_batches={})",
        "activation.policy=full": _RECOMPUTE,
        "precision.mode=bf16": 'Trainer(precision="bf16-mixed")',
        "parallel.strategy": _lightning_engine,
        "parallel.offload_optimizer=cpu": "DeepSpeedStrategy(offload_optimizer=True)",
        "parallel.offload_param=cpu": _of_engine(
            "DeepSpeedStrategy(offload_parameters=True)", "FSDPStrategy(cpu_offload=True)"
        ),
        "data.workers": "num_workers={} in the DataLoader",
    },
    "torch": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "{} micro-batches for each optimizer step",
        "activation.policy=full": _RECOMPUTE,
        "precision.mode=bf16": "torch.autocast with torch.bfloat16 around forward and loss",
        "optim.name=adamw8bit": "torchao.optim.AdamW8bit",
        "parallel.strategy": lambda value, strategy: "fully_shard(model)" if value == "fsdp" else None,
        "parallel.offload_param=cpu": _of_engine(None, "fully_shard(…, offload_policy=CPUOffloadPolicy())"),
        "parallel.reshard_after_forward=true": "fully_shard(…, reshard_after_forward=True)",
        "data.workers": "num_workers={} in the DataLoader",
    },
}
_BUCKETS: dict[Tool, str] = {
    **dict.fromkeys(
        ("trainer", "trl", "llamafactory", "axolotl"), "deepspeed: {zero_optimization: {reduce_bucket_size: {}}}"
    ),
    "accelerate": "zero_optimization: {reduce_bucket_size: {}} in the deepspeed_config_file",
    "deepspeed": "zero_optimization: {reduce_bucket_size: {}}",
    "lightning": "DeepSpeedStrategy(reduce_bucket_size={})",
    "torch": "zero_optimization: {reduce_bucket_size: {}}",
}
_WITHOUT_METHOD = "torch.utils.checkpoint around each block"


def phrase(tool: Tool, setting: str, strategy: str, has_checkpointing: bool = True) -> str | None:
    """One setting of shardkit, `train.micro_batch_size=2`, in a tool's words; `None` if the tool has none.

    Args:
        strategy: the engine that the setting is for; of a change of the engine, the one that runs before it.
        has_checkpointing: whether the model has transformers' `gradient_checkpointing_enable`.
    """
    key, _, value = setting.partition("=")
    known = _PHRASES[tool]
    found = known.get(setting, known.get(key))
    text = found(value, strategy) if callable(found) else found and found.replace("{}", value)
    return _WITHOUT_METHOD if text == _RECOMPUTE and not has_checkpointing else text


class NoKey(ConfigError):
    """No key of a job's files means a setting."""


@dataclass(frozen=True)
class Told:
    """Settings of shardkit as a change of a job's files.

    Attributes:
        text: the change, in keys of the files or in words about the script.
        job: the job of the changed files.
        overrides: settings that no file has.
    """

    text: str
    job: Job
    overrides: tuple[str, ...]

    def load(self) -> LoadedConfig:
        """The config of the changed job.

        Raises:
            ConfigError: the changed files contradict each other, or a value is refused.
        """
        return self.job.load(self.overrides)


def tell(job: Job, overrides: Sequence[str], settings: Sequence[str], has_checkpointing: bool = True) -> Told:
    """Say settings, such as `parallel.strategy=zero2`, in a job's files, and read the changed files again.

    Args:
        overrides: settings that no file has.
        has_checkpointing: as for `phrase`.

    Raises:
        ConfigError: the files have no key for a setting, or mean something else by it.
    """
    asked = dict(split_override(one) for one in settings)
    before = job.load(overrides).config.parallel.strategy
    engine, given = asked.get("parallel.strategy", before), {split_override(one)[0] for one in overrides}
    files, more, script = list(job.files), list(overrides), list[str]()
    for key, value in sorted(asked.items(), key=lambda one: one[0] != "parallel.strategy"):
        if key == "parallel.strategy" and _kind(engine) != _kind(before) and key not in given:
            files = _without_engine(job, engine)
            if _kind(engine) == "":
                continue
        at = before if key == "parallel.strategy" else engine
        for tool in _tools(job, files, key, engine):
            text = phrase(tool, f"{key}={value}", at, has_checkpointing)
            if text is None:
                raise NoKey(f"no key of {_files(job)} means {key}={value}", "set it in a config of shardkit")
            tree = None if key in given else _mapping(text)
            if tree is None:
                script.append(text)
                more = [one for one in more if split_override(one)[0] != key] + [f"{key}={value}"]
            else:
                files = _with(files, tool, tree)
    told = _reread(job, files, more, script)
    config = told.load().config
    for key, value in asked.items():
        section, _, name = key.partition(".")
        if not _means(getattr(getattr(config, section), name), value):
            raise NoKey(f"{told.text} does not mean {key}={value}", "set it in a config of shardkit")
    return told


def plain(job: Job, overrides: Sequence[str]) -> Told:
    """The job without engine, half precision and checkpointing, as far as its files decide them."""
    ranks = "ddp" if job.gpus > 1 else "single"
    sharded = _kind(job.settings["parallel.strategy"]) != ""
    files = []
    for file in _without_engine(job, ranks) if sharded else job.files:
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
    more = [one for one in overrides if not one.startswith(_TECHNIQUES)]
    return _reread(job, files, more, [])


_RECOMPUTES = ("gradient_checkpointing", "activation_checkpointing")


def _reread(job: Job, files: Sequence[File], overrides: Sequence[str], script: Sequence[str]) -> Told:
    assert job.reread is not None
    found = job.reread(files)
    lost = [key for key in job.settings if key.startswith("train.") and key not in found.settings]
    given = {split_override(one)[0] for one in overrides}
    kept = [f"{key}={json.dumps(job.settings[key])}" for key in lost if key not in given]
    settled = {problem.ours for problem in job.problems}
    more = [one for one in found.problems if one.ours not in settled and one.ours not in given | set(lost)]
    if more:
        raise ConfigError(more[0].cause, more[0].fix)
    text = "; ".join([*_differences(job, files), *script])
    return Told(text, found, (*kept, *overrides))


def _kind(strategy: str) -> str:
    return "zero" if strategy in _ZERO else "fsdp" if strategy in _SHARDED else ""


def _files(job: Job) -> str:
    return " + ".join(Path(file.name).name for file in job.files if file.tool in _READERS)


def _tools(job: Job, files: Sequence[File], key: str, engine: str) -> list[Tool]:
    """The tools whose files say the setting now, else the one in whose file it belongs."""
    present = {file.tool for file in files}
    if key == "parallel.strategy":
        if _kind(engine) == "zero" and "deepspeed" in present:
            return ["deepspeed"]
        return [next(tool for tool in _ENGINES if tool in present)]
    names = ("bf16", "fp16", "tf32", "precision.mode") if key == "precision.mode" else (key,)
    said = {one.tool for one in job.said if one.fate == "mapped" and any(name in one.ours for name in names)}
    if said & present:
        return [tool for tool in _READERS if tool in said & present]
    if key.startswith("parallel.") and "deepspeed" in present:
        return ["deepspeed"]
    of_engine = _ENGINES if key.startswith("parallel.") else _READERS
    return [next(tool for tool in of_engine if tool in present)]


def _means(found: Any, asked: str) -> bool:
    value = {None: "null", True: "true", False: "false"}.get(found, str(found))
    return value == asked or (asked, value) == ("bf16", "pure_bf16")  # a bf16 model keeps its type there


def _without_engine(job: Job, strategy: str) -> list[File]:
    """The files of plain data parallelism; DeepSpeed's own is kept, at stage 0, if there is no other."""
    present = {file.tool for file in job.files}
    found = []
    for file in job.files:
        values = dict(file.values)
        if base(file.tool) == "trainer":
            values = {key: one for key, one in values.items() if key.split(".")[0] not in _SECTIONS}
        elif file.tool == "accelerate":
            several = "MULTI_CPU" if values.get("use_cpu") else "MULTI_GPU"
            values = {key: one for key, one in values.items() if not key.startswith("parallelism_config")}
            values["distributed_type"] = several if job.gpus > 1 else "NO"
        elif file.tool == "deepspeed" and present & {"trainer", "accelerate", *RECIPES}:
            continue
        elif file.tool == "deepspeed":
            values = {key: one for key, one in values.items() if not key.startswith("zero_optimization.")}
            values["zero_optimization.stage"] = 0
        found.append(replace(file, values=values))
    return found


_SECTIONS = ("fsdp", "fsdp_config", "fsdp_version", "deepspeed", "dp_shard_size", "dp_replicate_size")


def _with(files: Sequence[File], tool: Tool, tree: Mapping[str, Any]) -> list[File]:
    """The files with more keys; a whole DeepSpeed config in the Trainer's file becomes a file of its own."""
    inner = tree.get("deepspeed") if base(tool) == "trainer" else None
    own = {key: value for key, value in tree.items() if key != "deepspeed" or inner is None}
    found = []
    for file in files:
        if file.tool == tool:
            file = replace(file, values={**file.values, **prefixed(tool, flatten(own))})
        found.append(file)
    if inner is None:
        return found
    if any(file.tool == "deepspeed" for file in found):
        return _with(found, "deepspeed", inner)
    name = next(file.name for file in found if base(file.tool) == "trainer")
    return [*found, File(f"{name}: deepspeed", "deepspeed", flatten(inner))]


def _differences(job: Job, files: Sequence[File]) -> Iterator[str]:
    """What changed, file by file, as one would write it there."""
    old = {file.tool: file for file in job.files}
    several = sum(file.tool in _READERS and ": " not in file.name for file in job.files) > 1
    parts: dict[str, list[str]] = {}
    for file in (one for one in files if one.tool in _READERS):
        before = old[file.tool].values if file.tool in old else {}
        changed = {key: value for key, value in file.values.items() if before.get(key) != value}
        gone = {key.split(".")[0] for key in before} - {key.split(".")[0] for key in file.values}
        texts = [_written(changed)] if changed else []
        texts += [f"no {key}" for key in sorted(gone)]
        place, _, section = file.name.partition(": ")
        wrapped = [f"{section}: {{{text}}}" for text in texts] if section else texts
        parts.setdefault(Path(place).name, []).extend(wrapped)
    lost = next((one for tool, one in old.items() if tool == "deepspeed" and tool not in {f.tool for f in files}), None)
    if lost is not None and not any("no deepspeed" in texts for texts in parts.values()):
        place, _, section = lost.name.partition(": ")
        parts.setdefault(Path(place).name if section else "", []).append(f"no {section or Path(place).name}")
    for name, texts in parts.items():
        if texts:
            yield (f"{name}: " if several and name else "") + ", ".join(texts)


def _written(values: Mapping[str, Any]) -> str:
    """Dotted keys as the inside of a YAML mapping."""
    tree = nested(dict(values))
    return str(yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=10_000)).strip()[1:-1]


def changes_in_their_keys(
    job: Job, overrides: Sequence[str], estimate: MemoryEstimate, planner: Planner, has_checkpointing: bool = True
) -> list[Change]:
    """As `changes_that_fit`, of a job of other tools: what its files can say, each planned in their loop."""
    texts: dict[str, str] = {}

    def predict(settings: Sequence[str]) -> MemoryEstimate:
        told = tell(job, overrides, settings, has_checkpointing)
        texts[" ".join(settings)] = told.text
        return planner.predict(told.load().config, loop=told.job.loop)

    found = changes_that_fit(job.load(overrides).config, estimate, planner.target, predict)
    return [replace(change, said=texts[change.settings]) for change in found]


def climb(job: Job, overrides: Sequence[str], rungs: Sequence[Rung], target: Target) -> Iterator[Step]:
    """Predict a job of other tools: as it is, without its techniques, then each rung on top of those below it.

    A rung that no key means is refused with the reason, and those above it go on without it.

    Raises:
        ConfigError: the job's files leave something open.
    """
    bare = plain(job, overrides)
    name = f"plain {bare.load().config.parallel.strategy}"
    with Planner(target) as planner:

        def step(rung: Rung, told: Told) -> Step:
            estimate = planner.predict(told.load().config, loop=told.job.loop)
            return Step(rung, rung.settings, estimate.needed, estimate.verdict, said=told.text)

        yield step(Rung("the files as they are", ()), Told("", job, tuple(overrides)))
        yield step(Rung(name, ()), bare)
        below, waiting = bare, tuple[str, ...]()
        for rung in rungs:
            settings = (*waiting, *rung.settings)
            try:
                told = tell(below.job, below.overrides, settings)
                found = step(rung, told)
                below, waiting = told, ()
            except NoKey as error:
                found = Step(rung, rung.settings, None, None, error.cause, said="")
            except ShardkitError as error:  # the rung above may be without what is refused here
                waiting = settings
                found = Step(rung, rung.settings, None, None, error.cause, said="")
            yield found


@dataclass
class TheirKeys:
    """Says advice in a tool's keys, and plans it.

    Args:
        strategy: the engine that runs, in shardkit's word.
        has_checkpointing: as for `phrase`.
    """

    tool: Tool
    strategy: str
    has_checkpointing: bool

    def words(self, advice: list[Advice], buckets: tuple[int, int] | None = None) -> list[Advice]:
        """The advice that the tool can follow, in its keys, the largest saving first.

        Args:
            buckets: (elements that are enough for a reduce bucket of DeepSpeed, bytes saved).
        """
        found = [replace(one, change=text) for one in advice if (text := self._said(one.change)) is not None]
        if buckets is not None:
            text = _BUCKETS[self.tool].replace("{}", str(buckets[0]))
            why = "DeepSpeed makes the whole bucket, though the model's gradients need less"
            found.append(Advice(text, buckets[1], "none to speak of", why))
        return sorted(found, key=lambda one: -(one.saving_bytes or 0))

    def planned(self, advice: list[Advice], job: Job, target: Target, overrides: Sequence[str]) -> list[Advice]:
        """Planned changes, those that fit first and pairs if no single one does, then the rest of `advice`.

        Args:
            job: the job as their files describe it.
            overrides: settings that no file has.

        Raises:
            ShardkitError: the job cannot be planned.
        """
        config = job.load(overrides).config
        with Planner(target, loop=job.loop) as planner:
            timer = threading.Timer(LIMIT_S, planner.stop)
            timer.daemon = True
            timer.start()
            try:
                estimate = planner.predict(config)
                if self.tool in _READERS:
                    changes = changes_in_their_keys(job, overrides, estimate, planner, self.has_checkpointing)
                else:
                    changes = changes_that_fit(
                        config, estimate, target, lambda more: planner.predict(job.load([*overrides, *more]).config)
                    )
            finally:
                timer.cancel()
        found = []
        for change in changes:
            text, verdict = change.said or self._said(change.settings), change.estimate.verdict
            if text is not None and verdict is not None and target.device_memory is not None:
                planned = f"planned: {gib(change.estimate.needed)} of {gib(target.device_memory)}, {verdict}"
                why = f"{gib(estimate.needed)} are planned without it"
                found.append(Advice(text, change.saving, change.cost, why, planned, verdict))
        known = {one.change for one in found}
        room = sum(one.verdict != "does not fit" for one in found)
        return found[:room] + [one for one in advice if one.change not in known] + found[room:]

    def _said(self, change: str) -> str | None:
        if "=" not in change or change.startswith("PYTORCH_"):
            return change
        settings = change.split(" ")
        engine = next((s.partition("=")[2] for s in settings if s.startswith("parallel.strategy=")), self.strategy)
        texts = [
            phrase(
                self.tool, one, self.strategy if one.startswith("parallel.strategy=") else engine,
                self.has_checkpointing,
            )
            for one in settings
        ]  # fmt: skip
        return None if None in texts else _joined([text for text in texts if text])


def _joined(texts: list[str]) -> str:
    """Texts as one; parts of one YAML mapping are merged: two of `deepspeed:` would not be read."""
    trees = [_mapping(text) for text in texts]
    if len(texts) < 2 or None in trees:
        return ", ".join(texts)
    merged: dict[str, Any] = {}
    for tree in trees:
        _merge(merged, tree or {})
    return yaml.safe_dump(merged, default_flow_style=True, sort_keys=False, width=10_000).strip()[1:-1]


def _mapping(text: str) -> dict[str, Any] | None:
    try:
        found = yaml.safe_load("{" + text + "}")
    except yaml.YAMLError:
        return None
    return found if isinstance(found, dict) and None not in found.values() else None


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value
