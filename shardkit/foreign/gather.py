"""The files of one job: those that a user names, those that they name, and the model's own config."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, one_line
from .files import File, family, flatten, parse, read, read_object, read_text
from .tables import DEEPSPEED, Problem
from .tools import base

_HEADER = 100_000_000
"""Bytes of a safetensors file's header at most, as its library has it."""
_TYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def gather(names: Iterable[Any]) -> tuple[list[File], list[Problem]]:
    """The files, those that they name, and configs inside them as files of their own.

    Args:
        names: of files, or their contents as `files.read_object` takes them.

    Raises:
        ConfigError: a file cannot be read, or there are two of one tool.
    """
    named = [read(str(name)) if isinstance(name, (str, Path)) else read_object(name) for name in names]
    files: list[File] = []
    problems: list[Problem] = []
    for file in named:
        values, position = dict(file.values), len(files)
        for key, tool in (("deepspeed", "trainer"), ("deepspeed_config.deepspeed_config_file", "accelerate")):
            off = tool == "accelerate" and str(values.get("distributed_type")).upper() != "DEEPSPEED"
            if base(file.tool) != tool or off:
                continue
            inner = replace(file, values=values).section(key)
            if inner:  # a whole DeepSpeed config in place of a path
                lines = replace(file, values=file.lines).section(key)
                files.append(
                    File(f"{file.name}: {key}", "deepspeed", prefixed("deepspeed", inner),
                         lines=prefixed("deepspeed", lines))
                )  # fmt: skip
                values = {name: value for name, value in values.items() if not name.startswith(f"{key}.")}
            elif values.get(key) and not any(named_file.tool == "deepspeed" for named_file in named):
                _follow(file, key, str(values[key]), files, problems)
        if base(file.tool) == "trainer" and isinstance(values.get("fsdp_config"), str):
            values |= _fsdp_file(file, values, problems)
        files.insert(position, replace(file, values=prefixed(file.tool, values), lines=prefixed(file.tool, file.lines)))
    for tool in ("accelerate", "deepspeed", "trainer", "model", "peft"):
        same = [file for file in files if base(file.tool) == tool]
        if len(same) > 1:
            names, tools = " and ".join(file.name for file in same), dict.fromkeys(family(file.tool) for file in same)
            raise ConfigError(
                f"{names} are both files of {' and '.join(tools)}", "name the files of one job: one of each tool"
            )
    return files, problems


def _follow(file: File, key: str, path: str, files: list[File], problems: list[Problem]) -> None:
    if candidate := _named_file(file, key, path, problems):
        named_file = read(candidate)
        values, lines = prefixed(named_file.tool, named_file.values), prefixed(named_file.tool, named_file.lines)
        files.append(replace(named_file, values=values, lines=lines))


def _named_file(file: File, key: str, path: str, problems: list[Problem]) -> str:
    """The path of a file that a key names, from here or from beside its own file; empty, with a problem, if neither."""
    for candidate in (Path(path), file.folder / path):
        if candidate.is_file():
            return str(candidate)
    cause = f"{file.name}: {key}={one_line(path)} names a file that does not exist"
    problems.append(Problem("missing file", cause, "correct the path, or pass that file too", keys=(key,)))
    return ""


def _fsdp_file(file: File, values: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    path = values.pop("fsdp_config")
    if path.startswith("{"):
        return flatten({"fsdp_config": parse(path, f"{file.name}: fsdp_config")})
    candidate = _named_file(file, "fsdp_config", path, problems)
    return flatten({"fsdp_config": parse(read_text(candidate), candidate)}) if candidate else {}


def prefixed(tool: str, values: dict[str, Any]) -> dict[str, Any]:
    """Every key as the tables spell it.

    Accelerate adds the prefixes `fsdp_`, `dynamo_` and `fp8_`, the Trainer removes `fsdp_`, and DeepSpeed also takes
    keys of stage 3 without `stage3_`.
    """

    def name(key: str) -> str:
        section, _, option = key.partition(".")
        if base(tool) == "trainer" and section == "fsdp_config":
            return f"{section}.{option.removeprefix('fsdp_')}" if option else key
        if tool == "accelerate" and section in ("fsdp_config", "dynamo_config", "fp8_config") and option:
            prefix = section.removesuffix("config")
            return key if option.startswith(prefix) else f"{section}.{prefix}{option}"
        if tool == "deepspeed" and f"{section}.stage3_{option}" in DEEPSPEED and key not in DEEPSPEED:
            return f"{section}.stage3_{option}"
        return key

    return {name(key): value for key, value in values.items()}


def adapter_file(path: str) -> str:
    """peft's `adapter_config.json`, or the one in a folder.

    Raises:
        ConfigError: there is none, or it is another tool's file.
    """
    location = Path(path).expanduser()
    name = str(location / "adapter_config.json" if location.is_dir() else location)
    if location.is_dir() and not Path(name).is_file():
        raise ConfigError(
            f"--peft {one_line(path)} has no adapter_config.json", "name peft's file, or the folder that holds one"
        )
    try:
        tool = read(name).tool
    except ConfigError as error:
        raise ConfigError(f"--peft: {error.cause}", f"{error.fix}; --peft takes peft's adapter_config.json") from None
    if tool != "peft":
        raise ConfigError(
            f"--peft {one_line(path)} is a file of {family(tool)}: it has no peft_type",
            "name peft's adapter_config.json; files of other tools belong to --from",
        )
    return name


def read_model(path: str) -> dict[str, Any]:
    """A model's `config.json`.

    Raises:
        ConfigError: there is none, or it cannot be read, or only code of its own could build the model.
    """
    location = Path(path).expanduser()
    file = location / "config.json" if location.is_dir() else location
    if not file.is_file():
        fault = "has no config.json" if location.is_dir() else "does not exist"
        raise ConfigError(
            f"--model {one_line(path)} {fault}", "name a transformers config.json, or the folder that holds one"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model {file} cannot be read: {one_line(str(error))}", "write it anew") from None
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("architectures")):
        raise ConfigError(
            f"--model {file} is no transformers config: it has no model_type", "name the model's own config.json"
        )
    if not (config.get("dtype") or config.get("torch_dtype")):
        dtype = next((_stored_dtype(weights) for weights in sorted(file.parent.glob("*.safetensors"))), "")
        config |= {"dtype": dtype} if dtype else {}
    return config


def _stored_dtype(file: Path) -> str:
    """The type of a safetensors file's first floating weight, which from_pretrained takes for a config without one.

    Raises:
        ConfigError: the file has no header that can be read.
    """
    try:
        if not file.is_file():  # a pipe would be waited for, and a device has no end
            raise OSError("not a regular file")
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > _HEADER:
                raise ValueError("its header is too long")
            header = json.loads(stream.read(size))
            types = [_TYPES.get(entry.get("dtype")) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--model: {file} cannot be read: {one_line(str(error))}", "copy the file again, or remove it"
        ) from None
    return next(filter(None, types), "")
