"""shardkit on CUDA: the real CUDA build of torch, on a GPU that tests/emulated_cuda stands for."""

from __future__ import annotations

from typing import Any

from tests.ranks import run_ranks


def gpu_ranks(
    world: int, target: str, *, timeout: float = 280, env: dict[str, str] | None = None, **kwargs: Any
) -> Any:
    """Results of `target` on `world` ranks with a GPU each; `target` makes its process group itself."""
    return run_ranks(world, target, timeout=timeout, env=env, init_group=False, gpu=True, **kwargs)
