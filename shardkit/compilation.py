"""torch.compile, one block at a time: equal blocks share one compilation, and an engine's wrapping stays outside."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

import torch
from torch import nn

from .config import CompileConfig
from .errors import ConfigError


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], config: CompileConfig, device: torch.device) -> None:
    """Compile each block in place (the whole model when it has no blocks).

    Raises:
        ConfigError: no C++ compiler for code on CPU.
    """
    if not config.enabled:
        return
    if device.type == "cpu" and sys.platform != "win32" and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "compile.enabled=true, but no C++ compiler (g++ or clang++) is on PATH", "apt-get install g++"
        )
    for module in blocks or [model]:
        module.compile(mode=None if config.mode == "default" else config.mode)
