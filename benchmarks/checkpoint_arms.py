"""The arms of `benchmarks.checkpoint`: raw files, our saves and loads, `torch.save` of everything, DeepSpeed's own."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

WIDTH, VOCAB, SEQ = 1024, 256, 64
_WRITE = 64 * 2**20


class Clock:
    """Times an action of all ranks together; the result is the slowest rank's."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist

    def __call__(self, action: Callable[[], object]) -> dict[str, float]:
        """Seconds from the start of all to the end of all, and the most host memory that a rank took meanwhile."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory freed earlier would hide new allocations
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        self._dist.barrier()
        began = time.perf_counter()
        action()
        self._dist.barrier()
        took = time.perf_counter() - began
        return {"s": self.most(took), "extra_bytes": self.most(_status("VmHWM") - before)}

    def most(self, value: float) -> float:
        values: list[Any] = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(values, value)
        return float(max(values))


def _status(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match.group(1))


class Run:
    """A training run of `layers` blocks under one engine, and its checkpoints below `folder`."""

    def __init__(self, strategy: str, layers: int, folder: Path) -> None:
        import torch

        from shardkit.checkpoint.save import Checkpointer, SaveReport
        from shardkit.config.schema import CheckpointConfig, ModelConfig
        from shardkit.models.transformer import Block, Transformer, init_parameter
        from shardkit.run.job import start

        self.folder = folder
        settings: dict[str, Any] = {
            "parallel.strategy": strategy, "run.device": "cpu", "train.micro_batch_size": 1,
        }  # fmt: skip
        if strategy == "fsdp":
            settings["parallel.reshard_after_forward"] = False
        self._started = start(None, settings)
        self.job = self._started.__enter__()
        model = ModelConfig(vocab_size=VOCAB, max_seq_len=SEQ, d_model=WIDTH, n_layers=layers, n_heads=8)
        init = partial(init_parameter, model)
        self.job.wrap(lambda: Transformer(model), init_parameter=init, block_classes=(Block,))
        rows = torch.randint(0, VOCAB, (1, SEQ + 1), generator=torch.Generator().manual_seed(self.job.world.rank))
        self._batch = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        self.reports: list[SaveReport] = []
        make = partial(Checkpointer, self.job.strategy, self.job.world, root=folder, on_done=self.reports.append)
        self.sync = make(CheckpointConfig(keep_last=None))
        self.background = make(CheckpointConfig(keep_last=None, async_save=True))
        self.step()

    def step(self) -> None:
        self.job.step([self._batch], lambda model, batch: model(*batch), lambda batch: batch[1].numel())

    def state(self) -> list[memoryview]:
        """The bytes of this rank's share of a checkpoint, in memory."""
        from shardkit.checkpoint.native.writer import byte_view

        shards = [s for s in self.job.strategy.shards() if s.replica == 0 and s.local.numel()]
        return [byte_view(shard.local) for shard in shards]

    def save(self, number: int) -> None:
        from shardkit.checkpoint.native.manifest import RunState

        report = self.sync.save(RunState(step=number))
        assert report is not None and report.error is None, report

    def load(self) -> None:
        assert self.sync.resume(self.folder) is not None

    def close(self) -> None:
        self.sync.close()
        self.background.close()
        self._started.__exit__(None, None, None)


def raw_write(views: list[memoryview], path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for view in views:
        for at in range(0, len(view), _WRITE):
            part = view[at : at + _WRITE]
            assert os.write(descriptor, part) == len(part)
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(views: list[memoryview], path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for view in views:
        for at in range(0, len(view), _WRITE):
            part = view[at : at + _WRITE]
            assert os.readv(descriptor, [part]) == len(part)
    os.close(descriptor)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def put_on_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def torch_save(run: Run, path: Path) -> None:
    """The hand-written way: gather everything on rank 0, then `torch.save`."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(run.job.model, run.job.optimizer, options=whole)
    if run.job.world.is_main:
        torch.save({"model": model, "optimizer": optimizer}, path)
        put_on_disk(path.parent)


def deepspeed_save(run: Run, folder: Path) -> None:
    import torch.distributed as dist

    run.job.strategy._engine.save_checkpoint(str(folder), tag="saved")  # type: ignore[attr-defined]
    dist.barrier()
    if run.job.world.is_main:
        put_on_disk(folder)


def in_background(run: Run, number: int, steps: int) -> dict[str, float]:
    """A background save: the time that it blocked, and the time that training lost while it was written."""
    from shardkit.checkpoint.native.manifest import RunState

    clock = Clock()

    def train(count: int) -> None:
        for _ in range(count):
            run.step()

    alone = clock(partial(train, steps))["s"] / steps

    def save() -> None:
        assert run.background.save(RunState(step=number)) is None

    blocked = clock(save)
    done, began = 0, time.perf_counter()
    while clock.most(run.background.saving):
        run.step()
        done += 1
    trained = time.perf_counter() - began
    report = run.background.wait()
    assert report is not None and report.error is None, report
    writing = clock.most(report.total_s - report.blocking_s)
    lost = trained - done * alone
    window = min(writing, trained)
    return {
        "blocking_s": clock.most(report.blocking_s),
        "staging_bytes": clock.most(report.staging_bytes),
        "extra_bytes": blocked["extra_bytes"],
        "writing_s": writing,
        "step_s": alone,
        "steps_meanwhile": done,
        "training_speed": 1 - lost / window,
        "lost_s": lost,
    }
