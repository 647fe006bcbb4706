"""A loop of Accelerate, watched in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from .watching import Settings, Watching, refuse_removed


def watch(
    accelerator: Any, model: nn.Module, optimizer: Any, *, run_dir: str | Path, every: int = 10, **settings: Any
) -> Watching:
    """Account for the memory of a loop with an `Accelerator`, and explain its out-of-memory errors.

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        with watch(accelerator, model, optimizer, run_dir="runs/mine") as watching:
            ...

    `model`, `optimizer`: the results of `accelerator.prepare`. `settings`: `model_config`, `cap`, `resume`, `done`,
    `tensorboard`, `bars`, `total`, as for `shardkit.watch`.
    """
    refuse_removed({name: value for name, value in settings.items() if name in ("files", "tool")})
    half = accelerator.mixed_precision
    precision = {"precision.mode": half} if half in ("bf16", "fp16") else {}
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    chosen = Settings(Path(run_dir), every, tool_settings=precision, **settings)
    return Watching(model, optimizers, chosen)
