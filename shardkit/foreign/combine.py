"""Put the files of one job together: settle each value, find contradictions, fill in `auto`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from ..config.errors import shown
from . import tables
from .accelerate_files import accelerate_release
from .autos import fill
from .axolotl import AXOLOTL_REMOVED
from .files import File, family
from .installed import LOOKED_UP, Release, installed_release
from .recipes import check_recipe, defaults, ignored_in_a_recipe, refuse_unnamed_layers
from .tables import AUTO, NoCounterpart, Problem, Settings, WrongValue
from .together import PSEUDO, Fate, FileKey, Together
from .tools import ALIASES, KEYS, RECIPES, RENAMED, VERSIONS, base, find
from .trl import TRL_KEYS
from .unplanned import effect_of, is_off

_NO_FSDP = "on CPUs Accelerate shards nothing and trains with DDP"
_FSDP1_ONLY = ("sharding_strategy", "use_orig_params", "sync_module_states", "backward_prefetch", "forward_prefetch")


SCRIPTS_OWN = ", unless the script has such an argument"
"""Ends the message about an unknown key in a Trainer's file: a script (TRL's) may read arguments of its own there."""


def combine(
    files: list[File], model: dict[str, Any], problems: list[Problem], command_line: Settings | None = None
) -> Together:
    """Sort every key of the files, settle each key here, and fill in `auto`.

    Args:
        model: the model's `config.json`; empty if there is none.
        problems: those found while the files were gathered.
        command_line: dotted keys here that the command line sets.
    """
    job = Together(files, model, problems, dict(command_line or {}))
    for file in files:
        if file.tool != "model":
            job.file_keys += [_sorted(job, file, key, value) for key, value in file.values.items() if value is not None]
    _add_defaults(job)
    _settle(job)
    check_recipe(job)
    fill(job)
    return job


def _sorted(job: Together, file: File, key: str, value: Any) -> FileKey:
    """Where one key of one file ends."""

    def ended(fate: Fate, setting: Settings | None = None, note: str = "") -> FileKey:
        return FileKey(file.name, file.tool, key, value, fate, setting or {}, note)

    entry, effect = find(file.tool, key), "" if file.tool == "peft" else effect_of(key, value)
    if file.tool == "accelerate" and not accelerate_release().knows(key):
        entry = None
    if entry is not None and entry.effect and not is_off(key, value):
        effect = effect or entry.effect
    if entry is None:
        if effect:
            return ended("unplanned", note=effect)
        if release := _newer_release(file.tool, key):
            coverage = f"shardkit knows the keys of {VERSIONS[file.tool]}"
            note = f"the installed {family(file.tool)} {release} has this key, and {coverage}: it may change memory"
            return ended("unplanned", note=note)
        if file.tool == "trainer" and key in TRL_KEYS:
            return ended("absent", note="an argument of the script, such as TRL's have")
        return ended("unknown", note=nearest_key(file.tool, key))
    reason = "it does nothing any more" if entry.dead else _ignored(job, file.tool, key)
    if reason:
        return ended("ignored", note=reason)
    if effect and entry.convert is None:
        return ended("unplanned", note=effect)
    if entry.convert is None:
        return ended("absent", note=entry.note)
    if value == AUTO and file.tool not in RECIPES:
        return ended("auto")
    try:
        return ended("mapped", entry.convert(value), entry.note)
    except NoCounterpart as error:
        setting, is_wrong = _key_for(file.tool, key), isinstance(error, WrongValue)
        if file.tool in RECIPES and not is_wrong:
            if entry.only in job.command_line:
                return ended("ignored", note=f"the command line sets {entry.only}")
            return ended("unplanned", note=str(error))
        kind = "wrong value" if is_wrong else "no counterpart"
        if file.tool == "peft" and not setting:
            job.problem(kind, f"{file.name}: {key}={shown(value)} cannot be planned: {error}",
                        "plan without it: remove the key from a copy of the file", "", (key,))  # fmt: skip
            return ended("absent", note=str(error))
        cause = f"{file.name}: {key}={shown(value)} {'is wrong' if is_wrong else 'has no counterpart here'}: {error}"
        job.problem(kind, cause, f"correct it, or set {setting} on the command line", setting, (key,))
        return ended("absent", note=str(error))


def _newer_release(tool: str, key: str) -> str:
    """The installed release of a tool that has a key which its table lacks; empty if there is none."""
    is_section = any(name.startswith(f"{key}.") for name in KEYS[tool])
    release = None if is_section or key in RENAMED[tool] else _release(tool)
    return release.version if release is not None and release.knows(key) else ""


def _release(tool: str) -> Release | None:
    return accelerate_release() if tool == "accelerate" else installed_release(tool)


def _ignored(job: Together, tool: str, key: str) -> str:
    """Why their tool does not read the key in this job; empty if it does."""
    section, _, name = key.partition(".")
    if tool == "accelerate":
        return _ignored_by_accelerate(job, section, name)
    if base(tool) == "trainer":
        return ignored_in_a_recipe(job, key) or _ignored_by_trainer(job, section, key)
    belongs = key.startswith(("zero_optimization.stage3_", "zero_optimization.offload_param"))
    if job.stage is not None and job.stage < 3 and (belongs or name == "sub_group_size"):
        return f"it belongs to stage 3, and the stage is {job.stage}"
    return ""


def _ignored_by_accelerate(job: Together, section: str, name: str) -> str:
    if section == "fsdp_config" and job.on_cpu:
        return _NO_FSDP
    kind = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}.get(section)
    if kind is not None and job.kind != kind:
        return f"distributed_type is {job.kind}"
    if section == "fsdp_config" and name.removeprefix("fsdp_") in _FSDP1_ONLY and job.fsdp_version() == 2:
        return "FSDP2 has no such setting"
    if name == "fsdp_reshard_after_forward" and job.fsdp_version() == 1:
        return "for FSDP1 fsdp_sharding_strategy decides, which the launcher sets to FULL_SHARD unless the file has it"
    entry = find("accelerate", f"{section}.{name}")
    if section == "deepspeed_config" and job.has("deepspeed") and entry and entry.convert:
        return "the DeepSpeed file decides it"
    if name.startswith("offload_param") and job.stage is not None and job.stage < 3:
        return f"it belongs to stage 3, and the stage is {job.stage}"
    return ""


def _ignored_by_trainer(job: Together, section: str, key: str) -> str:
    if section in ("fsdp", "fsdp_config") and job.on_cpu:
        return _NO_FSDP
    if section == "fsdp_config" and "." in key and not job.value("trainer", "fsdp"):
        return "fsdp is off"
    if key.removeprefix("fsdp_config.") in _FSDP1_ONLY and job.fsdp_version() == 2:
        return "FSDP2 has no such setting"
    if job.has("deepspeed"):
        key = next((name for name, alias in ALIASES.get(job.recipe, {}).items() if alias == key), key)
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
    trainer = job.file("trainer")
    if trainer is not None:
        values = defaults(job)
        chosen.append((trainer.tool, {k: v for k, v in values.items() if not _ignored(job, trainer.tool, k)}))
    if job.has("accelerate"):
        section = job.accelerate_defaults()
        chosen.append(("accelerate", {k: v for k, v in section.items() if not _ignored(job, "accelerate", k)}))
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
            refuse_unnamed_layers(job, "target_modules")
    for tool, values in chosen:
        for key, value in values.items():
            _add_default(job, tool, key, value)


def _add_default(job: Together, tool: str, key: str, value: Any) -> None:
    """Record a default of a tool, unless a file has the key, or another key that sets the same here."""
    entry, source = find(tool, key), f"{family(tool)}'s default"
    in_file = any(file_key.tool == tool and file_key.key == key for file_key in job.file_keys)
    if entry is None or entry.convert is None or in_file:
        return
    if value == AUTO and tool not in RECIPES:
        job.file_keys.append(FileKey(source, tool, key, value, "auto"))
        return
    mapped = {setting for file_key in job.file_keys if file_key.fate == "mapped" for setting in file_key.settings}
    settings = {setting: v for setting, v in entry.convert(value).items() if setting not in mapped}
    if settings:
        job.file_keys.append(FileKey(source, tool, key, value, "default", settings))


def _settle(job: Together) -> None:
    """Choose a value for each setting; two different ones are a problem, unless their tools let one win."""
    _match_the_trainers_defaults(job)
    for file_key in job.file_keys:
        if file_key.fate == "default":
            job.settings |= file_key.settings
    mapped = [file_key for file_key in job.file_keys if file_key.fate == "mapped"]
    for file_key in mapped:
        job.settings |= file_key.settings
    for setting in dict.fromkeys(setting for file_key in mapped for setting in file_key.settings):
        claims = [file_key for file_key in mapped if setting in file_key.settings]
        agreed = claims[0].settings[setting]
        contrary = next((claim for claim in claims[1:] if not _same(claim.settings[setting], agreed)), None)
        if contrary is None or setting in ("engine", "machines", "gpus") or _precision_wins(job, setting, claims):
            continue
        pair = (claims[0], contrary)
        key = "precision.mode" if setting in PSEUDO else setting.removesuffix(".0").removesuffix(".1")
        of_deepspeed = next((claim.key for claim in pair if claim.tool == "deepspeed"), "")
        auto = f' or {of_deepspeed} "auto"' if of_deepspeed else ""
        fix = f"make them equal{auto}; to plan anyway, set {key} on the command line"
        job.problem("contradiction", f"{claims[0]} contradicts {contrary}", fix, key, (claims[0].key, contrary.key))


def _match_the_trainers_defaults(job: Together) -> None:
    """The Trainer compares DeepSpeed's values with its own arguments, those that its file leaves out too."""
    trainer = job.file("trainer")
    for file_key in job.file_keys if trainer else ():
        argument = tables.MUST_MATCH.get(file_key.key) if file_key.fate == "mapped" else None
        argument = ALIASES.get(job.recipe, {}).get(argument, argument) if argument else None
        if argument is None or trainer is None or trainer.values.get(argument) is not None:
            continue
        default = defaults(job).get(argument, False)
        if file_key.value != default and default != AUTO:
            fix = f'write {argument}: {shown(file_key.value)} in {trainer.name}, or {file_key.key} "auto"'
            whose = family(trainer.tool) if job.recipe else "the Trainer"
            cause = f"{file_key} contradicts {whose}'s default {argument}={shown(default)}"
            setting = next(iter(file_key.settings))
            job.problem(
                "contradiction",
                cause,
                fix,
                "precision.mode" if setting in PSEUDO else setting,
                (file_key.key, argument),
            )


def _precision_wins(job: Together, setting: str, claims: list[FileKey]) -> bool:
    """Accelerate's `mixed_precision: no` gives way to the script's own arguments."""
    loud = [file_key for file_key in claims if file_key.tool != "accelerate" or file_key.value not in ("no", False)]
    if setting not in ("fp16", "bf16") or len({file_key.settings[setting] for file_key in loud}) != 1:
        return False
    job.settings[setting] = loud[0].settings[setting]
    return True


def _same(value: Any, claim: Any) -> bool:
    """Whether two values are equal, and both text or neither."""
    return bool(value == claim) and isinstance(value, str) == isinstance(claim, str)


def _key_for(tool: str, key: str) -> str:
    """The key here that a value without counterpart would have set."""
    entry = find(tool, key)
    only = entry.only if entry else ""
    if tool == "peft":
        return only
    return "precision.mode" if only in ("fp16", "bf16", "tf32") else only if "." in only else "parallel.strategy"


def unknown_key(tool: str, key: str) -> str:
    """What a tool does with a key that it does not know: refuse or ignore it, and by which release."""
    section, _, option = key.partition(".")
    release = _release(tool)
    strict = {
        "accelerate": release is not None and not (option and release.knows(section)),
        "deepspeed": section in ("zero_optimization", "fp16", "bf16") and bool(option),
        "trainer": True,
        "trl": True,
        "llamafactory": True,
        "axolotl": False,
        "peft": False,
    }
    if key in tables.DEEPSPEED_REMOVED or section in tables.DEEPSPEED_REMOVED:
        return f"removed from DeepSpeed {VERSIONS['deepspeed']}, which refuses it"
    if tool == "axolotl" and key in AXOLOTL_REMOVED:
        return f"removed from axolotl {VERSIONS['axolotl']}, which refuses it"
    if any(name.startswith(f"{key}.") for name in KEYS[tool]):
        return f"a section of keys, not a value; {family(tool)} refuses it"
    verb = "refuses" if strict[tool] else "ignores"
    unless = SCRIPTS_OWN if tool in ("trainer", "trl") and not nearest_key(tool, key) else ""
    if release is not None:
        return f"unknown to the installed {family(tool)} {release.version}, which {verb} it{unless}"
    source = " (recorded; none is installed)" if tool in LOOKED_UP else ""
    return f"unknown to {family(tool)} {VERSIONS[tool]}{source}, which {verb} it{unless}"


def nearest_key(tool: str, key: str) -> str:
    """The key of their tool that an unknown one was probably meant to be; empty if none is close."""
    if key in RENAMED[tool]:
        return RENAMED[tool][key]
    names = [name.removesuffix(".*") for name in KEYS[tool]]
    if tool == "accelerate":
        names = [name for name in names if accelerate_release().knows(name)]
    if tool == "trainer" and (inner := f"fsdp_config.{key.removeprefix('fsdp_')}") in names and key.startswith("fsdp_"):
        return inner
    if any(name.startswith(f"{key}.") for name in names):
        return ""
    close = get_close_matches(key, names, n=1, cutoff=0.85)
    parts = key.split(".")
    for part in () if close else (parts[-1], *parts[1:-1]):  # a key, or a whole section, in the wrong section
        close = close or [name for name in names if name.rpartition(".")[2] == part and name != key]
    return close[0] if close else ""
