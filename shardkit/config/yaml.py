"""Read YAML with checks that PyYAML lacks: the line of every key, no duplicate keys, bounds, and plain values only.

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

MAX_DEPTH = 50
MAX_VALUES = 100_000
MAX_INT_BITS = 64
_MAX_BYTES = 2**24

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
    "int": r"[-+]?(0|[1-9](_?[0-9]){0,30})",
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "str": r".*",
}
_PATTERNS = {_TAG + kind: re.compile(rf"(?:{pattern})\Z", re.DOTALL) for kind, pattern in _SCALARS.items()}


@dataclass
class Document:
    """A parsed document: its value, and the line of each key path (1-based)."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)


def read_text(path: FilePath, name: str, kind: str, inside: str) -> str:
    """The text of a config file.

    Args:
        name: the file's name, for messages.
        kind: which kind of file is expected.
        inside: the fix where the path is a directory.

    Raises:
        ConfigError: it cannot be read, is a directory, a pipe or a device, too large or not text.
        FileNotFoundError: there is none.
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
    """Parse one document into None, bool, int, float, str, lists and dicts with text keys.

    Raises:
        ConfigError: not YAML, duplicate or non-text keys, unsupported tags, nested or expanded beyond reason; the
            message names `source` with the line, and the column if the text is not YAML.
    """
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an escape beyond the last code point
        raise ConfigError(
            f"{source} is not YAML: {one_line(str(error))}", "use plain UTF-8 text without control characters"
        ) from None


class _Loader(yaml.SafeLoader):
    """Takes nodes and scalar values from PyYAML; its own walk over the nodes counts values and records lines."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.source, self.count, self.n_nodes, self.depth = source, 0, 0, 0
        self.lines: dict[Path, int] = {}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        self.n_nodes, self.depth = self.n_nodes + 1, self.depth + 1
        # Keys are nodes too. PyYAML looks at every open bracket again for each token: the time grows with the depth.
        if self.n_nodes > 2 * MAX_VALUES or self.depth > MAX_DEPTH + 2:
            raise _too_deep(self.source)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:  # not merged yet: a key may override a merged one, not itself
            if key_node.tag != f"{_TAG}merge":
                key, line = self.key(key_node), key_node.start_mark.line + 1
                if key in first_lines:
                    raise ConfigError(
                        f"{self.at(key_node)}: key {shown(key)} is already set on line {first_lines[key]}",
                        f"keep one of the two {shown(key)}",
                    )
                first_lines[key] = line
        return node

    def value(self, node: yaml.Node, path: Path = (), depth: int = 0) -> Any:
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_VALUES:  # an alias inside its own anchor, or anchors of anchors
            raise _too_deep(self.at(node))
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, path, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            self.flatten_mapping(node)
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                inner = (*path, self.key(key_node))
                self.lines[inner] = key_node.start_mark.line + 1
                result[inner[-1]] = self.value(value_node, inner, depth + 1)
            return result
        return self.scalar(node)

    def key(self, node: yaml.Node) -> str:
        key = self.scalar(node) if isinstance(node, yaml.ScalarNode) else node.tag
        if not isinstance(key, str) or not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{self.at(node)}: a key must be text, found {shown(key)}", "quote the key")
        return key

    def scalar(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _PATTERNS:
            tag = one_line(str(node.tag).replace(_TAG, "!!"), 60)
            raise ConfigError(
                f"{self.at(node)}: the tag {tag} is not supported",
                "use plain text, numbers, true/false, null, lists and mappings",
            )
        if not _PATTERNS[node.tag].match(node.value):  # only after an explicit tag such as !!int
            raise ConfigError(
                f"{self.at(node)}: {shown(node.value)} does not fit its tag !!{node.tag.removeprefix(_TAG)}",
                "remove the tag",
            )
        return check_plain(self.construct_object(node), self.at(node))

    def at(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}"


for _tag, _pattern in _PATTERNS.items():
    if not _tag.endswith(":str"):
        _Loader.add_implicit_resolver(_tag, _pattern, None)
_Loader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"<<\Z"), ["<"])


def check_plain(value: Any, name: str, depth: int = 0) -> Any:
    """The value with tuples as lists; a ConfigError if it is recursive or holds something that a config cannot."""
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
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise ConfigError(f"{one_line(name)} is an integer of {value.bit_length()} bits", "use a smaller number")
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
    return ConfigError(
        f"{one_line(source)}: nested deeper than {MAX_DEPTH} levels, or more than {MAX_VALUES} values",
        "flatten it; an anchor may not contain itself",
    )
