"""Records a rehearsed program from inside: each process's peaks of memory, steps, and the exception that ended it.

`SHARDKIT_REHEARSAL` names the folder of the records, one JSON file a process. After `SHARDKIT_REHEARSAL_STEPS` steps of
its optimizer a process waits to be ended.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from types import FrameType, TracebackType
from typing import Any

BUILDING, FORWARD, EVALUATION, BACKWARD, UPDATE = "building", "forward", "evaluation", "backward", "update"
"""From the start to the first call of a module; `update` lasts from a backward to the end of the optimizer's step."""
_DEEPSPEED_ENGINE = os.path.join("deepspeed", "runtime", "engine.py")


class Recording:
    """Peaks, steps and the end of this process."""

    def __init__(self, folder: str, max_steps: int) -> None:
        self.folder, self.max_steps = folder, max_steps
        self.pid = os.getpid()
        self.phase, self.steps = BUILDING, 0
        self.devices: dict[str, dict[str, Any]] = {}
        self.nccl_groups = 0
        self.rank, self.world_size = _launched_as()
        self.end: dict[str, Any] = {}
        self._steps_of: dict[int, int] = {}
        self._backward_depth = 0
        self._module_hook: Any = None

    def attach(self) -> None:
        """Follow the program's steps, once torch is there."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(lambda *_: self._before_step())
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))
        run_backward, reset_peaks = torch.autograd.backward, torch.cuda.reset_peak_memory_stats

        def backward(*args: Any, **kwargs: Any) -> Any:
            with _Backward(self):
                return run_backward(*args, **kwargs)

        def reset_peak_memory_stats(device: Any = None) -> None:
            self.read_peaks()
            reset_peaks(device)

        torch.autograd.backward = backward
        torch.cuda.reset_peak_memory_stats = reset_peak_memory_stats
        torch.cuda.memory.reset_peak_memory_stats = reset_peak_memory_stats
        self._await_module()

    def enter(self, phase: str) -> None:
        """Begin a phase; peaks until now belong to the one before."""
        self.read_peaks()
        self.phase = phase
        self.write()

    def read_peaks(self) -> None:
        """Raise the recorded peaks of each device to torch's, and note the phase and step in which they rose."""
        torch = sys.modules.get("torch")
        if torch is None or not _uses_cuda(torch):
            return
        for device in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(device)
            allocated = stats.get("allocated_bytes.all.peak", 0)
            record = self.devices.get(str(device))
            if not allocated and record is None:
                continue
            if record is None:
                record = self.devices[str(device)] = {"allocated": 0, "reserved": 0, "ooms": 0}
            if allocated > record["allocated"]:
                record.update(allocated=allocated, phase=self.phase, step=self.steps + 1)
            record["reserved"] = max(record["reserved"], stats.get("reserved_bytes.all.peak", 0))
            record["ooms"] = max(record["ooms"], stats.get("num_ooms", 0))
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
            if self.world_size > 1:
                self.nccl_groups = max(self.nccl_groups, distributed.distributed_c10d.get_pg_count())

    def finish(self, kind: str, **details: Any) -> None:
        """Record how this process ends; only its first end counts."""
        if not self.end:
            self.end = {"kind": kind, "time": time.time(), **details}
        self.read_peaks()
        self.write()

    def write(self) -> None:
        """Replace this process's record. Processes that use no GPU and do not fail have none."""
        if os.getpid() != self.pid or not (self.devices or self.end.get("kind") == "exception"):
            return
        path = os.path.join(self.folder, f"{self.pid}.json")
        fields = {
            "pid": self.pid, "rank": self.rank, "world_size": self.world_size, "launched": "RANK" in os.environ,
            "devices": self.devices, "steps": self.steps, "phase": self.phase, "nccl_groups": self.nccl_groups,
            "end": self.end,
        }  # fmt: skip
        with open(path + ".tmp", "w") as file:
            json.dump(fields, file)
        os.replace(path + ".tmp", path)

    def _await_module(self) -> None:
        """See the next call of any module, which begins a forward. One call only: hooks on all modules are slow."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        if self._module_hook is None:
            self._module_hook = register_module_forward_pre_hook(lambda *_: self._module_called())

    def _module_called(self) -> None:
        import torch

        if self._backward_depth or not _uses_cuda(torch):  # recomputed, or built on the host
            return
        hook, self._module_hook = self._module_hook, None
        if hook is not None:
            hook.remove()
        self.enter(FORWARD if torch.is_grad_enabled() else EVALUATION)
        if self.phase == EVALUATION:
            self._await_module()

    def _before_step(self) -> None:
        if self.phase != UPDATE and not self._backward_depth:
            self.enter(UPDATE)
        engine = _deepspeed_engine(sys._getframe())
        if engine is not None:
            self.steps = int(engine.global_steps)
            if self.steps >= self.max_steps:
                self._wait_for_the_end()

    def _after_step(self, optimizer: Any) -> None:
        if _deepspeed_engine(sys._getframe()) is not None:  # it steps once for each group of parameters
            return
        self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        steps = min(self._steps_of.values())
        if max(self._steps_of.values()) > 2 * max(self.max_steps, steps):
            steps = max(self._steps_of.values())  # an optimizer that is not used any more
        if steps > self.steps:
            self.read_peaks()
            self.steps = steps
            self.write()
            if steps >= self.max_steps:
                self._wait_for_the_end()
        self._await_module()

    def _wait_for_the_end(self) -> None:
        """Keep the process alive: other ranks may still need its sockets and memory."""
        self.finish("steps")
        while True:
            time.sleep(3600)


class _Backward:
    """The time of a backward. Reentrant checkpointing nests them."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        if not self._recording._backward_depth:
            self._recording.enter(BACKWARD)
        self._recording._backward_depth += 1

    def __exit__(self, *_: object) -> None:
        self._recording._backward_depth -= 1
        if not self._recording._backward_depth:
            self._recording.enter(UPDATE)
            self._recording._await_module()


def _launched_as() -> tuple[int, int]:
    """The launcher's rank and number of ranks; without a launcher one of one."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else (0, 1)


def _uses_cuda(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized())


def _deepspeed_engine(frame: FrameType | None) -> Any:
    """The DeepSpeed engine whose `step` is being run by a frame or one of its callers; None outside of one."""
    if "deepspeed.runtime.engine" not in sys.modules:
        return None
    while frame is not None:
        engine = frame.f_locals.get("self") if frame.f_code.co_filename.endswith(_DEEPSPEED_ENGINE) else None
        if hasattr(engine, "global_steps"):
            return engine
        frame = frame.f_back
    return None


RECORDING: Recording | None = None


def begin() -> None:
    """Ready the emulated GPUs and the record of this process, before its program begins."""
    global RECORDING
    RECORDING = Recording(os.environ["SHARDKIT_REHEARSAL"], int(os.environ.get("SHARDKIT_REHEARSAL_STEPS", "3")))
    _record_exceptions()
    os.register_at_fork(after_in_child=_begin_in_child)
    try:
        import emucuda  # type: ignore[import-not-found]

        emucuda.preload()
    except Exception as error:
        RECORDING.finish("exception", type=type(error).__name__, message=str(error), where="the emulated GPUs")
        raise


def attach() -> None:
    """An entry point of `torch.backends`, called when torch has been imported."""
    if RECORDING is not None:
        RECORDING.attach()
        _record_exceptions()
        atexit.register(lambda: RECORDING.finish("exit") if RECORDING is not None else None)


def _begin_in_child() -> None:
    if RECORDING is not None:
        RECORDING.__init__(RECORDING.folder, RECORDING.max_steps)  # type: ignore[misc]


def _record_exceptions() -> None:
    """Record an exception that ends the process, then print it as before."""
    previous_hook = sys.excepthook
    if getattr(previous_hook, "is_of_rehearsal", False):
        return

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if RECORDING is not None and os.getpid() == RECORDING.pid and not issubclass(kind, KeyboardInterrupt):
            frames = traceback.extract_tb(trace)
            RECORDING.finish("exception", type=kind.__name__, message=str(error), where=_program_line(frames))
        previous_hook(kind, error, trace)

    record.is_of_rehearsal = True  # type: ignore[attr-defined]
    sys.excepthook = record


def _program_line(frames: traceback.StackSummary) -> str:
    """The innermost line that no installed library holds, else the innermost."""
    installed = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen")
    programs = [frame for frame in frames if not any(part in frame.filename for part in installed)]
    if not frames:
        return ""
    frame = (programs or frames)[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line or ''}".strip()
