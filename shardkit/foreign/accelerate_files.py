"""Accelerate's config file: the installed release's own class reads it. Accelerate imports torch: import it late."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import ConfigError, one_line


class Release(NamedTuple):
    """The installed release of Accelerate: keys at the top of its file, and keys of the sections with their defaults
    (the options of `accelerate launch`)."""

    version: str
    names: frozenset[str]
    options: dict[str, Any]

    def knows(self, key: str) -> bool:
        section, _, option = key.partition(".")
        return section in self.names and (not option or option.partition(".")[0] in self.options)


@lru_cache
def accelerate_release() -> Release:
    from accelerate import __version__
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    options = dict.fromkeys(f"fsdp_{entry.name}" for entry in fields(FullyShardedDataParallelPlugin))
    options |= dict.fromkeys(entry.name for entry in fields(DeepSpeedPlugin))  # some keys of the file are no options
    options |= vars(launch_command_parser().parse_args(["script"]))
    return Release(__version__, frozenset(entry.name for entry in fields(ClusterConfig)), options)


def read_content(content: dict[str, Any], name: str) -> dict[str, Any]:
    """A file's content as Accelerate's class holds it, with keys of earlier releases under their names of today.

    Keys that the class does not have stay, to be named as unknown.
    """
    release = accelerate_release()
    from accelerate.commands.config.config_args import ClusterConfig

    try:
        converted = ClusterConfig.process_config(dict(content))
        config = ClusterConfig(**{key: converted[key] for key in converted if key in release.names}).to_dict()
    except (ValueError, TypeError) as error:
        cause = f"{name}: Accelerate {release.version} refuses it: {one_line(error).rstrip('.')}"
        raise ConfigError(cause, "correct the file; `accelerate config` writes one") from None
    if config.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(f"{name} is a job of Amazon SageMaker", "name one whose compute_environment is LOCAL_MACHINE")
    has_old_keys = not content.keys() <= converted.keys()
    keys = [key for key in converted if key in content or (has_old_keys and converted[key])]
    return {key: config.get(key, converted[key]) for key in keys}
