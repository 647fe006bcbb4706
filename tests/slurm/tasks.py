"""Tasks for jobs on the test cluster."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.checkpoint.native import layout, writer
from tests.launch.tasks import Troubled


def broken_node(run_dir: Path) -> Path:
    """The file that names it: beside the directory, as a new run is refused one with files in it."""
    return run_dir.with_name(f"{run_dir.name}.broken")


class Faulty(Troubled):
    """Fails as a GPU with broken memory does, on the node where it is started first."""

    def __init__(self, config: Any) -> None:
        broken, here = broken_node(Path(config.run.dir)), os.environ["SLURMD_NODENAME"]
        if not broken.exists():
            broken.write_text(here)
        if broken.read_text() == here:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        super().__init__(config, "nothing")


_HELD_AT = 250


class SlowSaves(Troubled):
    """A small linear model whose saves take `save_s` seconds: most of it in each rank's file, then in the manifest.

    Every rank keeps the phase that it is in, and its process id, in RUN_DIR/phase.RANK (see `phase_of`). On rank
    `stuck_rank` a save for which the file RUN_DIR/.stuck exists never ends. With `go_file` a run takes no step after
    `_HELD_AT` until that file exists.
    """

    def __init__(
        self, config: Any, save_s: float = 6.0, pace: float = 0.05, stuck_rank: int = -1, go_file: str = ""
    ) -> None:
        super().__init__(config, "nothing")
        self.pace, self._go_file, self._n_losses = pace, go_file, 0
        self._rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        self._run_dir = Path(config.run.dir)
        self._is_stuck = self._rank == stuck_rank
        self._slow_down(save_s)

    def _slow_down(self, save_s: float) -> None:
        write_file, manifest_of, point_latest = writer.write_file, writer.RangeWriter._manifest, layout.point_latest

        def write_slowly(path: Path, tensors: Any) -> Any:
            self._note("writing")
            offsets = write_file(path, tensors)
            if self._is_stuck and (self._run_dir / ".stuck").exists():
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.8 * save_s)
            self._note("written")
            return offsets

        def describe_slowly(range_writer: Any, *args: Any) -> Any:
            self._note("publishing")
            time.sleep(0.2 * save_s)
            return manifest_of(range_writer, *args)

        def point_and_note(root: Path) -> None:
            self._note("published")
            point_latest(root)

        writer.write_file = write_slowly
        writer.RangeWriter._manifest = describe_slowly
        layout.point_latest = point_and_note

    def _note(self, phase: str) -> None:
        draft = self._run_dir / f"phase.{self._rank}.part"
        draft.write_text(f"{phase} {os.getpid()}")
        draft.replace(draft.with_suffix(""))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self._note("training")
        time.sleep(self.pace)
        self._n_losses += 1
        while self._go_file and self._n_losses > _HELD_AT and not Path(self._go_file).exists():
            time.sleep(0.1)
        return super().loss(model, batch)


def phase_of(run_dir: Path, rank: int = 0) -> tuple[str, int]:
    """(phase, process id) of a rank of `SlowSaves`; the phase is empty before its first step."""
    try:
        phase, _, pid = (run_dir / f"phase.{rank}").read_text().partition(" ")
    except OSError:
        return "", 0
    return phase, int(pid)
