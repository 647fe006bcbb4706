"""Run a command on emulated GPUs whose kernels compute: tests that need GPUs, on a machine without one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..hardware.cards import Gpu
from ..launch.local import processes
from .build import built
from .environment import torch_of
from .rehearsal import (
    Limits,
    Machine,
    emulated_environ,
    host_memory_is_short,
    refuse_without_sandbox,
    scratch_folder,
    start_in_sandbox,
    summary,
    without_cuda,
)
from .verdict import CARDS, EXIT_CODES, FAILED, NOT_KNOWN

LATE_US = 5000
"""How long each asynchronous copy waits before it begins, where waits are to be missed."""
PASSED = "passed"


@dataclass(frozen=True)
class ComputedRun:
    kind: str  # `PASSED`, `FAILED`, or `NOT_KNOWN` if it was ended
    reason: str
    code: int  # the command's own exit code; negative: the signal that ended it
    n_processes: int  # processes that used a GPU
    notes: tuple[str, ...]  # what its writes would have changed

    @property
    def exit_code(self) -> int:
        return 0 if self.kind == PASSED else EXIT_CODES[self.kind]

    def text(self) -> str:
        return "\n".join([*(f"note      {note}" for note in self.notes), f"verdict   {self.reason}"])

    def as_json(self) -> dict[str, object]:
        return {
            "verdict": self.kind, "reason": self.reason, "exit_code": self.exit_code, "program_exit_code": self.code,
            "processes_with_gpus": self.n_processes, "notes": list(self.notes),
        }  # fmt: skip


def run_computed(
    command: Sequence[str],
    card: Gpu,
    gpus: int,
    limits: Limits,
    late_copies: bool,  # copies begin late, so that a program that does not wait for them reads old bytes
    poison: bool,  # memory new from the driver is NaN
) -> ComputedRun:
    """Run a command to its end on emulated cards that compute."""
    machine = Machine(card, gpus, built(torch_of(command, os.environ), computing=True))
    with scratch_folder(limits.keep) as folder:
        records = folder / "records"
        records.mkdir()
        environ = {**emulated_environ(machine, limits, folder), "SHARDKIT_COMPUTED": str(records)}
        environ |= {"EMUCUDA_COPY_DELAY_US": str(LATE_US)} if late_copies else {}
        environ |= {"EMUCUDA_POISON": "1"} if poison else {}
        process = start_in_sandbox(command, folder, environ, limits)
        try:
            reason = _wait(process, limits.time_limit_s)
        finally:
            processes.stop(process, signal.SIGKILL, 0.5)
        refuse_without_sandbox(process, folder, limits)
        n_processes = len([path for path in records.iterdir() if not path.name.startswith(CARDS)])
        notes = tuple(summary(folder))
    code = process.returncode
    if reason is not None:
        return ComputedRun(NOT_KNOWN, f"not known: {reason}", code, n_processes, notes)
    if code:
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return ComputedRun(FAILED, f"the program ended with {how}", code, n_processes, notes)
    if not n_processes:
        raise without_cuda(command)
    return ComputedRun(PASSED, f"passed on {gpus} emulated {card.name}", code, n_processes, notes)


def _wait(process: subprocess.Popen[bytes], time_limit_s: float) -> str | None:
    """Wait for the end of a process; the reason if it has to be ended."""
    deadline = time.monotonic() + time_limit_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            return f"the time limit of {time_limit_s:g} s came"
        if host_memory_is_short():
            return "this machine's memory was nearly exhausted"
        time.sleep(0.1)
    return None
