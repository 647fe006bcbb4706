"""YAML read strictly: plain values only, no duplicate keys, the line of every key.

Differs from PyYAML's safe loader where its YAML 1.1 rules surprise people: `1e-4` is a number, `12:30:00` and
`2024-01-01` are text, `010` is not octal, and tags beyond plain scalars, lists and mappings are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import ConfigError

Path = tuple[str, ...]
MAX_DEPTH = 50
MAX_VALUES = 100_000
MAX_INT_BITS = 64

_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", lambda text: None),
    "tag:yaml.org,2002:bool": (
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        lambda text: text.lower() in ("yes", "true", "on"),
    ),
    "tag:yaml.org,2002:int": (r"[-+]?(0|[1-9](_?[0-9]){0,30})", int),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
    "tag:yaml.org,2002:str": (r".*", str),
}
_PATTERNS = {tag: re.compile(rf"(?:{pattern})\Z", re.DOTALL) for tag, (pattern, _) in _SCALARS.items()}


class _Loader(yaml.SafeLoader):
    """SafeLoader with this module's scalar rules."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}


for _tag, _pattern in _PATTERNS.items():
    if not _tag.endswith(":str"):
        _Loader.add_implicit_resolver(_tag, _pattern, None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<\Z"), ["<"])


@dataclass
class Document:
    """A parsed document: the value and, for each key path, the line it stands on (1-based)."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)


def read_yaml(text: str, where: str) -> Document:
    """Parse one document into None, bool, int, float, str, lists and dicts with text keys.

    Raises:
        ConfigError: not YAML, duplicate or non-text keys, unsupported tags, nested or expanded beyond reason; names
            `where` with line and column.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return _Builder(where, loader).document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise _too_deep(where) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(where, error) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an escape beyond the last code point
        raise ConfigError(
            f"{where} is not YAML: {one_line(str(error))}", "use plain UTF-8 text without control characters"
        ) from None


def check_plain(value: Any, name: str, depth: int = 0) -> Any:
    """The value with tuples as lists, or ConfigError when it holds what YAML in a config cannot (also recursion)."""
    if depth > MAX_DEPTH:
        raise _too_deep(name)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{name} has the key {shown(key)}, which is not text", "quote the key")
            check_plain(key, name)
        return {str(key): check_plain(item, f"{name}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [check_plain(item, name, depth + 1) for item in value]
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise ConfigError(f"{one_line(name)} is an integer of {value.bit_length()} bits", "use a smaller number")
        return value
    if isinstance(value, str):
        if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
            raise ConfigError(
                f"{one_line(name)} holds half of a surrogate pair", "write the character itself, as UTF-8"
            )
        return str(value)
    raise ConfigError(
        f"{one_line(name)} is a {type(value).__name__}, which a config cannot hold",
        "use text, a number, true/false, null, a list or a mapping",
    )


def one_line(text: str, limit: int = 200) -> str:
    """Text fit for one line of an error message."""
    flat = " ".join(text.split())
    flat = "".join(char if char.isprintable() else repr(char)[1:-1] for char in flat)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def shown(value: Any, limit: int = 60) -> str:
    """A value as it is shown in messages: its repr, on one line, shortened."""
    try:
        if value is None or isinstance(value, bool):
            text = "null" if value is None else str(value).lower()
        else:
            text = repr(list(value) if isinstance(value, tuple) else value)
    except (ValueError, RecursionError):  # integers of more than 4300 digits, nesting beyond the stack
        text = f"a huge {type(value).__name__}"
    return one_line(text, limit)


class _Builder:
    """Turns YAML nodes into plain values, keeping the line of every key."""

    def __init__(self, where: str, loader: _Loader) -> None:
        self._where = where
        self._loader = loader
        self._lines: dict[Path, int] = {}
        self._count = 0

    def document(self, node: yaml.Node | None) -> Document:
        if node is None:
            return Document()
        return Document(self._value(node, ()), self._lines)

    def _value(self, node: yaml.Node, path: Path, depth: int = 0) -> Any:
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_VALUES:  # an alias inside its own anchor, or anchors of anchors
            raise _too_deep(self._at(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            return [self._value(item, path, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return self._mapping(node, path, depth)
        raise self._bad_tag(node)

    def _mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> dict[str, Any]:
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:  # before merging: a key may override a merged one, not itself
            if key_node.tag.endswith(":merge"):
                continue
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in first_lines:
                raise ConfigError(
                    f"{self._where}:{line}: key {shown(key)} is already set on line {first_lines[key]}",
                    f"keep one of the two {shown(key)}",
                )
            first_lines[key] = line
        self._loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            inner = (*path, key)
            self._lines[inner] = key_node.start_mark.line + 1
            result[key] = self._value(value_node, inner, depth + 1)
        return result

    def _key(self, node: yaml.Node) -> str:
        key = self._scalar(node) if isinstance(node, yaml.ScalarNode) else node.tag
        if not isinstance(key, str) or not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{self._at(node)}: a key must be text, found {shown(key)}", "quote the key")
        return key

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        if node.tag not in _SCALARS:
            raise self._bad_tag(node)
        if not _PATTERNS[node.tag].match(text):  # only after an explicit tag such as !!int
            raise ConfigError(
                f"{self._at(node)}: {shown(text)} does not fit its tag !!{node.tag[18:]}", "remove the tag"
            )
        value = _SCALARS[node.tag][1](text)
        return check_plain(value, self._at(node))

    def _bad_tag(self, node: yaml.Node) -> ConfigError:
        tag = one_line(str(node.tag).replace("tag:yaml.org,2002:", "!!"), 60)
        return ConfigError(
            f"{self._at(node)}: the tag {tag} is not supported",
            "use plain text, numbers, true/false, null, lists and mappings",
        )

    def _at(self, node: yaml.Node) -> str:
        return f"{self._where}:{node.start_mark.line + 1}"


def _too_deep(where: str) -> ConfigError:
    return ConfigError(
        f"{one_line(where)}: nested deeper than {MAX_DEPTH} levels, or more than {MAX_VALUES} values",
        "flatten it; an anchor may not contain itself",
    )


def _syntax_error(where: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    at = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
    problem = one_line(error.problem or error.context or "cannot be parsed")
    return ConfigError(
        f"{at}: not YAML: {problem}",
        "check indentation (no tabs), colons and quotes there; quote text that starts with * & ! or %",
    )
