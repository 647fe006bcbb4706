"""Read another tool's file: which tool's it is, its keys dotted, and where each stands. Nothing in it is executed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from ..config import yaml as yaml_files
from ..config.errors import section_fields, shown
from ..config.yaml import read_yaml
from ..errors import ConfigError, one_line
from .accelerate_files import read_content
from .llamafactory import V1_MARKS
from .tools import KEYS, NAMES, RECIPES, RENAMED, find, recipe

_MARKS = {
    "accelerate": ("compute_environment", "distributed_type"),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    "model": ("model_type", "architectures"),
    "peft": ("peft_type",),
}
_MARKED = ("peft",)
"""Tools whose files always have one of their marks."""


@dataclass(frozen=True)
class File:
    """A file of another tool.

    Attributes:
        name: as the user named it, or a key that holds another tool's config whole.
        tool: `accelerate`, `deepspeed`, `trainer`, `peft`, `model` for a transformers `config.json`, or a recipe's:
            `axolotl`, `llamafactory` or `trl`.
        values: dotted key → value; sections without keys are left out.
        text: keys whose value looks like a number, but which the file's own reader takes for text.
        lines: dotted key → its line in the file, from 1; empty for a program's own dict.
    """

    name: str
    tool: str
    values: dict[str, Any]
    text: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()
    lines: dict[str, int] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """The file's name with the line of a key, as `args.yaml:3`; without a line if it is unknown."""
        return f"{self.name}:{self.lines[key]}" if key in self.lines else self.name

    def section(self, name: str) -> dict[str, Any]:
        """Keys of a section, without its name."""
        return {key[len(name) + 1 :]: value for key, value in self.values.items() if key.startswith(f"{name}.")}


def read(name: str) -> File:
    """Read a JSON or YAML file and recognise its tool.

    Raises:
        ConfigError: the file cannot be read, is cut off or is not a mapping, or no tool has its keys.
    """
    text, shown_name = read_text(name), one_line(name)
    content = parse(text, shown_name)
    tool = recognise(content, shown_name)
    values = _values(content, tool, shown_name, text)
    lines = {} if tool == "model" else line_numbers(text, shown_name)
    return File(shown_name, tool, values, _text_numbers(text, values), Path(name).parent, lines)


def _values(content: dict[str, Any], tool: str, name: str, text: str = "") -> dict[str, Any]:
    """The values of a file by their dotted keys; a model's config stays a tree."""
    if tool == "model":
        return content
    flat = flatten(content)
    _refuse_infinite(flat, name, text)
    return flatten(read_content(content, name)) if tool == "accelerate" else flat


def _refuse_infinite(values: dict[str, Any], name: str, text: str = "") -> None:
    """Refuse numbers that are not finite, which Python's JSON and YAML let pass and no key of these tools can mean.

    Args:
        values: dotted key → value.
        text: of the file, to name the line; empty for a program's own dict.
    """
    for key, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                leaf = key.rpartition(".")[2]
                line = next((n for n, line in enumerate(text.splitlines(), start=1) if leaf in line), 0)
                raise ConfigError(
                    f"{name}{f':{line}' if line else ''}: {key} is {number}, which is no finite number",
                    "set a finite number there, or remove the key",
                )


def read_text(name: str) -> str:
    """The text of a config file.

    Raises:
        ConfigError: it cannot be read, is a directory, too large or not text.
    """
    try:
        folder_fix = "name the file in it; a model's folder belongs to --model"
        return yaml_files.read_text(Path(name), one_line(name), "config", folder_fix)
    except FileNotFoundError as error:
        cause = f"{one_line(name)} cannot be read: {error.strerror}"
        raise ConfigError(cause, "check the path and its permissions") from None


def read_object(value: Any) -> File:
    """The content of a file as a program has it: a mapping, or an object with `to_dict()`.

    Raises:
        ConfigError: it is neither, or no tool has its keys.
    """
    if isinstance(value, Mapping):
        content, name = dict(value), "dict"
    elif hasattr(value, "to_dict") and not isinstance(value, type):
        content, name = given(value), type(value).__name__
    else:
        raise ConfigError(
            f"{one_line(repr(value))[:80]} is no config: a {type(value).__name__} has no keys",
            "pass a file's name, its content as a dict, or an object with to_dict(), such as TrainingArguments",
        )
    tree = json.loads(json.dumps(content, default=_plain))
    if not tree:
        raise ConfigError(f"the {name} is empty", "pass a config of one of the tools")
    tool = recognise(tree, f"the {name}")
    if tool == "trainer" and type(value).__module__.startswith("trl."):
        tool = "trl"
    values = _values(tree, tool, f"the {name}")
    shown_name = f"dict of {family(tool)}" if name == "dict" else name
    return File(shown_name, tool, values, _text_numbers("{", values))


def given(value: Any) -> dict[str, Any]:
    """What `to_dict()` says; of a dataclass only what differs from its defaults, as it would stand in a file."""
    values: dict[str, Any] = value.to_dict()
    if not is_dataclass(value):
        return values
    for entry in fields(value):  # TrainingArguments.to_dict() leaves ParallelismConfig out
        attribute = getattr(value, entry.name, None)
        if values.get(entry.name) is None and is_dataclass(attribute):
            values[entry.name] = attribute
    defaults = {
        entry.name: entry.default_factory() if entry.default_factory is not MISSING else entry.default
        for entry in fields(value)
        if entry.init
    }
    return {
        name: content
        for name, content in values.items()
        if content is not None and (name == "peft_type" or (name in defaults and content != defaults[name]))
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):  # Accelerate's ParallelismConfig in TrainingArguments
        return {entry.name: getattr(value, entry.name) for entry in fields(value)}
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def parse(text: str, name: str) -> dict[str, Any]:
    """The mapping in a JSON or YAML text.

    Raises:
        ConfigError: the text is neither, or ends early, or sets a key twice, or is not a mapping.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(text, object_pairs_hook=_once)
        except ValueError as error:
            at = f"{name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else name
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            cut = isinstance(error, json.JSONDecodeError) and (
                error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
            )
            fix = "the file ends early: write it anew" if cut else "correct it there; JSON has no trailing commas"
            raise ConfigError(f"{at}: not JSON: {one_line(reason).removesuffix(' at')}", fix) from None
        except RecursionError:
            raise ConfigError(f"{name} is nested too deep", "name a config file") from None
    else:
        value = read_yaml(text, name).value
    if not isinstance(value, dict) or not value:
        kind = "empty" if not value else f"a {type(value).__name__}"
        raise ConfigError(f"{name} is {kind}, not a mapping of keys", "name a config file of one of the tools")
    return value


def line_numbers(text: str, name: str) -> dict[str, int]:
    """Dotted key → its line in a JSON or YAML text; empty where the text is JSON that is no YAML."""
    try:
        document = read_yaml(text.replace("\t", " "), name)  # a tab in JSON is never part of a key or a value
    except ConfigError:
        return {}
    return {".".join(path): line for path, line in document.lines.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {shown(key)} is set twice, which DeepSpeed refuses")
        content[key] = value
    return content


def recognise(value: dict[str, Any], name: str) -> str:
    """The tool whose file this is.

    Raises:
        ConfigError: it is shardkit's own, or no tool's.
    """
    sections = section_fields()
    if all(key in sections and isinstance(keys, (dict, type(None))) for key, keys in value.items()):
        raise ConfigError(f"{name} is a config of shardkit itself", "pass it without --from")
    if any(mark in value for mark in V1_MARKS):
        raise ConfigError(
            f"{name} is a recipe of LLaMA-Factory's second trainer (v1), whose loop no plan here has",
            "name a recipe of its first trainer, with model_name_or_path and finetuning_type",
        )
    strong = recipe(value) if "base_model" in value or "model_name_or_path" in value else ""
    for tool, marks in () if strong else _MARKS.items():
        if any(mark in value for mark in marks):
            return tool
    if strong:
        return strong
    if any(isinstance(value.get(half), dict) for half in ("fp16", "bf16")):
        return "deepspeed"
    weak = recipe(value)
    if weak:
        return weak
    keys = flatten(value)
    tools = [tool for tool in KEYS if tool not in (*_MARKED, *RECIPES)]
    scores = {tool: sum(bool(find(tool, key)) or key in RENAMED[tool] for key in keys) for tool in tools}
    best = max(scores, key=lambda tool: scores[tool])
    if not scores[best]:
        some = ", ".join(shown(key) for key in list(value)[:3])
        raise ConfigError(
            f"{name} is no config of Accelerate, DeepSpeed, transformers' Trainer, TRL, LLaMA-Factory or axolotl: none "
            f"has {some}",
            "name one of their files; of another tool, its DeepSpeed or Accelerate file",
        )
    return best


def foreign_file_error(name: str, content: dict[str, Any]) -> ConfigError | None:
    """The error for another tool's file in the place of a config; `None` if no tool has its keys."""
    try:
        tool = recognise(content, name)
    except ConfigError:  # its keys are named as unknown keys of a config
        return None
    option = "--model" if tool == "model" else "--peft" if tool == "peft" else "--from"
    return ConfigError(
        f"{name} is a file of {family(tool)}, not a config of shardkit",
        f"pass it as {option} {name}: shardkit plan, ladder and submit take it",
    )


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of all values; a mapping is never a value, and an empty one nothing."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            flat |= flatten(inner, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def _text_numbers(text: str, values: dict[str, Any]) -> dict[str, str]:
    """Numbers that the tools' own reader takes for text: PyYAML's `1e-5`, and numbers in quotes."""
    quoted = {key: value for key, value in values.items() if isinstance(value, str) and _is_number(value)}
    if text.lstrip().startswith(("{", "[")):
        return quoted
    try:
        plain = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # read_yaml is stricter: it read the text
        return quoted
    flat = flatten(plain) if isinstance(plain, dict) else {}
    unquoted = {
        key: flat[key] for key, value in values.items() if isinstance(value, float) and isinstance(flat.get(key), str)
    }
    return {**quoted, **unquoted}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def family(tool: str) -> str:
    """The tool's name in messages."""
    return NAMES[tool]
