"""Reads a run's configuration: defaults, then a YAML file, then `section.key=value` overrides.

A later layer wins. `model.preset` expands in the layer that sets it: a preset on the command line also replaces sizes
that the file sets, and a size set beside a preset wins over it. If an override is given twice, the last one wins.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import ValidationError

from ..errors import ConfigError, one_line
from .errors import Path, combined, from_validation, shown, unknown_key, wrong_value
from .other_tools import other_tool_error
from .presets import HF_PRESETS, MODEL_PRESETS
from .removed import KEYS
from .schema import RunConfig, section_fields
from .yaml import Document, check_plain, read_text, read_yaml

COMMAND_LINE = "command line"

Overrides = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration and where each value came from."""

    config: RunConfig  # the configuration
    # dotted key -> "default", the file's path, "command line" or "preset <name>"; one entry per leaf, so keys inside
    # `task.args` and `parallel.ds_config` have their own
    sources: Mapping[str, str]

    def render(self) -> str:
        """The whole configuration as YAML, each value with its source in a comment; it loads to the same config."""
        return render(self.config, self.sources)


def load_config(path: str | FilePath | None = None, overrides: Overrides = ()) -> LoadedConfig:
    """Read a config file (None: defaults) and apply overrides.

    `path`: a YAML file; an empty one gives the defaults. `overrides`: `["optim.lr=1e-3",
    "parallel.ds_config.zero_optimization.overlap_comm=false"]`, values parsed as YAML, or a mapping `{"optim.lr":
    1e-3}` of dotted keys to values.
    """
    layers = Layers()
    if path == "":  # as a path it would be the current directory
        raise ConfigError(
            "the name of the config file is empty", "name a YAML file; is a variable of the shell not set?"
        )
    if path is not None:
        document = _read(FilePath(path))
        if isinstance(document.value, dict) and (error := other_tool_error(one_line(str(path)), document.value)):
            raise error
        layers.add_file(str(path), document)
    if isinstance(overrides, str):
        overrides = [overrides]
    items = overrides.items() if isinstance(overrides, Mapping) else [split_override(item) for item in overrides]
    for dotted, value in items:
        layers.add_override(dotted, value, raw=not isinstance(overrides, Mapping))
    return LoadedConfig(*layers.resolve())


def resolve_batch(config: RunConfig, world_size: int) -> int:
    """Micro-batches per optimizer step: `train.grad_accum_steps`, or derived from `train.global_batch_size`."""
    train = config.train
    if train.global_batch_size is None:
        return train.grad_accum_steps or 1
    world_size //= config.parallel.cp * config.parallel.tp  # ranks that share sequences or layers have the same samples
    pass_size = train.micro_batch_size * world_size
    steps, remainder = divmod(train.global_batch_size, pass_size)
    if remainder or not steps:
        below = steps * pass_size
        near = f"{below} or {below + pass_size}" if below else f"{pass_size}"
        cause = "is not a multiple of" if steps else "is less than"
        per_rank, uneven = divmod(train.global_batch_size, world_size)
        fits = [] if uneven else [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        closest = min(fits, key=lambda size: abs(size - train.micro_batch_size), default=0)
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} {cause} "
            f"micro_batch_size × data ranks = {train.micro_batch_size} × {world_size} = {pass_size}",
            f"set train.global_batch_size={near}" + (f", or train.micro_batch_size={closest}" if closest else ""),
        )
    if train.grad_accum_steps is not None and train.grad_accum_steps != steps:
        raise ConfigError(
            f"train.grad_accum_steps={train.grad_accum_steps} contradicts train.global_batch_size="
            f"{train.global_batch_size}: {train.global_batch_size} / ({train.micro_batch_size} × {world_size} ranks) "
            f"= {steps}",
            f"remove train.grad_accum_steps, or set train.global_batch_size={pass_size * train.grad_accum_steps}",
        )
    return steps


def _read(path: FilePath) -> Document:
    name = one_line(str(path))
    try:
        text = read_text(path, f"config file {name}", "YAML", "name a YAML file inside it")
    except FileNotFoundError:
        fix = "check the path; a relative one starts at the current directory"
        with suppress(OSError, ValueError):  # the folder may be missing, or not readable
            if names := sorted(item.name for item in path.parent.glob("[!.]*.yaml")):
                fix = one_line(f"in {path.parent}: {', '.join(names)}")
        if re.match(r"[a-z_]+(\.\w+)+=", str(path)):  # a setting
            fix = "put a config file before the settings, or - for the defaults"
        raise ConfigError(f"config file {name} does not exist", fix) from None
    return read_yaml(text, name)


class Layers:
    """The tree of values set so far, and where each was set."""

    def __init__(self) -> None:
        self._tree: dict[str, dict[str, Any]] = {}
        self._file = ""
        self._lines: dict[Path, int] = {}
        self._overridden: set[Path] = set()
        self._problems: list[ConfigError] = []

    def add_file(self, name: str, document: Document) -> None:
        self._file, self._lines = one_line(name), document.lines
        value = {} if document.value is None else document.value
        if not isinstance(value, dict):
            kind = "list" if isinstance(value, list) else "single value"
            raise ConfigError(
                f"{self._file} holds a {kind}, not a mapping of sections", "start it like this: train: {max_steps: 100}"
            )
        for section, keys in value.items():
            keys = {} if keys is None else keys  # `train:` with every key commented out
            if section in section_fields() and not isinstance(keys, dict):
                error = ConfigError(
                    f"{section}={shown(keys)} ({self._source_of((section,))}), expected a mapping of keys",
                    f"write its keys indented below `{section}:`, or set {section}.<key>=… on the command line",
                )
                self._problems.append(error)
                continue
            paths: list[Path] = [(section, key) for key in keys] if isinstance(keys, dict) else []
            unknown = [path for path in paths or [(section,)] if not _is_key(path)]
            self._problems += [
                unknown_key(path, self._source_of(path))
                for path in unknown
                if len(path) == 1 or not _asks_for_nothing(path, keys[path[1]])
            ]
            if section in section_fields():
                self._tree[section] = {key: value for key, value in keys.items() if (section, key) not in unknown}

    def add_override(self, dotted: Any, value: Any, raw: bool) -> None:
        """Set one dotted key; `raw`: the value is command-line text, to be parsed as YAML."""
        path = tuple(dotted.split(".")) if isinstance(dotted, str) else ()
        if len(path) < 2 or not all(path) or dotted != dotted.strip():
            name = shown(f"{dotted}={value}") if raw else f"key {shown(dotted)}"
            near = unknown_key(path, "").fix if len(path) == 1 and path[0] and path[0] not in section_fields() else ""
            raise _malformed(name, near if near.startswith("did you mean") else "")
        dotted = one_line(check_plain(dotted, "an override's key"))
        if not _is_key(path):
            if len(path) == 2 and _asks_for_nothing(path, read_yaml(value, dotted).value if raw else value):
                return
            raise unknown_key(path, COMMAND_LINE)
        value = _parse_value(path, dotted, value) if raw else check_plain(value, dotted)
        annotation = str(section_fields()[path[0]][path[1]].annotation)
        if len(path) > 2 and "dict" not in annotation and "QuantizeConfig" not in annotation:
            raise ConfigError(
                f"{dotted} is set on the {COMMAND_LINE}, but {'.'.join(path[:2])} is a value, not a section",
                f"set {'.'.join(path[:2])}=<value>",
            )
        target: dict[str, Any] = self._tree.setdefault(path[0], {})
        for depth, part in enumerate(path[1:-1], start=2):
            inner = target.get(part)
            if not (inner is None or isinstance(inner, dict)):
                raise ConfigError(
                    f"{'.'.join(path)} is set on the {COMMAND_LINE}, but {'.'.join(path[:depth])} is {shown(inner)}",
                    f"set {'.'.join(path[:depth])} to a mapping, or to another value as a whole",
                )
            target[part] = {} if inner is None else inner
            target = target[part]
        target[path[-1]] = value
        self._overridden.add(path)

    def resolve(self) -> tuple[RunConfig, dict[str, str]]:
        """The validated configuration and the source of every leaf."""
        set_keys = {section: dict(keys) for section, keys in self._tree.items()}
        sizes = self._preset_sizes()
        self._problems += self._bools_as_numbers()
        try:
            config = RunConfig.model_validate(self._tree)
        except ValidationError as error:
            raise combined([*self._problems, *from_validation(error, self._tree, self._source_of)]) from None
        if self._problems:
            raise combined(self._problems)
        return config, self._sources(config, set_keys, sizes)

    def _preset_sizes(self) -> dict[str, str]:
        """The sources of the preset's sizes; drops the file's sizes if the command line sets the preset."""
        model = self._tree.get("model", {})
        preset = model.get("preset")
        if not isinstance(preset, str) or preset not in {**MODEL_PRESETS, **HF_PRESETS}:
            return {}
        sizes: list[Path] = [("model", key) for key in MODEL_PRESETS.get(preset, ())]
        sizes += [("model", "hf", key) for key in HF_PRESETS.get(preset, ())]
        if ("model", "preset") in self._overridden:
            model_keys: list[Path] = [("model", "hf", key) for key in _inner(self._tree, ("model", "hf", ""))]
            for path in sizes + model_keys:  # keys of one model type mean nothing to another
                if not self._is_overridden(path):
                    _inner(self._tree, path).pop(path[-1], None)
        return {".".join(path): f"preset {preset}" for path in sizes if path[-1] not in _inner(self._tree, path)}

    def _bools_as_numbers(self) -> list[ConfigError]:
        """Remove bools from numeric keys, with an error for each: pydantic reads `max_steps: yes` as 1."""
        fields, problems = section_fields(), []
        for section, keys in self._tree.items():
            for key, value in list(keys.items()):
                annotation = str(fields[section][key].annotation)
                wants_number = "bool" not in annotation and ("int" in annotation or "float" in annotation)
                if isinstance(value, bool) and wants_number:
                    text, source = "a number is neither true nor false", self._source_of((section, key))
                    problems.append(wrong_value((section, key), value, source, text))
                    del keys[key]
        return problems

    def _sources(self, config: RunConfig, set_keys: dict[str, dict[str, Any]], sizes: dict[str, str]) -> dict[str, str]:
        sources = {}
        for path in _leaves(config.model_dump()):
            if ".".join(path) in sizes:
                sources[".".join(path)] = sizes[".".join(path)]
            elif path[1] not in set_keys.get(path[0], {}):
                sources[".".join(path)] = "default"
            else:
                sources[".".join(path)] = COMMAND_LINE if self._is_overridden(path) else self._file
        return sources

    def _is_overridden(self, path: Path) -> bool:
        return any(path[:end] in self._overridden for end in range(2, len(path) + 1))

    def _source_of(self, path: Path) -> str:
        """`file:line` or `command line`, for messages."""
        if self._is_overridden(path) or any(overridden[: len(path)] == path for overridden in self._overridden):
            return COMMAND_LINE
        line = self._lines.get(path)
        return f"{self._file}:{line}" if line else self._file


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Two trees as one; where both have a value, that of `over`."""
    out = dict(base)
    for key, value in over.items():
        are_mappings = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if are_mappings else value
    return out


def _inner(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """The mapping that holds the path's last key; an empty one if there is none."""
    for part in path[:-1]:
        tree = tree.get(part) or {}
        if not isinstance(tree, dict):
            return {}
    return tree


def split_override(item: Any) -> tuple[str, str]:
    """Split `section.key=value` into key and value."""
    dotted, sign, value = item.partition("=") if isinstance(item, str) else ("", "", "")
    if not sign and str(item).endswith((".yaml", ".yml")):
        raise _malformed(shown(item), "name one config; what differs follows it as section.key=value")
    if not sign:
        raise _malformed(shown(item))
    if dotted and not value.strip():
        raise ConfigError(
            f"override {shown(item)} has no value",
            "give it a value (a variable of the shell may be empty), or remove it",
        )
    return dotted, value


def as_override(value: Any) -> str:
    """A plain value as an override has it: `true`, `null`, `1e-05`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _malformed(name: str, hint: str = "") -> ConfigError:
    form = "write section.key=value, for example optim.lr=1e-3 or parallel.strategy=fsdp"
    return ConfigError(f"override {name} is not of the form section.key=value", hint or form)


def _parse_value(path: Path, dotted: str, text: str) -> Any:
    """Parse command-line text as YAML, unless the key holds text (`run.dir=2024`, `data.path=*.txt`)."""
    wants_text = len(path) == 2 and section_fields()[path[0]][path[1]].annotation in (str, str | None)
    if wants_text and text.strip()[:1] not in ('"', "'"):
        return None if text.strip() in ("", "null") else check_plain(text.strip(), dotted)
    try:
        return read_yaml(text, "value").value
    except ConfigError as error:
        raise ConfigError(f"{dotted}={shown(text)} ({COMMAND_LINE}): {error.cause}", error.fix) from None


def _is_key(path: Path) -> bool:
    fields = section_fields()
    return path[0] in fields and (len(path) == 1 or path[1] in fields[path[0]])


def _asks_for_nothing(path: Path, value: Any) -> bool:
    """Whether a removed key has a value that never asked for anything."""
    row = KEYS.get(".".join(path))
    return row is not None and value in row.harmless


def _leaves(tree: dict[str, Any], prefix: Path = ()) -> list[Path]:
    """Key paths down to values that are not mappings; an empty mapping is a value."""
    paths: list[Path] = []
    for key, value in tree.items():
        path = (*prefix, key)
        paths += _leaves(value, path) if isinstance(value, dict) and value else [path]
    return paths


COMMENT_COLUMN = 44

# Text that every YAML reader reads as text without quotes.
_PLAIN = re.compile(r"(?!\.[0-9])[A-Za-z./~][A-Za-z0-9_./-]*\Z")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "~", ".inf", ".nan"}


def render(config: RunConfig, sources: Mapping[str, str]) -> str:
    """Every key of every section, in the order of the reference, as `key: value  # source`."""
    lines = ["# The resolved configuration; the comment after a value names its source."]
    for section, keys in config.model_dump().items():
        lines += ["", f"{section}:"]
        lines += _mapping(keys, (section,), sources)
    return "\n".join(lines) + "\n"


def _mapping(keys: Mapping[str, Any], path: tuple[str, ...], sources: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in keys.items():
        inner = (*path, key)
        if isinstance(value, dict) and value:
            yield f"{indent}{_scalar(key)}:"
            yield from _mapping(value, inner, sources)
        else:
            text = f"{indent}{_scalar(key)}: {_flow(value)}"
            yield f"{text:<{COMMENT_COLUMN}}  # {sources['.'.join(inner)]}"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """One YAML scalar on one line; text that any reader could take for something else is quoted."""
    if isinstance(value, str):
        if _PLAIN.match(value) and value.lower() not in _WORDS:
            return value
        text = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=sys.maxsize)
    else:
        text = yaml.safe_dump(value)
    return str(text).removesuffix("\n").removesuffix("\n...")
