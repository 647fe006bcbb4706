"""The settings so far, layer by layer, and where each was set; they become a validated configuration."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError, one_line
from .errors import (
    Path,
    combined,
    from_validation,
    section_fields,
    shown,
    unknown_key,
    wrong_value,
)
from .presets import HF_PRESETS, MODEL_PRESETS
from .removed import KEYS
from .schema import RunConfig
from .yaml import Document, check_plain, read_yaml

COMMAND_LINE = "command line"


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
        if len(path) > 2 and not _is_mapping_field(path):
            raise ConfigError(
                f"{dotted} is set on the {COMMAND_LINE}, but {'.'.join(path[:2])} is a value, not a section",
                f"set {'.'.join(path[:2])}=<value>",
            )
        self._put(path, value)

    def _put(self, path: Path, value: Any) -> None:
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
        """The validated configuration and the source of every leaf.

        Raises:
            ConfigError: the message names every problem in the file and in the overrides' values.
        """
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
                if (
                    isinstance(value, bool)
                    and "bool" not in annotation
                    and ("int" in annotation or "float" in annotation)
                ):
                    path = (section, key)
                    problems.append(wrong_value(path, value, self._source_of(path)))
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


def _is_mapping_field(path: Path) -> bool:
    annotation = str(section_fields()[path[0]][path[1]].annotation)
    return "dict" in annotation or "QuantizeConfig" in annotation


def _leaves(tree: dict[str, Any], prefix: Path = ()) -> list[Path]:
    """Key paths down to values that are not mappings; an empty mapping is a value."""
    paths: list[Path] = []
    for key, value in tree.items():
        path = (*prefix, key)
        paths += _leaves(value, path) if isinstance(value, dict) and value else [path]
    return paths
