"""Reads a run's configuration: defaults, then a YAML file, then `section.key=value` overrides.

A later layer wins. `model.preset` expands in the layer that sets it: a preset on the command line also replaces sizes
that the file sets, and a size set beside a preset wins over it. If an override is given twice, the last one wins.
`python -m shardkit.config.load configs/schema.json` writes the JSON schema for editors.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import yaml

from ..errors import ConfigError, one_line
from .errors import json_schema, section_fields
from .layers import Layers, split_override
from .schema import RunConfig
from .yaml import Document, read_text, read_yaml

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


__all__ = ["LoadedConfig", "json_schema", "load_config", "resolve_batch"]

Overrides = Sequence[str] | Mapping[str, Any]
Recognise = Callable[[str, dict[str, Any]], ConfigError | None]
"""(a file's name, its content) → the error that names the tool whose config it is; `None` if it is no other tool's."""


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration and where each value came from.

    Attributes:
        config: the configuration.
        sources: dotted key -> "default", the file's path, "command line" or "preset <name>"; one entry per leaf, so
            keys inside `task.args` and `parallel.ds_config` have their own.
    """

    config: RunConfig
    sources: Mapping[str, str]

    def render(self) -> str:
        """The whole configuration as YAML, each value with its source in a comment; it loads to the same config."""
        return render(self.config, self.sources)


def load_config(
    path: str | FilePath | None = None, overrides: Overrides = (), recognise: Recognise | None = None
) -> LoadedConfig:
    """Read a config file (None: defaults) and apply overrides.

    Args:
        path: a YAML file; an empty one gives the defaults.
        overrides: `["optim.lr=1e-3", "parallel.ds_config.zero_optimization.overlap_comm=false"]`, values parsed as
            YAML, or a mapping `{"optim.lr": 1e-3}` of dotted keys to values.
        recognise: names another tool's file, as `shardkit.foreign.files.foreign_file_error` does; without it, the keys
            of such a file are unknown.

    Raises:
        ConfigError: the file cannot be read, is not YAML or is another tool's, or it or an override sets an invalid
            value.
    """
    layers = Layers()
    if path == "":  # as a path it would be the current directory
        raise ConfigError(
            "the name of the config file is empty", "name a YAML file; is a variable of the shell not set?"
        )
    if path is not None:
        document = _read(FilePath(path))
        if recognise is not None and _has_few_sections(document.value):
            error = recognise(one_line(str(path)), document.value)
            if error is not None:
                raise error
        layers.add_file(str(path), document)
    if isinstance(overrides, str):
        overrides = [overrides]
    items = overrides.items() if isinstance(overrides, Mapping) else [split_override(item) for item in overrides]
    for dotted, value in items:
        layers.add_override(dotted, value, raw=not isinstance(overrides, Mapping))
    return LoadedConfig(*layers.resolve())


def _has_few_sections(content: Any) -> bool:
    """Whether most keys at the top of a mapping are no sections of a config."""
    return isinstance(content, dict) and 2 * sum(key in section_fields() for key in content) < len(content)


def resolve_batch(config: RunConfig, world_size: int) -> int:
    """Micro-batches per optimizer step: `train.grad_accum_steps`, or derived from `train.global_batch_size`.

    Raises:
        ConfigError: the global batch cannot be cut into whole micro-batches per rank, or contradicts grad_accum_steps.
    """
    train = config.train
    if train.global_batch_size is None:
        return train.grad_accum_steps or 1
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
            f"micro_batch_size × world size = {train.micro_batch_size} × {world_size} = {pass_size}",
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
        raise ConfigError(f"config file {name} does not exist", _nearby(path)) from None
    return read_yaml(text, name)


def _nearby(path: FilePath) -> str:
    if re.match(r"[a-z_]+(\.\w+)+=", str(path)):  # a setting
        return "put a config file before the settings, or - for the defaults"
    try:
        names = sorted(item.name for item in path.parent.glob("[!.]*.yaml"))
    except (OSError, ValueError):
        names = []
    if not names:
        return "check the path; a relative one starts at the current directory"
    return one_line(f"in {path.parent}: {', '.join(names)}")


if __name__ == "__main__":
    try:
        FilePath(sys.argv[1]).write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    except (IndexError, OSError) as problem:
        print(f"usage: python -m shardkit.config.load configs/schema.json ({problem})", file=sys.stderr)
        sys.exit(2)
