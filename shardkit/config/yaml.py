"""Read YAML with what PyYAML lacks: the line of every key, no duplicate keys, and plain values only.

Text that YAML 1.1 reads in surprising ways is read as it looks: `1e-4` is a number, `12:30:00` and `2024-01-01` are
text, and `010` is not octal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from ..errors import ConfigError, one_line
from .errors import Path, shown

_MAX_BYTES = 2**24

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
    "int": r"[-+]?(0|[1-9](_?[0-9]){0,30})",
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}


@dataclass
class Document:
    """A parsed document: its value, and the line of each key path (1-based)."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)


def read_text(path: FilePath, name: str, kind: str, inside: str) -> str:
    """The text of a config file.

    `name`: the file's name, for messages. `kind`: which kind of file is expected. `inside`: the fix where the path is a
    directory.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{name} is a directory", inside)
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{name} is larger than {_MAX_BYTES >> 20} MiB", f"name a {kind} file")
        if not path.is_file():  # a pipe would be waited for, and a device has no end
            raise ConfigError(f"{name} cannot be read: not a regular file", f"name a {kind} file")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start})", f"save it as UTF-8; is it a {kind} file at all?"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{name} cannot be read: {reason}", "check the path and its permissions") from None


def read_yaml(text: str, source: str) -> Document:
    """Parse one document into None, bool, int, float, str, lists and dicts with text keys."""
    try:
        loader = _Loader(text, source)
        node = loader.get_single_node()
        return Document() if node is None else Document(loader.value(node), loader.lines)
    except RecursionError:
        raise _too_deep(source) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(
            f"{at}: not YAML: {one_line(error.problem or error.context or 'cannot be parsed')}",
            "check indentation (no tabs), colons and quotes there; quote text that starts with * & ! or %",
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: an escape beyond the last code point
        raise ConfigError(
            f"{source} is not YAML: {one_line(str(error))}", "use plain UTF-8 text without control characters"
        ) from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with its own walk over the nodes: it records the line of each key."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.source = source
        self.lines: dict[Path, int] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_lines: dict[str, int] = {}
        # Here `<<` is not merged yet: a key may override one that is merged, but not itself.
        for key_node, _ in node.value:
            if key_node.tag != f"{_TAG}merge":
                key, line = self.key(key_node), key_node.start_mark.line + 1
                if key in first_lines:
                    raise ConfigError(
                        f"{self.at(key_node)}: key {shown(key)} is already set on line {first_lines[key]}",
                        f"keep one of the two {shown(key)}",
                    )
                first_lines[key] = line
        return node

    def value(self, node: yaml.Node, path: Path = ()) -> Any:
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, path) for item in node.value]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            self.flatten_mapping(node)
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                inner = (*path, self.key(key_node))
                self.lines[inner] = key_node.start_mark.line + 1
                result[inner[-1]] = self.value(value_node, inner)
            return result
        return self.scalar(node)

    def key(self, node: yaml.Node) -> str:
        key = self.scalar(node) if isinstance(node, yaml.ScalarNode) else node.tag
        if not isinstance(key, str) or not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{self.at(node)}: a key must be text, found {shown(key)}", "quote the key")
        return key

    def scalar(self, node: yaml.Node) -> Any:
        try:
            value = self.construct_object(node, deep=True)
        except (ValueError, LookupError) as error:  # after an explicit tag, such as !!int
            raise ConfigError(
                f"{self.at(node)}: does not fit its tag: {one_line(str(error))}", "remove the tag"
            ) from None
        return check_plain(value, self.at(node))

    def at(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}"


for _kind, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z", re.DOTALL), None)


def check_plain(value: Any, name: str) -> Any:
    """The value with tuples as lists; a ConfigError if it is recursive or holds something that a config cannot."""
    try:
        return _plain(value, name)
    except RecursionError:
        raise _too_deep(name) from None


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{name} has the key {shown(key)}, which is not text", "quote the key")
            _plain(key, name)
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if isinstance(value, int) and value.bit_length() > 64:
        raise ConfigError(f"{one_line(name)} is an integer of {value.bit_length()} bits", "use a smaller number")
    # The operating system takes no NUL in a path, and half of a surrogate pair cannot be printed.
    if isinstance(value, str) and (wrong := re.search("[\0\ud800-\udfff]", value)):
        kind = "a NUL character" if wrong[0] == "\0" else "half of a surrogate pair"
        raise ConfigError(f"{one_line(name)}={shown(value)} holds {kind}", "write another character, as UTF-8")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    raise ConfigError(
        f"{one_line(name)} is a {type(value).__name__}, which a config cannot hold",
        "use text, a number, true/false, null, a list or a mapping",
    )


def _too_deep(source: str) -> ConfigError:
    return ConfigError(f"{one_line(source)}: nested too deeply", "flatten it; an anchor may not contain itself")
