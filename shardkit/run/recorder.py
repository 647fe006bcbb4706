"""Record and show every step on rank 0, and serve it to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.schema import LoggingConfig
from ..hardware.cards import gpu_peak_flops
from ..memory.rows import RankRow
from ..tasks.base import Task
from ..telemetry.catalog import targets_called
from ..telemetry.metrics import MetricsWriter
from ..telemetry.progress import RunProgress
from . import directory
from .job import Job

if TYPE_CHECKING:
    from ..telemetry.prometheus import MetricsServer


class Recorder:
    """`metrics.jsonl`, TensorBoard, the terminal and the Prometheus endpoint of a run; on rank 0 only.

    Args:
        n_recorded: steps that the resumed run has already recorded.
        last_step: the run's last step.

    Raises:
        ConfigError: Weights & Biases cannot start, or the endpoint's port is taken.
    """

    def __init__(self, job: Job, task: Task, run_dir: Path, n_recorded: int, last_step: int) -> None:
        logging, self._world_size = job.config.logging, job.world.size
        self._seen: Sequence[RankRow] = ()
        self._server, self._address = _serve(logging), run_dir / "logs" / "prometheus.txt"
        if self._server is not None:
            self._address.write_text(self._server.url + "\n")
        try:
            settings = job.config.model_dump(mode="json")
            self._writer = MetricsWriter(run_dir, logging.tensorboard, n_recorded, logging.wandb_project, settings)
        except BaseException:
            self._stop_serving()
            raise
        self._progress = _progress(job, task, n_recorded, last_step)

    def step(self, record: Mapping[str, float], rows: Sequence[RankRow]) -> None:
        """Record a finished step; `rows` come from the last gather."""
        self._writer.write(dict(record))
        if rows is not self._seen:
            self._writer.write_memory(int(record["step"]), rows)
            self._seen = rows
        self._progress.update(record, self._world_size, rows)
        if self._server is not None:
            self._server.update(record, rows)

    def samples(self, texts: Sequence[Mapping[str, Any]]) -> None:
        """Record what the model wrote at an evaluation."""
        self._writer.write_samples(texts)

    def flush(self) -> None:
        """Write to disk what is still in memory, before a save."""
        self._writer.flush()

    def ended(self, end_save_s: float) -> None:
        """Record the seconds that the run stood still after its last step for saves."""
        self._writer.ended({"end_save_s": end_save_s})

    def close(self) -> None:
        self._stop_serving()
        self._progress.close()
        self._writer.close()

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()
            self._address.unlink(missing_ok=True)


def open_recorder(job: Job, task: Task, run_dir: Path, n_recorded: int, last_step: int) -> Recorder | None:
    """Rank 0's recorder, None elsewhere. Collective: every rank stops if rank 0 cannot record."""
    opened: list[Recorder] = []
    directory.on_main(job.world, run_dir, lambda: opened.append(Recorder(job, task, run_dir, n_recorded, last_step)))
    return opened[0] if opened else None


def _serve(logging: LoggingConfig) -> MetricsServer | None:
    if logging.prometheus_port is None:
        return None
    from ..telemetry.prometheus import MetricsServer

    return MetricsServer(logging.prometheus_host, logging.prometheus_port)


def _progress(job: Job, task: Task, n_recorded: int, last_step: int) -> RunProgress:
    flops = getattr(task, "flops_per_token", None)
    counted = targets_called(job.config.task.name, job.config.task.factory)
    peak = None
    if job.world.device.type == "cuda":
        peak = gpu_peak_flops(torch.cuda.get_device_name(job.world.device), job.config.precision.mode)
    every = job.config.logging.every
    return RunProgress(last_step, n_recorded, every, flops() if flops else None, peak, counted)
