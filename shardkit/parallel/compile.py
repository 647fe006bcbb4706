"""torch.compile, one block at a time: equal blocks share one compilation, and an engine's wrapping stays outside."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence

import torch
from torch import nn

from ..config.schema import CompileConfig
from ..errors import ConfigError

_LOG = logging.getLogger(__name__)


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], config: CompileConfig, device: torch.device) -> None:
    """Compile each block in place, or the whole model (by config, or when it has no blocks).

    Raises:
        ConfigError: no C++ compiler for code on CPU.
    """
    if not config.enabled:
        return
    if device.type == "cpu" and sys.platform != "win32" and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "compile.enabled=true, but no C++ compiler (g++ or clang++) is on PATH", "apt-get install g++"
        )
    if config.mode == "reduce-overhead" and device.type == "cuda":
        _LOG.warning("compile.mode=reduce-overhead keeps CUDA graphs, whose private memory pools raise the peak")
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        _LOG.warning("SyncBatchNorm layers communicate: each breaks the compiled graph in two")
    for module in (blocks if config.scope == "block" else ()) or [model]:
        module.compile(mode=None if config.mode == "default" else config.mode)
