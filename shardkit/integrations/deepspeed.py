"""A loop of DeepSpeed's engine, watched in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .watching import Settings, Watching


def watch(engine: Any, *, run_dir: str | Path, every: int = 10, **settings: Any) -> Watching:
    """Account for the memory of an engine's loop, and explain its out-of-memory errors.

        engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
        with watch(engine, run_dir="runs/mine") as watching:
            ...

    `engine`: the result of `deepspeed.initialize`. `settings`: `model_config`, `cap`, `resume`, `done`, `tensorboard`,
    `bars`, `total`, as for `shardkit.watch`.
    """
    half = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    return Watching(engine, (), Settings(Path(run_dir), every, tool_settings={"precision.mode": half}, **settings))
