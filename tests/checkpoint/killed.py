"""Rank processes that save without end until they are killed."""

from __future__ import annotations

import os
from datetime import timedelta


def save_forever(root: str, store: str, rank: int, size: int, said: str, async_save: bool) -> None:
    """Save step after step below `root`; each one that is done is appended to the file `said`."""
    os.setsid()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from shardkit.checkpoint.native.manifest import RunState
    from tests.checkpoint import fakes

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=20)
    )
    strategy = fakes.Plain(rank, size, n_elements=500_000)
    done: list[int] = []
    checkpoints = fakes.checkpointer(
        root, strategy, keep_last=2, async_save=async_save, on_done=lambda report: done.append(report.step)
    )
    found = checkpoints.resume(root)
    step = 1 + (found[1].step if found else 0)
    if found is not None:
        assert strategy.holds(found[1].step), f"step {found[1].step} was loaded wrongly"
    reported = 0
    while True:
        strategy.fill(step)
        checkpoints.save(RunState(step=step))
        if done[reported:]:
            with open(said, "a") as file:
                file.writelines(f"{finished}\n" for finished in done[reported:])
        reported = len(done)
        step += 1


STEPS_OF_A_SAVE = ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
"""Functions of `os` through which everything on disk changes."""


def crash_at(root: str, count: int, resume_from: str, step: int) -> None:
    """Resume (from where; empty: not at all) and save `step`, but end before the `count`-th change on disk."""
    import io
    import os as real

    import torch.distributed as dist

    from shardkit.checkpoint.native.manifest import RunState
    from tests.checkpoint import fakes

    left = [count]

    def guarded(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                real._exit(9)
            return function(*args, **kwargs)

        return call

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in STEPS_OF_A_SAVE:
        setattr(real, name, guarded(getattr(real, name)))
    io.open = guarded(io.open)  # what pathlib opens files with
    strategy = fakes.Plain()
    checkpoints = fakes.checkpointer(root, strategy, keep_last=2, keep_best=False)
    if resume_from:
        checkpoints.resume(resume_from)
    strategy.fill(step)
    checkpoints.save(RunState(step=step))
    checkpoints.close()
    real._exit(0)
