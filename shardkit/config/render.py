"""A configuration as YAML text with the source of each value behind it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from .schema import RunConfig

COMMENT_COLUMN = 44

# Text that every YAML reader takes for text without quotes.
_PLAIN = re.compile(r"[A-Za-z./~][A-Za-z0-9_./-]*\Z")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "~", ".inf", ".nan"}


def render(config: RunConfig, sources: Mapping[str, str]) -> str:
    """Every key of every section, in the order of the reference, as `key: value  # source`."""
    lines = ["# The resolved configuration; behind each value, where it came from."]
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
