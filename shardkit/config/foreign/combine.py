"""Put the files of one job together: settle each value, find contradictions, fill in `auto`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

from ..errors import shown
from . import tables
from .files import File, family
from .tables import AUTO, NoCounterpart, Problem, Settings, WrongValue, find
from .unplanned import effect_of

Fate = Literal["mapped", "default", "auto", "absent", "ignored", "unknown", "unplanned"]
PSEUDO = ("fp16", "bf16", "tf32", "engine", "gpus", "machines")
"""Keys of `Together.settings` that are not keys here; `translate` turns them into such."""
_SIZES = {"reduce_bucket_size": 1.0, "stage3_prefetch_bucket_size": 0.9}
_NO_FSDP = "on CPUs Accelerate shards nothing and trains with DDP"
_FROM_A_SCRIPT = ("train_micro_batch_size_per_gpu",)
_DUMMIES = (
    "optimizer.params.lr", "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps",
)  # fmt: skip
_FSDP1_ONLY = ("sharding_strategy", "use_orig_params", "sync_module_states", "backward_prefetch", "forward_prefetch")


@dataclass(frozen=True)
class Said:
    """A key of a file, and where it ended.

    Attributes:
        ours: keys here with their values; for `auto`, those that it becomes.
        note: why it is absent or ignored, the key that was probably meant, the file that fills in `auto`, or what an
            `unplanned` key changes.
    """

    file: str
    tool: str
    key: str
    value: Any
    fate: Fate
    ours: Settings = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.key}={shown(self.value)}"


@dataclass
class Together:
    """The files of one job, every key of theirs, and the values that hold."""

    files: list[File]
    model: dict[str, Any]
    problems: list[Problem]
    said: list[Said] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)

    def file(self, tool: str) -> File | None:
        return next((file for file in self.files if file.tool == tool), None)

    def has(self, tool: str) -> bool:
        return self.file(tool) is not None

    def value(self, tool: str, key: str, default: Any = None) -> Any:
        file = self.file(tool)
        found = None if file is None else file.values.get(key)
        return default if found is None else found

    @property
    def kind(self) -> str:
        """Accelerate's `distributed_type` in capitals; empty without its file."""
        return str(self.value("accelerate", "distributed_type", "NO")).upper() if self.has("accelerate") else ""

    @property
    def stage(self) -> int | None:
        """DeepSpeed's stage, from its own file or from Accelerate's; `None` without DeepSpeed."""
        if self.has("deepspeed"):
            stage = self.value("deepspeed", "zero_optimization.stage", 0)
        elif self.kind == "DEEPSPEED":
            stage = self.value("accelerate", "deepspeed_config.zero_stage", 2)
        else:
            return None
        return stage if isinstance(stage, int) and stage in tables.STAGES else None

    @property
    def on_cpu(self) -> bool:
        return any(str(self.value(tool, "use_cpu")).lower() == "true" for tool in ("accelerate", "trainer"))

    def fsdp_version(self) -> int | None:
        """1 or 2; `None` without FSDP, which Accelerate leaves out on CPUs."""
        if self.on_cpu:
            return None
        if self.kind == "FSDP":
            return 2 if str(self.value("accelerate", "fsdp_config.fsdp_version", 1)) == "2" else 1
        if self.value("trainer", "fsdp"):
            return 1 if str(self.value("trainer", "fsdp_config.version", 2)) == "1" else 2
        return None

    def problem(self, kind: str, cause: str, fix: str, ours: str = "", keys: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(kind, cause, fix, ours, keys))


SCRIPTS_OWN = ", unless the script has such an argument"
"""Ends the message about an unknown key in a Trainer's file: a script (TRL's) may read arguments of its own there."""


def combine(files: list[File], model: dict[str, Any], problems: list[Problem]) -> Together:
    """Sort every key of the files, settle each key here, and fill in `auto`.

    Args:
        model: the model's `config.json`; empty if there is none.
        problems: those found while the files were gathered.
    """
    job = Together(files, model, problems)
    for file in files:
        if file.tool != "model":
            job.said += [_sorted(job, file, key, value) for key, value in file.values.items() if value is not None]
    _refuse_an_adapter_that_no_file_describes(job)
    _add_defaults(job)
    _settle(job)
    _fill_auto(job)
    return job


def _refuse_an_adapter_that_no_file_describes(job: Together) -> None:
    """TRL's scripts take `use_peft` and make the adapter of their own arguments."""
    file = job.file("trainer")
    if file is not None and file.values.get("use_peft") and not job.has("peft"):
        cause = f"{file.name}: use_peft=true changes what is trained, and only the script's own arguments say how"
        fix = "pass --peft with peft's adapter_config.json, or set adapter.type=lora on the command line"
        job.problem("no counterpart", cause, fix, "adapter.type", ("use_peft",))


def _sorted(job: Together, file: File, key: str, value: Any) -> Said:
    """Where one key of one file ends."""

    def ended(fate: Fate, ours: Settings | None = None, note: str = "") -> Said:
        return Said(file.name, file.tool, key, value, fate, ours or {}, note)

    entry, effect = find(file.tool, key), "" if file.tool == "peft" else effect_of(key, value)
    if entry is None:
        return ended("unplanned", note=effect) if effect else ended("unknown", note=meant(file.tool, key))
    reason = "it does nothing any more" if entry.dead else _ignored(job, file.tool, key)
    if reason:
        return ended("ignored", note=reason)
    if effect and entry.ours is None:
        return ended("unplanned", note=effect)
    if entry.ours is None:
        return ended("absent", note=entry.note)
    if value == AUTO:
        return ended("auto")
    try:
        return ended("mapped", entry.ours(value))
    except NoCounterpart as error:
        ours, wrong = _key_for(file.tool, key), isinstance(error, WrongValue)
        kind = "wrong value" if wrong else "no counterpart"
        if file.tool == "peft" and not ours:
            job.problem(kind, f"{file.name}: {key}={shown(value)} cannot be planned: {error}",
                        "plan without it: remove the key from a copy of the file", "", (key,))  # fmt: skip
            return ended("absent", note=str(error))
        cause = f"{file.name}: {key}={shown(value)} {'is wrong' if wrong else 'has no counterpart here'}: {error}"
        job.problem(kind, cause, f"correct it, or set {ours} on the command line", ours, (key,))
        return ended("absent", note=str(error))


def _ignored(job: Together, tool: str, key: str) -> str:
    """Why their tool does not read the key in this job; empty if it does."""
    section, _, name = key.partition(".")
    if tool == "accelerate":
        return _ignored_by_accelerate(job, section, name)
    if tool == "trainer":
        return _ignored_by_trainer(job, section, key)
    belongs = key.startswith(("zero_optimization.stage3_", "zero_optimization.offload_param"))
    if job.stage is not None and job.stage < 3 and (belongs or name == "sub_group_size"):
        return f"it belongs to stage 3, and the stage is {job.stage}"
    return ""


def _ignored_by_accelerate(job: Together, section: str, name: str) -> str:
    if section == "fsdp_config" and job.on_cpu:
        return _NO_FSDP
    wanted = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}.get(section)
    if wanted is not None and job.kind != wanted:
        return f"distributed_type is {job.kind}"
    if section == "fsdp_config" and name.removeprefix("fsdp_") in _FSDP1_ONLY and job.fsdp_version() == 2:
        return "FSDP2 has no such setting"
    entry = find("accelerate", f"{section}.{name}")
    if section == "deepspeed_config" and job.has("deepspeed") and entry and entry.ours:
        return "the DeepSpeed file decides it"
    if name.startswith("offload_param") and job.stage is not None and job.stage < 3:
        return f"it belongs to stage 3, and the stage is {job.stage}"
    return ""


def _ignored_by_trainer(job: Together, section: str, key: str) -> str:
    if section in ("fsdp", "fsdp_config") and job.on_cpu:
        return _NO_FSDP
    if section == "fsdp_config" and not job.value("trainer", "fsdp"):
        return "fsdp is off"
    if key.removeprefix("fsdp_config.") in _FSDP1_ONLY and job.fsdp_version() == 2:
        return "FSDP2 has no such setting"
    if job.has("deepspeed"):
        if key == "max_grad_norm" and job.value("deepspeed", "gradient_clipping") is None:
            return "DeepSpeed clips only if its own file has gradient_clipping"
        filled = job.value("deepspeed", "scheduler.params.warmup_num_steps") == AUTO
        if job.value("deepspeed", "scheduler.type") and key in ("lr_scheduler_type", "warmup_steps"):
            return "" if filled and key == "warmup_steps" else "the DeepSpeed file has a scheduler"
        if key == "optim" and job.value("deepspeed", "optimizer.type"):
            return "the DeepSpeed file has an optimizer"
    return ""


def _add_defaults(job: Together) -> None:
    """Defaults of their tools, for keys here that no file sets."""
    chosen: list[tuple[str, Settings]] = []
    if job.has("trainer"):
        chosen.append(
            ("trainer", {k: v for k, v in tables.TRAINER_DEFAULTS.items() if not _ignored(job, "trainer", k)})
        )
    if job.kind == "FSDP" and not job.on_cpu:
        chosen.append(("accelerate", tables.ACCELERATE_DEFAULTS["fsdp"]))
    if job.kind == "DEEPSPEED" and not job.has("deepspeed"):
        chosen.append(("accelerate", tables.ACCELERATE_DEFAULTS["deepspeed"]))
    if job.stage:
        values = {**tables.DEEPSPEED_DEFAULTS, "zero_optimization.overlap_comm": job.stage == 3}
        if job.stage == 3:
            values |= tables.STAGE3_DEFAULTS
        if not job.has("deepspeed"):
            del values["gradient_clipping"]  # Accelerate's own default is auto
        chosen.append(("deepspeed", values))
    if job.has("peft"):
        chosen.append(("peft", tables.PEFT_DEFAULTS))
        if job.value("peft", "target_modules") is None:
            job.problem(
                "unsaid", "no file says which layers have adapters: without target_modules peft goes by the model's "
                'type', 'write them into the adapter file, such as "target_modules": ["q_proj", "v_proj"], or set '
                "adapter.targets on the command line", "adapter.targets", ("target_modules",),
            )  # fmt: skip
    for tool, values in chosen:
        named = f"{family(tool)}'s default"
        for key, value in values.items():
            entry = find(tool, key)
            if entry is None or entry.ours is None or any(s.tool == tool and s.key == key for s in job.said):
                continue
            if value == AUTO:
                job.said.append(Said(named, tool, key, value, "auto"))
                continue
            said = {ours for one in job.said if one.fate == "mapped" for ours in one.ours}
            settings = {ours: v for ours, v in entry.ours(value).items() if ours not in said}
            if settings:
                job.said.append(Said(named, tool, key, value, "default", settings))


def _settle(job: Together) -> None:
    """One value for each key here; two different ones are a problem, unless their tools let one win."""
    _match_the_trainers_defaults(job)
    for said in job.said:
        if said.fate == "default":
            job.settings |= said.ours
    mapped = [said for said in job.said if said.fate == "mapped"]
    for said in mapped:
        job.settings |= said.ours
    for ours in dict.fromkeys(key for said in mapped for key in said.ours):
        first, *others = (said for said in mapped if ours in said.ours)
        other = next((said for said in others if not _same(said.ours[ours], first.ours[ours])), None)
        if other is None or ours in ("engine", "machines", "gpus") or _precision_wins(job, ours, [first, *others]):
            continue
        key = "precision.mode" if ours in PSEUDO else ours.removesuffix(".0").removesuffix(".1")
        theirs = next((said.key for said in (first, other) if said.tool == "deepspeed"), "")
        auto = f' or {theirs} "auto"' if theirs else ""
        fix = f"make them equal{auto}; to plan anyway, set {key} on the command line"
        job.problem("contradiction", f"{first} contradicts {other}", fix, key, (first.key, other.key))


def _match_the_trainers_defaults(job: Together) -> None:
    """The Trainer compares DeepSpeed's values with its own arguments, those that its file leaves out too."""
    trainer = job.file("trainer")
    for said in job.said if trainer else ():
        theirs = tables.MUST_MATCH.get(said.key) if said.fate == "mapped" else None
        if theirs is None or trainer is None or trainer.values.get(theirs) is not None:
            continue
        default = tables.TRAINER_DEFAULTS.get(theirs, False)
        if said.value != default:
            fix = f'write {theirs}: {shown(said.value)} in {trainer.name}, or {said.key} "auto"'
            cause = f"{said} contradicts the Trainer's default {theirs}={shown(default)}"
            ours = next(iter(said.ours))
            job.problem("contradiction", cause, fix, "precision.mode" if ours in PSEUDO else ours, (said.key, theirs))


def _precision_wins(job: Together, ours: str, claims: list[Said]) -> bool:
    """Accelerate's `mixed_precision: no` gives way to the script's own arguments."""
    loud = [said for said in claims if said.tool != "accelerate" or said.value not in ("no", False)]
    if ours not in ("fp16", "bf16") or len({said.ours[ours] for said in loud}) != 1:
        return False
    job.settings[ours] = loud[0].ours[ours]
    return True


def _same(one: Any, other: Any) -> bool:
    """Equal, and both text or neither."""
    return bool(one == other) and isinstance(one, str) == isinstance(other, str)


def _fill_auto(job: Together) -> None:
    for place, said in enumerate(job.said):
        if said.fate != "auto":
            continue
        entry = find(said.tool, said.key)
        ours = entry.only if entry else ""
        filled = _filled(job, said, ours)
        if filled is None:
            kind = "unsaid" if said.key in _FROM_A_SCRIPT and job.has("accelerate") else "auto"
            cause = f'{said.file}: {said.key}="auto", but no other file says what it becomes'
            job.problem(kind, cause, _who_fills(job, said, ours), ours, (said.key,))
            continue
        settings, source = filled
        job.said[place] = replace(said, ours=settings, note=source)
        job.settings |= settings


def _filled(job: Together, said: Said, ours: str) -> tuple[Settings, str] | None:
    """The value of an `auto` and its source; `None` if no file has it."""
    trainer, accelerate = job.has("trainer"), job.has("accelerate")
    if said.key == "optimizer.params.betas":
        return ({}, "from the Trainer: adam_beta1, adam_beta2") if trainer else None
    other = next((one for one in job.said if ours in one.ours and (one.file, one.key) != (said.file, said.key)), None)
    if other is not None:
        return {ours: other.ours[ours]}, f"from {other.file}: {other.key}"
    if trainer and said.key.startswith("scheduler.params."):
        return {}, "the Trainer computes it"
    if said.key == "train_batch_size" and (trainer or accelerate):
        return {}, "the product of micro-batch, accumulation and ranks"
    if not (trainer or accelerate):
        return None
    if said.key in _DUMMIES:
        return {}, "Accelerate takes it from DummyOptim and DummyScheduler in the script"
    if said.key in ("fp16.enabled", "bf16.enabled"):
        return {ours: False}, "no file turns it on"
    width, name = job.model.get("hidden_size"), said.key.removeprefix("zero_optimization.")
    if name in _SIZES and width:
        return {ours: int(_SIZES[name] * width * width)}, f"from the model's hidden_size {width}"
    if name == "stage3_param_persistence_threshold" and width:
        return {ours: 10 * width}, f"from the model's hidden_size {width}"
    if name.endswith("gradient_clipping"):
        return {ours: 1.0}, "Accelerate's default"
    if name.endswith("gradient_accumulation_steps"):
        return {ours: 1}, "the default of Accelerator(), whose argument in the script wins"
    return None


def _who_fills(job: Together, said: Said, ours: str) -> str:
    if said.key in _FROM_A_SCRIPT and job.has("accelerate"):
        return f"the DataLoader in the script decides it: add it to the command, such as {ours}=4"
    if said.key.startswith("zero_optimization."):
        return "pass --model, whose hidden_size decides it, or write a number"
    if job.has("accelerate"):
        return "write a number: only the Trainer fills it in, not Accelerate"
    return "pass the Trainer's or Accelerate's file too, or write a number: DeepSpeed itself takes auto for text"


def _key_for(tool: str, key: str) -> str:
    """The key here that a value without counterpart would have set."""
    known = {
        "optim": "optim.name",
        "lr_scheduler_type": "optim.schedule",
        "mixed_precision": "precision.mode",
        "fsdp": "parallel.strategy",
        "distributed_type": "parallel.strategy",
    }
    entry = find(tool, key)
    only = entry.only if entry else ""
    if tool == "peft":
        return only
    return known.get(key) or ("precision.mode" if only in PSEUDO else only) or "parallel.strategy"


def unknown_key(tool: str, key: str) -> str:
    """The fate of an unknown key in their tool: refused, or ignored."""
    section, _, rest = key.partition(".")
    strict = {
        "accelerate": not rest,
        "deepspeed": section in ("zero_optimization", "fp16", "bf16") and bool(rest),
        "trainer": True,
        "peft": False,
    }
    if key in tables.DEEPSPEED_REMOVED or section in tables.DEEPSPEED_REMOVED:
        return f"DeepSpeed {tables.VERSIONS['deepspeed']} refuses it: it was removed"
    if any(name.startswith(f"{key}.") for name in tables.KEYS[tool]):
        return "it is a section of keys, not a value; " + family(tool) + " refuses it"
    verb = "refuses" if strict[tool] else "ignores"
    unless = SCRIPTS_OWN if tool == "trainer" and not meant(tool, key) else ""
    return f"{family(tool)} {tables.VERSIONS[tool]} has no such key and {verb} it{unless}"


def meant(tool: str, key: str) -> str:
    """The key of their tool that an unknown one was probably meant to be; empty if none is close."""
    if key in tables.RENAMED[tool]:
        return tables.RENAMED[tool][key]
    names = [name.removesuffix(".*") for name in tables.KEYS[tool]]
    if tool == "trainer" and (inner := f"fsdp_config.{key.removeprefix('fsdp_')}") in names and key.startswith("fsdp_"):
        return inner
    if any(name.startswith(f"{key}.") for name in names):
        return ""
    close = get_close_matches(key, names, n=1, cutoff=0.85)
    parts = key.split(".")
    for part in () if close else (parts[-1], *parts[1:-1]):  # a key, or a whole section, in the wrong section
        close = close or [name for name in names if name.rpartition(".")[2] == part and name != key]
    return close[0] if close else ""
