"""Accelerate's config files: classes of the installed release read them, and give their keys and defaults.

Accelerate imports torch, so it is imported when a job has a file of it, and never otherwise. Its classes keep values
and look up no device; the text of a file is parsed before, within the limits on strangers' files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from ..config.libraries import TESTED
from ..errors import ConfigError, one_line
from .installed import Release
from .tables import Settings


@dataclass(frozen=True)
class Accelerate(Release):
    """The installed release.

    Attributes:
        options: the options of `accelerate launch` with their defaults; a section of a file holds them by name.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def knows(self, key: str) -> bool:
        section, _, option = key.partition(".")
        return section in self.names and (not option or option.partition(".")[0] in self.names_in_sections)


@lru_cache
def accelerate_release() -> Accelerate:
    """The release of Accelerate that this Python imports.

    Raises:
        ConfigError: there is none that can be asked.
    """
    try:
        from accelerate import __version__
        from accelerate.commands.config.config_args import ClusterConfig
        from accelerate.commands.launch import launch_command_parser
        from accelerate.utils import FullyShardedDataParallelPlugin
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"Accelerate, which reads its own files, cannot be imported: {one_line(error)}",
            f"install accelerate {' to '.join(TESTED['accelerate'])}",
        ) from None
    names = frozenset(entry.name for entry in fields(ClusterConfig))
    options = vars(launch_command_parser().parse_args(["script"]))
    of_plugin = (f"fsdp_{entry.name}" for entry in fields(FullyShardedDataParallelPlugin))  # some are no options
    return Accelerate(__version__, names, frozenset({*options, *of_plugin}), options)


def read_content(content: dict[str, Any], name: str) -> dict[str, Any]:
    """A file's content as Accelerate's class holds it, with keys of earlier releases under their names of today.

    Keys that the class does not have stay, to be named with their line.

    Args:
        name: the file's, for messages.

    Raises:
        ConfigError: Accelerate refuses a value, or the file is one for SageMaker.
    """
    release = accelerate_release()
    from accelerate.commands.config.config_args import ClusterConfig

    try:
        converted = ClusterConfig.process_config(dict(content))
        config = ClusterConfig(**{key: converted[key] for key in converted if key in release.names})
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{name}: Accelerate {release.version} refuses it: {one_line(error).rstrip('.')}",
            "correct the file; `accelerate config` writes one",
        ) from None
    read = config.to_dict()
    if read.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(
            f"{name} is a job of Amazon SageMaker, which starts it on machines that the file does not describe",
            "name a file whose compute_environment is LOCAL_MACHINE",
        )
    has_old_keys = not content.keys() <= converted.keys()
    keys = [key for key in converted if key in content or (has_old_keys and converted[key])]
    return {key: read.get(key, converted[key]) for key in keys}


@lru_cache
def defaults(distributed_type: str, stage: int | None = None) -> Settings:
    """Defaults of the keys in the section that a `distributed_type` reads; `none`, which is nothing, is left out.

    Args:
        stage: DeepSpeed's, where a file has it; other defaults depend on it.
    """
    release = accelerate_release()
    if distributed_type == "FSDP":
        section, options = "fsdp_config", {k: v for k, v in release.options.items() if k.startswith("fsdp_")}
    elif distributed_type == "DEEPSPEED":
        section, options = "deepspeed_config", _of_deepspeed(stage)
    else:
        return {}
    keys = {f"{section}.{name}": default for name, default in options.items() if default not in (None, "none")}
    return {key: default for key, default in keys.items() if release.knows(key)}


def _of_deepspeed(stage: int | None) -> dict[str, Any]:
    """The plugin's attributes, of which Accelerate's variables set some, as they do in the job."""
    from accelerate.utils import DeepSpeedPlugin

    try:  # a variable may also name a file, or ask for MS-AMP, which refuses stage 3
        return dict(vars(DeepSpeedPlugin("none", zero_stage=stage, enable_msamp=False)))
    except ValueError as error:
        raise ConfigError(
            f"a variable of Accelerate has a wrong value: {one_line(error)}",
            "unset it: `env | grep ACCELERATE_` shows them",
        ) from None
