"""Faults in other tools' files: typos, dead keys, pairs that do not go together, values that change the mathematics.

A rule is a function of the files together; it yields (cause, fix) for each fault. `RULES` names the public thread that
reported the fault, or the place in the tool's code that refuses it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from ..errors import shown
from . import tables
from .combine import SCRIPTS_OWN, combine, unknown_key
from .files import File, family
from .gather import gather, read_model
from .tables import AUTO, NoCounterpart
from .together import Said, Together
from .tools import find
from .translate import translate

Fault = tuple[str, str]
_HF = "https://github.com/huggingface/"
_NOTHING: tuple[Any, ...] = (None, False, "none", "no", "NO_PREFETCH", 0, "", [])
_BF16_FAMILIES = ("t5", "mt5", "umt5", "longt5", "gemma", "gemma2", "gemma3_text")
"""Model types whose weights were trained in bf16, and overflow in fp16."""


@dataclass(frozen=True)
class Finding:
    """A fault in the files: an `error` stops their tool, a `warning` changes what it does or does nothing."""

    level: Literal["error", "warning"]
    cause: str
    fix: str
    thread: str = ""


@dataclass(frozen=True)
class Rule:
    level: Literal["error", "warning"]
    faults: Callable[[Together], Iterator[Fault]]
    thread: str = ""


def check(names: Sequence[str], model: str | None = None, gpus: int | None = None) -> list[Finding]:
    """The faults of files that are used together in one job; errors first.

    Args:
        names: files of Accelerate, DeepSpeed, the Trainer, and the model's `config.json`.
        model: the model's config, if it is not among `names`.
        gpus: ranks of the job; default: what the files say.

    Raises:
        ConfigError: a file cannot be read, or two are of one tool.
    """
    files, problems = gather(names)
    model = model or next((file.name for file in files if file.tool == "model"), None)
    job = combine(files, {} if model is None else read_model(model), problems)
    ranks = gpus or job.settings.get("gpus")
    translated = translate(job, model, gpus)
    found = [*_keys(job)]
    reported = {key for file in files for key in (*file.text, *tables.VALUES.get(file.tool, ()))}
    for problem in translated.problems:
        if problem.kind in ("unsaid", "no counterpart") or (
            problem.kind == "auto" and _filled_by_a_model(job, problem)
        ):
            continue
        if problem.keys == ("train_batch_size",) and not ranks and _divides(job):
            continue  # true for some number of ranks
        if problem.kind == "wrong value" and reported.issuperset(problem.keys):
            continue  # reported as text, or with the values that there are
        found.append(Finding("error", problem.cause, re.split("; to plan|, or set .* on the command", problem.fix)[0]))
    found += _unfilled(job, {key for problem in translated.problems for key in problem.keys})
    for rule in RULES:
        found += [Finding(rule.level, cause, fix, rule.thread) for cause, fix in rule.faults(job)]
    return sorted(found, key=lambda finding: finding.level != "error")


_DUMMIES = (
    "optimizer.params.lr", "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps",
)  # fmt: skip
"""Keys that Accelerate takes from DummyOptim and DummyScheduler."""
_NEUTRAL = ("optimizer.params.", "scheduler.params.")


def _unfilled(job: Together, reported: set[str]) -> Iterator[Finding]:
    """Each `auto` that changes no memory, and so stops no plan, but that their tools take for text."""
    for said in job.said:
        if said.fate != AUTO or said.tool != "deepspeed" or said.key in reported or job.has("trainer"):
            continue
        if job.has("accelerate") and (said.key in _DUMMIES or not said.key.startswith(_NEUTRAL)):
            continue
        fix = "write its value, or pass the Trainer's file too: DeepSpeed itself takes auto for text"
        yield Finding("error", f'{said.file}: {said.key}="auto", but no other file says what it becomes', fix)


def _filled_by_a_model(job: Together, problem: tables.Problem) -> bool:
    sizes = all(key.startswith("zero_optimization.") for key in problem.keys)
    return sizes and not job.model and (job.has("trainer") or job.has("accelerate"))


def _divides(job: Together) -> bool:
    total = job.value("deepspeed", "train_batch_size")
    unit = (job.settings.get("train.micro_batch_size") or 1) * (job.settings.get("train.grad_accum_steps") or 1)
    return isinstance(total, int) and total % unit == 0


def _keys(job: Together) -> Iterator[Finding]:
    """Faults of single keys: unknown, dead, or a number that is text."""
    sections = set()
    for said in job.said:
        if said.fate == "unknown":
            section = said.key.rpartition(".")[0]
            if said.note and said.note == section.rpartition(".")[2]:  # a whole section in the wrong place
                if section not in sections:
                    sections.add(section)
                    cause = f"{said.file}: {section}: {unknown_key(said.tool, said.key)}"
                    yield Finding("error", cause, f"move the section {said.note} to the top of the file")
                continue
            cause = f"{said.file}: {said.key}: {unknown_key(said.tool, said.key)}"
            sure = "refuses" in cause and not cause.endswith(SCRIPTS_OWN)
            fix = "remove it, or correct its name" if sure else "remove it, or correct its name, if the script has none"
            yield Finding("error" if sure else "warning", cause, f"did you mean {said.note}?" if said.note else fix)
        elif said.fate == "ignored" and said.value not in _NOTHING and not _reported_by_a_rule(said):
            yield Finding(
                "warning", f"{said.file}: {said.key}={shown(said.value)} does nothing: {said.note}", "remove it"
            )
    for file in job.files:
        if file.tool != "model":
            yield from _values(file)
        for key, text in file.text.items():
            if file.tool in ("deepspeed", "trainer") and _wants_a_number(file.tool, key, text):
                fix = f"write {key}: {_with_a_point(text)}" if file.tool == "trainer" else f"remove the quotes: {text}"
                yield Finding("error", f"{file.name}: {key}={text} is text for its reader, not a number", fix)


def _values(file: File) -> Iterator[Finding]:
    """Values that the tool does not have, and switches in quotes."""
    for key, value in file.values.items():
        known = tables.VALUES.get(file.tool, {}).get(key)
        written = "no" if value is False else str(value)
        if known and value is not None and value != AUTO and written.lower() not in [one.lower() for one in known]:
            close = get_close_matches(written, known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"it has {', '.join(known[:12])}"
            yield Finding("error", f"{file.name}: {key}={shown(value)}: {family(file.tool)} has no such value", fix)
        if str(value).lower() in ("true", "false") and isinstance(value, str) and _taken_as_it_is(file.tool, key):
            cause = f'{file.name}: {key}="{value}" is text, which counts as true there'
            yield Finding("error", cause, f"remove the quotes: {value.lower()}")
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = file.values.get(key, 1)
        if isinstance(value, int) and value < 1:
            yield Finding(
                "error", f"{file.name}: {key}={value}: it has to be 1 or more", "write 1 or more, or leave it out"
            )


def _taken_as_it_is(tool: str, key: str) -> bool:
    """Whether the tool reads a switch without looking at text: DeepSpeed at the top, and the Trainer."""
    section, _, rest = key.partition(".")
    if tool == "trainer":
        return not rest or (section == "fsdp_config" and rest in ("xla", "cpu_offload", "xla_fsdp_v2"))
    return tool == "deepspeed" and not rest


def _reported_by_a_rule(said: Said) -> bool:
    return said.key in ("max_grad_norm", "lr_scheduler_type") or said.note == "the DeepSpeed file decides it"


def _with_a_point(text: str) -> str:
    """`5e-5` as PyYAML reads it as a number: `5.0e-5`."""
    mantissa, sign, exponent = text.lower().partition("e")
    if not sign:
        return text
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"


def _wants_a_number(tool: str, key: str, text: str) -> bool:
    entry = find(tool, key)
    if entry is None or entry.ours is None:
        return False
    try:
        entry.ours(text)
    except NoCounterpart:
        return True
    return False


# Accelerate


def _beside_a_config_file(job: Together) -> Iterator[Fault]:
    file = job.file("accelerate")
    if file is None or not file.values.get("deepspeed_config.deepspeed_config_file"):
        return
    names = "gradient_accumulation_steps gradient_clipping zero_stage offload_optimizer_device offload_param_device"
    names += " offload_param_nvme_path offload_optimizer_nvme_path zero3_save_16bit_model"
    beside = [name for name in names.split() if f"deepspeed_config.{name}" in file.values]
    beside += ["mixed_precision"] if file.values.get("mixed_precision") is not None else []
    if beside and job.kind == "DEEPSPEED":
        yield (
            f"{file.name}: Accelerate refuses {', '.join(beside)} beside deepspeed_config_file",
            "remove them there, and set them in the DeepSpeed file",
        )


def _sagemaker(job: Together) -> Iterator[Fault]:
    file = job.file("accelerate")
    where = job.value("accelerate", "compute_environment", "LOCAL_MACHINE")
    if file is not None and where != "LOCAL_MACHINE":
        wrong = [
            key for key in ("num_processes", "machine_rank", "rdzv_backend", "main_process_port") if key in file.values
        ]
        if wrong:
            yield (
                f"{file.name}: compute_environment={where} has none of the cluster's keys: {', '.join(wrong)}",
                "set compute_environment: LOCAL_MACHINE, or remove those keys",
            )


def _init_flag(job: Together) -> Iterator[Fault]:
    if job.value("accelerate", "deepspeed_config.zero3_init_flag") in (True, "true") and job.stage not in (3, None):
        yield f"deepspeed_config.zero3_init_flag=true does nothing at stage {job.stage}", "set it to false"


def _processes(job: Together) -> Iterator[Fault]:
    n, machines = job.value("accelerate", "num_processes"), job.value("accelerate", "num_machines", 1)
    if job.kind == "MULTI_GPU" and n == 1:
        yield (
            "distributed_type=MULTI_GPU with num_processes=1",
            "set num_processes to 2 or more, or distributed_type: 'NO'",
        )
    if isinstance(n, int) and isinstance(machines, int) and machines > 1 and n % machines:
        yield (
            f"num_processes={n} is not a whole number for each of num_machines={machines}",
            f"num_processes counts all machines together: set a multiple of {machines}",
        )


# FSDP


def _fsdp(job: Together, name: str, default: Any = None) -> Any:
    """A key of FSDP, from the file that turns it on."""
    if job.kind == "FSDP":
        return job.value("accelerate", f"fsdp_config.fsdp_{name}", default)
    return job.value("trainer", f"fsdp_config.{name}", default)


def _is_on(value: Any) -> bool:
    return str(value).lower() == "true"


def _efficient_loading(job: Together) -> Iterator[Fault]:
    loads, syncs = _is_on(_fsdp(job, "cpu_ram_efficient_loading")), _fsdp(job, "sync_module_states", True)
    if job.fsdp_version() == 1 and loads and not _is_on(syncs):
        prefix = "fsdp_" if job.kind == "FSDP" else ""
        yield (
            f"{prefix}cpu_ram_efficient_loading=true, {prefix}sync_module_states=false: only rank 0 has the weights",
            f"set {prefix}sync_module_states: true",
        )


def _fsdp2_forms(job: Together) -> Iterator[Fault]:
    version, reshard = job.fsdp_version(), _fsdp(job, "reshard_after_forward")
    truth = isinstance(reshard, bool) or str(reshard).lower() in ("true", "false")
    if version == 2 and reshard is not None and not truth:
        yield (
            f"reshard_after_forward={reshard} is a strategy of FSDP1; FSDP2 takes true or false",
            "set it to true or false",
        )
    if version == 1 and reshard is not None and truth and job.kind == "FSDP":
        yield (
            f"fsdp_reshard_after_forward={shown(reshard)} is for FSDP2; FSDP1 takes a strategy",
            "set fsdp_version: 2, or FULL_SHARD",
        )
    if version == 2 and _is_on(_fsdp(job, "forward_prefetch")):
        yield "forward_prefetch=true: FSDP2 refuses it in Accelerate", "remove it"
    if version == 2 and "LOCAL_STATE_DICT" in str(_fsdp(job, "state_dict_type")).upper():
        yield "state_dict_type=LOCAL_STATE_DICT: FSDP2 has none", "set SHARDED_STATE_DICT or FULL_STATE_DICT"
    words = str(job.value("trainer", "fsdp", "")).split()
    for word in words if version == 2 else ():
        if word in ("hybrid_shard", "hybrid_shard_zero2", "no_shard"):
            yield f"fsdp={word} needs FSDP1", "set fsdp_config.version: 1, or fsdp: full_shard"


def _recompute_offload(job: Together) -> Iterator[Fault]:
    if _is_on(_fsdp(job, "activation_checkpointing_offload")) and not _is_on(_fsdp(job, "activation_checkpointing")):
        yield "activation_checkpointing_offload=true without activation_checkpointing", "set both, or neither"


def _gathers_twice(job: Together) -> Iterator[Fault]:
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if job.fsdp_version() and _is_on(job.value("trainer", key)):
            yield (
                f"{key}=true under FSDP gathers every parameter once more in backward",
                f"set fsdp_config.activation_checkpointing: true instead of {key}",
            )


def _wrapped_class(job: Together) -> Iterator[Fault]:
    names = _fsdp(job, "transformer_layer_cls_to_wrap")
    known = classes(str(job.model.get("model_type", "")))
    if not names or not known or not job.fsdp_version():
        return
    for name in map(str, names) if isinstance(names, list) else [part.strip() for part in str(names).split(",")]:
        if name not in known:
            blocks = [one for one in known if re.search(r"(Layer|Block)$", one)]
            close = get_close_matches(name, blocks, n=1, cutoff=0.5) or blocks[:1]
            fix = f"did you mean {close[0]}?" if close else "leave it out: transformers knows the model's layers"
            yield f"transformer_layer_cls_to_wrap={name}: {job.model['model_type']} has no such class", fix


def classes(model_type: str) -> list[str]:
    """The classes in transformers' module of a model type, read from its source; empty if there is none."""
    found = importlib.util.find_spec("transformers")
    name = model_type.replace("-", "_")
    if found is None or not found.origin or not name.isidentifier():
        return []
    source = Path(found.origin).parent / "models" / name / f"modeling_{name}.py"
    try:
        return re.findall(r"^class (\w+)\(", source.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return []


# DeepSpeed


def _no_zero_section(job: Together) -> Iterator[Fault]:
    file = job.file("deepspeed")
    if file and (job.has("trainer") or job.has("accelerate")) and not file.section("zero_optimization"):
        yield (
            f"{file.name} has no zero_optimization, which Accelerate demands, and the Trainer through it",
            'add "zero_optimization": {"stage": 2}',
        )


def _own_optimizer(job: Together) -> Iterator[Fault]:
    device = job.value("deepspeed", "zero_optimization.offload_optimizer.device", "none")
    alone = not job.has("trainer") and not job.has("accelerate") and not job.value("deepspeed", "optimizer.type")
    if device != "none" and alone and job.value("deepspeed", "zero_force_ds_cpu_optimizer", True):
        yield (
            f"zero_optimization.offload_optimizer.device={device} without an optimizer in the file: DeepSpeed refuses "
            "the script's, unless it is DeepSpeedCPUAdam or zero_force_ds_cpu_optimizer is false",
            "add an optimizer, or set zero_force_ds_cpu_optimizer to false",
        )


def _other_schedule(job: Together) -> Iterator[Fault]:
    theirs, wanted = job.value("deepspeed", "scheduler.type"), job.value("trainer", "lr_scheduler_type")
    shape = tables.SCHEDULES.get(str(wanted), {"optim.schedule": wanted})["optim.schedule"]
    given = tables.DS_SCHEDULES.get(str(theirs).lower(), {}).get("optim.schedule")
    if theirs and wanted and given != shape:
        yield (
            f"scheduler.type={theirs} wins over lr_scheduler_type={wanted}: the learning rate follows {theirs}",
            "remove the scheduler from the DeepSpeed file, and the Trainer makes its own",
        )


def _no_clipping(job: Together) -> Iterator[Fault]:
    file, norm = job.file("deepspeed"), job.value("trainer", "max_grad_norm", 1.0)
    if file and job.has("trainer") and "gradient_clipping" not in file.values and norm:
        yield (
            f"{file.name} has no gradient_clipping: max_grad_norm={norm} does nothing, gradients are not clipped",
            f'add "gradient_clipping": "auto" to {file.name}',
        )


def _not_gathered(job: Together) -> Iterator[Fault]:
    gathers = job.value("deepspeed", tables.GATHER) or job.value(
        "accelerate", "deepspeed_config.zero3_save_16bit_model"
    )
    if job.stage == 3 and job.has("trainer") and not gathers and job.value("trainer", "save_strategy", "steps") != "no":
        yield (
            f"{tables.GATHER} is off at stage 3: the Trainer's checkpoints hold shards, and no file of weights",
            f'set "{tables.GATHER.rpartition(".")[2]}": true, or convert with zero_to_fp32.py',
        )


def _nvme(job: Together) -> Iterator[Fault]:
    for part in ("optimizer", "param"):
        key = f"zero_optimization.offload_{part}"
        if job.value("deepspeed", f"{key}.device") == "nvme":
            if job.stage != 3:
                yield f"{key}.device=nvme at stage {job.stage}: only stage 3 swaps to a disk", "set stage 3, or cpu"
            if not job.value("deepspeed", f"{key}.nvme_path"):
                yield f"{key}.device=nvme without nvme_path", "set nvme_path to a directory on a local disk"
    if job.value("deepspeed", "zero_optimization.offload_optimizer.ratio", 1) != 1 and job.stage != 3:
        yield "zero_optimization.offload_optimizer.ratio needs stage 3", "remove it, or set stage 3"


def _steps(job: Together) -> Iterator[Fault]:
    total, warmup = (job.value("deepspeed", f"scheduler.params.{key}_num_steps") for key in ("total", "warmup"))
    if total == 0 and not job.value("trainer", "max_steps"):
        yield (
            "scheduler.params.total_num_steps=0: the schedule has no steps",
            'write the number, or "auto" for the Trainer',
        )
    if warmup == 0:
        yield "scheduler.params.warmup_num_steps=0: DeepSpeed 0.19.6 and later refuse it", "write 1"
    if AUTO not in (total, warmup) and isinstance(total, int) and isinstance(warmup, int) and 0 < total < warmup:
        yield f"scheduler.params.warmup_num_steps={warmup} is more than total_num_steps={total}", "lower the warm-up"


# Models and the Trainer


def _fp16_overflows(job: Together) -> Iterator[Fault]:
    kind = job.model.get("model_type")
    stored = str(job.model.get("dtype") or job.model.get("torch_dtype") or "")
    on = any(said.ours.get("fp16") is True for said in job.said)
    if on and ("bfloat16" in stored or kind in _BF16_FAMILIES):
        yield f"fp16 with {kind}, which was trained in bf16: its activations overflow fp16", "use bf16, or fp32"


def _best_model(job: Together) -> Iterator[Fault]:
    save, evaluate = (job.value("trainer", f"{kind}_strategy") for kind in ("save", "eval"))
    save = save or "steps"
    evaluate = evaluate or job.value("trainer", "evaluation_strategy") or "no"
    if not _is_on(job.value("trainer", "load_best_model_at_end")) or save == "best":
        return
    save, evaluate = ("no" if one is False else one for one in (save, evaluate))  # YAML's unquoted no
    if save != evaluate:
        yield (
            f"load_best_model_at_end=true with save_strategy={save}, eval_strategy={evaluate}: they have to be equal",
            f"set eval_strategy: {save}" if save != "no" else "set both to steps or epoch",
        )
    steps = job.value("trainer", "save_steps", 500)
    every = job.value("trainer", "eval_steps") or job.value("trainer", "logging_steps", 500)
    if save == evaluate == "steps" and isinstance(steps, int) and isinstance(every, int) and every and steps % every:
        yield (
            f"load_best_model_at_end=true with save_steps={steps}, which is not a multiple of eval_steps={every}",
            f"set save_steps: {max(1, round(steps / every)) * every}",
        )


def _unused_and_recomputed(job: Together) -> Iterator[Fault]:
    recomputes = any(
        _is_on(job.value("trainer", key)) for key in ("gradient_checkpointing", "activation_checkpointing")
    )
    if recomputes and _is_on(job.value("trainer", "ddp_find_unused_parameters")):
        yield (
            "ddp_find_unused_parameters=true with gradient checkpointing: DDP marks recomputed parameters ready twice",
            "set ddp_find_unused_parameters: false",
        )


def _saved_after_the_update(job: Together) -> Iterator[Fault]:
    if _is_on(job.value("trainer", "enable_jit_checkpoint")) and (job.stage is not None or job.has("deepspeed")):
        yield (
            "enable_jit_checkpoint=true under DeepSpeed, which updates the model in backward: a checkpoint between "
            "backward and the Trainer's own step holds one update more than its number says",
            "in the script, from transformers.trainer_jit_checkpoint import JITCheckpointCallback; "
            "JITCheckpointCallback.on_pre_optimizer_step = lambda *_, **__: None",
        )


RULES = (
    Rule("error", _beside_a_config_file, "https://github.com/yuvalkirstain/PickScore/issues/2"),
    Rule("error", _sagemaker, "https://github.com/gemlab-vt/NoiseCLR/issues/2"),
    Rule("warning", _init_flag),
    Rule("error", _processes),
    Rule("error", _efficient_loading, f"{_HF}transformers/issues/25100"),
    Rule("error", _fsdp2_forms, f"{_HF}transformers/pull/42578"),
    Rule("error", _recompute_offload),
    Rule("warning", _gathers_twice, f"{_HF}transformers/issues/30404"),
    Rule("error", _wrapped_class, "https://github.com/tatsu-lab/stanford_alpaca/issues/224"),
    Rule("error", _no_zero_section, "https://github.com/zjunlp/KnowLM/issues/87"),
    Rule("error", _own_optimizer, "https://github.com/OptimalScale/LMFlow/issues/693"),
    Rule("warning", _other_schedule, "https://github.com/QwenLM/Qwen/issues/672"),
    Rule("warning", _no_clipping, "https://github.com/axolotl-ai-cloud/axolotl/issues/1381"),
    Rule("warning", _not_gathered, f"{_HF}transformers/pull/34524"),
    Rule("error", _nvme),
    Rule("error", _steps, f"{_HF}transformers/issues/29348"),
    Rule("warning", _saved_after_the_update),
    Rule("warning", _fp16_overflows, f"{_HF}transformers/issues/10819"),
    Rule("error", _best_model, f"{_HF}transformers/pull/12786"),
    Rule("error", _unused_and_recomputed, f"{_HF}transformers/pull/13961"),
)
