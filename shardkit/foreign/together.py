"""The files of one job together: every key of theirs with its end, and the values that hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..config.errors import shown
from . import tables
from .accelerate_files import accelerate_release, defaults
from .files import File
from .tables import Problem, Settings
from .tools import ALIASES, RECIPES, base

Fate = Literal["mapped", "default", "auto", "absent", "ignored", "unknown", "unplanned"]
PSEUDO = ("fp16", "bf16", "tf32", "engine", "gpus", "machines")
"""Keys of `Together.settings` that are not keys here; `translate` turns them into such."""


@dataclass(frozen=True)
class FileKey:
    """A key of a file, and where it ended.

    Attributes:
        settings: keys here with their values; for `auto`, those that it becomes.
        note: why it is absent or ignored, the key that was probably meant, the file that fills in `auto`, or what an
            `unplanned` key changes.
    """

    file: str
    tool: str
    key: str
    value: Any
    fate: Fate
    settings: Settings = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.key}={shown(self.value)}"


@dataclass
class Together:
    """The files of one job, every key of theirs, and the values that hold.

    Attributes:
        command_line: dotted keys here that the command line sets, with their values.
    """

    files: list[File]
    model: dict[str, Any]
    problems: list[Problem]
    command_line: Settings = field(default_factory=dict)
    file_keys: list[FileKey] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)

    def file(self, tool: str) -> File | None:
        """The file of a tool; a recipe counts as the Trainer's."""
        return next((file for file in self.files if tool in (file.tool, base(file.tool))), None)

    def has(self, tool: str) -> bool:
        return self.file(tool) is not None

    def value(self, tool: str, key: str, default: Any = None) -> Any:
        """A value by its name in `tool`, which a recipe may spell otherwise; of Accelerate also its own default."""
        file = self.file(tool)
        if file is None:
            return default
        if tool == "accelerate":
            setting = file.values.get(key) if accelerate_release().knows(key) else None
            return self.accelerate_defaults().get(key, default) if setting is None else setting
        value = file.values.get(ALIASES.get(file.tool, {}).get(key, key))
        if value is None and file.tool == "axolotl":
            value = _of_axolotls_fsdp(file, key)
        return default if value is None else value

    def is_on(self, tool: str, key: str, default: bool = False) -> bool:
        """Whether a switch is true, or text that says so."""
        return str(self.value(tool, key, default)).lower() == "true"

    def accelerate_defaults(self) -> Settings:
        """Accelerate's defaults of the section that the job's `distributed_type` reads."""
        file = self.file("accelerate")
        if file is None:
            return {}
        stage = self.value("deepspeed", "zero_optimization.stage", file.values.get("deepspeed_config.zero_stage"))
        return defaults(self.kind, stage if isinstance(stage, int) and stage in tables.STAGES else None)

    def line_of(self, tool: str, key: str) -> str:
        """The file of a tool with the line of a key, as `args.yaml:3`."""
        file = self.file(tool)
        return "" if file is None else file.at(key)

    @property
    def recipe(self) -> str:
        """The recipe's tool: `axolotl`, `llamafactory` or `trl`; empty without one."""
        file = self.file("trainer")
        return file.tool if file is not None and file.tool in RECIPES else ""

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained over a frozen model."""
        chosen = self.command_line.get("adapter.type", self.settings.get("adapter.type"))
        return self.has("peft") or chosen not in (None, "none")

    @property
    def kind(self) -> str:
        """Accelerate's `distributed_type`; empty without its file."""
        file = self.file("accelerate")
        return "" if file is None else str(file.values.get("distributed_type"))

    @property
    def stage(self) -> int | None:
        """DeepSpeed's stage, from its own file or from Accelerate's; `None` without DeepSpeed."""
        if self.has("deepspeed"):
            stage = self.value("deepspeed", "zero_optimization.stage", 0)
        elif self.kind == "DEEPSPEED":
            stage = self.value("accelerate", "deepspeed_config.zero_stage")
        else:
            return None
        return stage if isinstance(stage, int) and stage in tables.STAGES else None

    @property
    def on_cpu(self) -> bool:
        return self.is_on("accelerate", "use_cpu") or self.is_on("trainer", "use_cpu")

    def fsdp_version(self) -> int | None:
        """1 or 2; `None` without FSDP, which Accelerate leaves out on CPUs."""
        if self.on_cpu:
            return None
        if self.kind == "FSDP":
            return 2 if str(self.value("accelerate", "fsdp_config.fsdp_version")) == "2" else 1
        if self.value("trainer", "fsdp"):
            return 1 if str(self.value("trainer", "fsdp_config.version", 2)) == "1" else 2
        return None

    def problem(self, kind: str, cause: str, fix: str, setting: str = "", keys: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(kind, cause, fix, setting, keys))


def _of_axolotls_fsdp(file: File, key: str) -> Any:
    """FSDP's switch and version in axolotl: `fsdp_config` alone turns it on, and the version may stand outside it."""
    if key == "fsdp":
        return True if file.section("fsdp_config") else None
    if key == "fsdp_config.version":
        return file.values.get("fsdp_version", 1)
    return None
