"""Notes on a job's files: values that silently change the mathematics, and keys that their tool does not know.

A plan of memory does not depend on them, and the tool trains on without a word. Each rule is a function of the job
that yields notes; the thread above a rule is one that reported the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import tables
from .combine import SCRIPTS_OWN, unknown_key
from .tables import AUTO, NoCounterpart
from .together import Together
from .tools import find

_BF16_MODELS = ("t5", "mt5", "umt5", "longt5", "gemma", "gemma2", "gemma3_text")
"""Model types whose weights were trained in bf16, and overflow in fp16."""
_FROM_DUMMIES = (
    "optimizer.params.lr", "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps",
)  # fmt: skip
"""Keys of DeepSpeed that Accelerate takes from DummyOptim and DummyScheduler in the script."""
_NEUTRAL_SECTIONS = ("optimizer.params.", "scheduler.params.")


@dataclass(frozen=True)
class Note:
    """A fault that does not change memory: the file and line with the cause, and the change that corrects it."""

    cause: str
    fix: str


def notes(job: Together) -> tuple[Note, ...]:
    """Every note on the files of one job; unknown keys first."""
    return (*_unknown_keys(job), *(note for rule in RULES for note in rule(job)))


def _unknown_keys(job: Together) -> Iterator[Note]:
    """Keys that their tool does not know, but for those that a script may read for itself."""
    moved_sections = set()
    for file_key in job.file_keys:
        fault = unknown_key(file_key.tool, file_key.key)
        if file_key.fate != "unknown" or fault.endswith(SCRIPTS_OWN):
            continue
        at, section = job.line_of(file_key.tool, file_key.key), file_key.key.rpartition(".")[0]
        if file_key.note and file_key.note == section.rpartition(".")[2]:
            if section not in moved_sections:
                moved_sections.add(section)
                yield Note(f"{at}: {section}: {fault}", f"move the section {file_key.note} to the top of the file")
        else:
            fix = f"did you mean {file_key.note}?" if file_key.note else "remove it, or correct its name"
            yield Note(f"{at}: {file_key.key}: {fault}", fix)


def _quoted_switches(job: Together) -> Iterator[Note]:
    for file in job.files:
        for key, value in file.values.items() if file.tool != "model" else ():
            if (
                isinstance(value, str)
                and value.lower() in ("true", "false")
                and _reads_any_text_as_true(file.tool, key)
            ):
                yield Note(
                    f'{file.at(key)}: {key}="{value}" is text, which counts as true there',
                    f"remove the quotes: {value.lower()}",
                )


def _reads_any_text_as_true(tool: str, key: str) -> bool:
    """Whether the tool takes a switch without looking at text: DeepSpeed at the top, and the Trainer."""
    section, _, option = key.partition(".")
    if tool == "trainer":
        return not option or (section == "fsdp_config" and option in ("xla", "cpu_offload", "xla_fsdp_v2"))
    return tool == "deepspeed" and not option


def _numbers_read_as_text(job: Together) -> Iterator[Note]:
    """The plan reads `5e-5` as a number; PyYAML, and so the tool, as text."""
    for file in job.files:
        for key, text in file.text.items() if file.tool in ("deepspeed", "trainer") else ():
            if _wants_a_number(file.tool, key, text):
                fix = f"write {key}: {_with_a_point(text)}" if file.tool == "trainer" else f"remove the quotes: {text}"
                yield Note(f"{file.at(key)}: {key}={text} is text for its reader, not a number", fix)


def _with_a_point(text: str) -> str:
    """`5e-5` as PyYAML reads it as a number: `5.0e-5`."""
    mantissa, sign, exponent = text.lower().partition("e")
    if not sign:
        return text
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"


def _wants_a_number(tool: str, key: str, text: str) -> bool:
    entry = find(tool, key)
    if entry is None or entry.convert is None:
        return False
    try:
        entry.convert(text)
    except NoCounterpart:
        return True
    return False


def _unfilled_autos(job: Together) -> Iterator[Note]:
    """Each `auto` that changes no memory, and so stops no plan, but that no other file fills in."""
    reported = {key for problem in job.problems for key in problem.keys}
    for file_key in job.file_keys:
        if file_key.fate != AUTO or file_key.tool != "deepspeed" or file_key.key in reported or job.has("trainer"):
            continue
        if job.has("accelerate") and (file_key.key in _FROM_DUMMIES or not file_key.key.startswith(_NEUTRAL_SECTIONS)):
            continue
        yield Note(
            f'{job.line_of("deepspeed", file_key.key)}: {file_key.key}="auto", but no other file says what it becomes',
            "write its value, or pass the Trainer's file too: DeepSpeed itself takes auto for text",
        )


# https://github.com/huggingface/transformers/issues/25100
def _weights_on_rank_0_alone(job: Together) -> Iterator[Note]:
    tool, prefix = ("accelerate", "fsdp_config.fsdp_") if job.kind == "FSDP" else ("trainer", "fsdp_config.")
    loads, syncs = f"{prefix}cpu_ram_efficient_loading", f"{prefix}sync_module_states"
    if job.fsdp_version() == 1 and job.is_on(tool, loads) and not job.is_on(tool, syncs, True):
        loads, syncs = loads.partition(".")[2], syncs.partition(".")[2]
        yield Note(
            f"{job.line_of(tool, f'fsdp_config.{syncs}')}: {loads}=true, {syncs}=false: only rank 0 has the weights",
            f"set {syncs}: true",
        )


# https://github.com/QwenLM/Qwen/issues/672
def _schedule_of_deepspeed(job: Together) -> Iterator[Note]:
    name, argument = job.value("deepspeed", "scheduler.type"), job.value("trainer", "lr_scheduler_type")
    shape = tables.SCHEDULES.get(str(argument), {"optim.schedule": argument})["optim.schedule"]
    shape_there = tables.DS_SCHEDULES.get(str(name).lower(), {}).get("optim.schedule")
    if name and argument and shape_there != shape:
        at = job.line_of("deepspeed", "scheduler.type")
        yield Note(
            f"{at}: scheduler.type={name} wins over lr_scheduler_type={argument}: the learning rate follows {name}",
            f"remove the scheduler at {at}, and the Trainer makes its own",
        )


# https://github.com/huggingface/transformers/issues/29348
def _steps_of_deepspeeds_schedule(job: Together) -> Iterator[Note]:
    total, warmup = (job.value("deepspeed", f"scheduler.params.{key}_num_steps") for key in ("total", "warmup"))
    if total == 0 and not job.value("trainer", "max_steps"):
        yield Note(
            f"{job.line_of('deepspeed', 'scheduler.params.total_num_steps')}: scheduler.params.total_num_steps=0: the "
            "schedule has no steps",
            'write the number, or "auto" for the Trainer',
        )
    if isinstance(total, int) and isinstance(warmup, int) and 0 < total < warmup:
        yield Note(
            f"{job.line_of('deepspeed', 'scheduler.params.warmup_num_steps')}: scheduler.params.warmup_num_steps="
            f"{warmup} is more than total_num_steps={total}",
            "lower the warm-up",
        )


# https://github.com/axolotl-ai-cloud/axolotl/issues/1381
def _no_clipping(job: Together) -> Iterator[Note]:
    file, norm = job.file("deepspeed"), job.value("trainer", "max_grad_norm", 1.0)
    if file and job.has("trainer") and "gradient_clipping" not in file.values and norm:
        yield Note(
            f"{file.name} has no gradient_clipping: max_grad_norm={norm} does nothing, gradients are not clipped",
            f'add "gradient_clipping": "auto" to {file.name}',
        )


# https://github.com/huggingface/transformers/issues/10819
def _fp16_overflows(job: Together) -> Iterator[Note]:
    model_type = job.model.get("model_type")
    stored = str(job.model.get("dtype") or job.model.get("torch_dtype") or "")
    switch = next((file_key for file_key in job.file_keys if file_key.settings.get("fp16") is True), None)
    if switch is not None and ("bfloat16" in stored or model_type in _BF16_MODELS):
        yield Note(
            f"{job.line_of(switch.tool, switch.key)}: fp16 with {model_type}, which was trained in bf16: its "
            "activations overflow fp16",
            "use bf16, or fp32",
        )


def _saved_after_the_update(job: Together) -> Iterator[Note]:
    if job.is_on("trainer", "enable_jit_checkpoint") and (job.stage is not None or job.has("deepspeed")):
        yield Note(
            f"{job.line_of('trainer', 'enable_jit_checkpoint')}: enable_jit_checkpoint=true under DeepSpeed, which "
            "updates the model in backward: a checkpoint between backward and the Trainer's own step holds one update "
            "more than its number says",
            "in the script, from transformers.trainer_jit_checkpoint import JITCheckpointCallback; "
            "JITCheckpointCallback.on_pre_optimizer_step = lambda *_, **__: None",
        )


RULES: tuple[Callable[[Together], Iterator[Note]], ...] = (
    _quoted_switches,
    _numbers_read_as_text,
    _unfilled_autos,
    _weights_on_rank_0_alone,
    _schedule_of_deepspeed,
    _steps_of_deepspeeds_schedule,
    _no_clipping,
    _fp16_overflows,
    _saved_after_the_update,
)
