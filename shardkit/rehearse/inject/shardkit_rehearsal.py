"""Records a rehearsed program from inside: each process's peaks of memory, steps, and the exception that ended it.

`SHARDKIT_REHEARSAL` names the folder of the records, one JSON file a process. After `SHARDKIT_REHEARSAL_STEPS` steps of
its optimizers a process waits to be ended; with `SHARDKIT_REHEARSAL_UNTIL=save` or `evaluation` once a step follows the
first such event of any rank.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import re
import sys
import time
import traceback
import weakref
from types import FrameType, TracebackType
from typing import Any

import shardkit_history  # type: ignore[import-not-found]
import shardkit_state  # type: ignore[import-not-found]
from shardkit_assumed import INSTALLED, Assumed  # type: ignore[import-not-found]

BUILDING, FORWARD, EVALUATION, BACKWARD, UPDATE = "building", "forward", "evaluation", "backward", "update"
SAVING = "save"
"""From the start to the first call of a module; `update` lasts from a backward to the end of the optimizer's step."""
PATIENCE = 16
"""How many times as many steps as were asked for an optimizer may take to its first: a generator that steps every fifth
time, a backbone that is frozen for an epoch of a small data set."""
_DEEPSPEED_ENGINE = os.path.join("deepspeed", "runtime", "engine.py")


class Recording:
    def __init__(self, folder: str, max_steps: int, until: str = "") -> None:
        self.folder, self.max_steps, self.until = folder, max_steps, until
        self.pid = os.getpid()
        self.phase, self.steps = BUILDING, 0
        self.devices: dict[str, dict[str, Any]] = {}
        self.nccl_groups = 0
        self.with_messages: set[tuple[int, ...]] = set()
        self.rank, self.world_size = _launched_as()
        self.end: dict[str, Any] = {}
        self.optimizers = shardkit_state.Optimizers()
        self.growth: dict[str, Any] = {}
        self.allowed: dict[str, int] = {}
        self._fraction = _configured_fraction()
        self.seen = {BUILDING}
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._backward_depth = 0
        self._module_hook: Any = None
        self.assumed = Assumed()
        self.at_update: dict[str, int] = {}
        self.has_whole_history = True
        self.is_warming_up = False
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.peak: dict[str, int] = {}
        self.over_time: list[dict[str, Any]] = []
        self.phases: list[dict[str, Any]] = []
        self.holders = shardkit_state.StateHolders()
        self.moments = [shardkit_history.PhaseStart(0, BUILDING, 0)]

    def attach(self) -> None:
        """Follow the program's steps, once torch is there."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))
        run_backward, reset_peaks = torch.autograd.backward, torch.cuda.reset_peak_memory_stats

        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._backward_depth:  # reentrant checkpointing nests them
                self.enter(BACKWARD)
            self._backward_depth += 1
            try:
                return run_backward(*args, **kwargs)
            finally:
                self._backward_depth -= 1
                if not self._backward_depth:
                    self.enter(UPDATE)
                    self._await_module()

        def reset_peak_memory_stats(device: Any = None) -> None:
            self.read_peaks()
            reset_peaks(device)

        torch.autograd.backward = backward
        torch.cuda.reset_peak_memory_stats = reset_peak_memory_stats
        torch.cuda.memory.reset_peak_memory_stats = reset_peak_memory_stats
        torch.save = self._saving(torch.save)
        self.optimizers.watch(torch)
        self._watch_allowance(torch)
        self.assumed.let_print(torch)
        if self._tells_lines():
            shardkit_history.record_history(torch)
        self._await_module()

    def enter(self, phase: str) -> None:
        """Begin a phase; peaks until now belong to the one before."""
        self.read_peaks()
        self.phase = phase
        self.seen.update({phase} - {EVALUATION})
        self.moments.append(shardkit_history.PhaseStart(time.time_ns() // 1000, phase, self.steps + 1))
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
            if self._fraction:
                total = torch.cuda.get_device_properties(device).total_memory
                self.allowed.setdefault(str(device), int(self._fraction * total))
            record["reserved"] = max(record["reserved"], stats.get("reserved_bytes.all.peak", 0))
            record["ooms"] = max(record["ooms"], stats.get("num_ooms", 0))
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
            if self.world_size > 1:
                backends = [str(backend) for backend, _ in distributed.distributed_c10d._world.pg_map.values()]
                self.nccl_groups = max(self.nccl_groups, sum("nccl" in backend for backend in backends))

    def finish(self, kind: str, **details: Any) -> None:
        """Record how this process ends; only its first end counts."""
        if not self.end:
            self.end = {"kind": kind, "time": time.time(), **details}
            self.read_peaks()
            torch = sys.modules.get("torch")
            if torch is not None and self._tells_lines() and _uses_cuda(torch):
                with contextlib.suppress(RuntimeError):  # of a card that failed
                    self._tell_history(torch)
        self.write()

    def _tell_history(self, torch: Any) -> None:
        """Take what torch's allocator remembers: lines and categories of the peak, and the curve as a file."""
        histories = shardkit_history.histories(torch)
        self.has_whole_history = all(map(shardkit_history.is_whole, histories.values()))
        histories = {device: events for device, events in histories.items() if shardkit_history.is_whole(events)}
        self.lines = {
            device: shardkit_history.by_line(shardkit_history.at_peak(events)) for device, events in histories.items()
        }
        if not histories:
            return
        if not self.holders.holdings:
            self.holders.note()
        device = max(histories, key=lambda device: len(histories[device]))
        history = shardkit_history.History(histories[device], self.moments, self.holders.holdings)
        trace = {"rank": self.rank, "device": f"cuda:{device}", **history.trace()}
        self.peak, self.phases = trace["peak"]["categories"], history.steps()
        ends = [int(1e6 * sample["time"]) for sample in self.over_time]
        self.growth = shardkit_history.growth(histories[device], ends, self.devices[device]["allocated"])
        os.makedirs(os.path.join(self.folder, "trace"), exist_ok=True)
        with open(os.path.join(self.folder, "trace", f"rank{self.rank}.json"), "w") as file:
            json.dump(trace, file)

    def _sample(self) -> None:
        devices = {device: (peaks["allocated"], peaks["reserved"]) for device, peaks in self.devices.items()}
        if not devices:
            return
        import torch

        device = max(devices, key=lambda device: devices[device])
        stats = torch.cuda.memory_stats(int(device))
        self.over_time.append({
            "step": self.steps, "time": time.time(), **_resident(),
            "allocated": stats["allocated_bytes.all.current"], "reserved": stats["reserved_bytes.all.current"],
            "peak_allocated": devices[device][0], "peak_reserved": devices[device][1],
        })  # fmt: skip

    def write(self) -> None:
        """Replace this process's record. Processes that use no GPU and do not fail have none."""
        if os.getpid() != self.pid or not (self.devices or self.end.get("kind") == "exception"):
            return
        path = os.path.join(self.folder, f"{self.pid}.json")
        fields = {
            "pid": self.pid, "rank": self.rank, "world_size": self.world_size, "launched": "RANK" in os.environ,
            "devices": self.devices, "steps": self.steps, "phase": self.phase, "nccl_groups": self.nccl_groups,
            "with_messages": sorted(self.with_messages), "end": self.end, "assumptions": self.assumed.as_json(),
            "types": self.assumed.types(), "at_update": self.at_update, "lines": self.lines, "peak": self.peak,
            "phases": self.phases, "over_time": self.over_time, "has_whole_history": self.has_whole_history,
            "is_warming_up": self.is_warming_up, "seen": sorted(self.seen), "growth": self.growth,
            "allowed": self.allowed, "never_stepped": self.optimizers.never_stepped() if self.end else [],
            **_resident(),
        }  # fmt: skip
        with open(path + ".tmp", "w") as file:
            json.dump(fields, file)
        os.replace(path + ".tmp", path)

    def _tells_lines(self) -> bool:
        """Whether this rank is the one that tells the lines that made its tensors."""
        live = os.environ.get("SHARDKIT_REHEARSAL_LIVE", "0").partition(",")[0]
        return os.environ.get("SHARDKIT_REHEARSAL_LINES") == "1" and os.environ.get("RANK", live) == live

    def _saving(self, save: Any) -> Any:
        """A function that writes tensors to a file, as a phase of its own."""

        @functools.wraps(save)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.phase == SAVING or any(isinstance(argument, io.BytesIO) for argument in args):
                return save(*args, **kwargs)
            before, steps = self.phase, self.steps
            self.enter(SAVING)
            try:
                return save(*args, **kwargs)
            finally:
                self.enter(before)
                self.note("save", steps)

        run.is_of_rehearsal = True  # type: ignore[attr-defined]
        return run

    def _watch_safetensors(self) -> None:
        """See safetensors' saves, once the program has imported it."""
        module = sys.modules.get("safetensors.torch")
        write = getattr(module, "serialize_file", None)
        if write is not None and not getattr(write, "is_of_rehearsal", False):
            module.serialize_file = self._saving(write)  # type: ignore[union-attr]

    def note(self, event: str, steps: int) -> None:
        """Tell all ranks of the first such event of any, and how many steps that rank had done."""
        with contextlib.suppress(FileExistsError), open(os.path.join(self.folder, event), "x") as file:
            file.write(str(steps))

    def is_past(self, event: str) -> bool:
        """Whether this rank has done a step more than the one whose event was first.

        It may still be in the step before that event.
        """
        try:
            with open(os.path.join(self.folder, event)) as file:
                return self.steps > int(file.read())
        except (FileNotFoundError, ValueError):  # nobody has, or the number is just being written
            return False

    def _watch_allowance(self, torch: Any) -> None:
        """Note the part of a card that the program allows itself, by its own call or by torch's variable."""
        allow = torch.cuda.set_per_process_memory_fraction

        def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
            allow(fraction, device)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            self.allowed[str(index)] = int(fraction * torch.cuda.get_device_properties(index).total_memory)

        torch.cuda.set_per_process_memory_fraction = set_per_process_memory_fraction
        torch.cuda.memory.set_per_process_memory_fraction = set_per_process_memory_fraction

    def _await_module(self) -> None:
        """See the next call of any module, which begins a forward. One call only: hooks on all modules are slow."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        if self._module_hook is None:
            self._module_hook = register_module_forward_pre_hook(lambda module, _: self._module_called(module))

    def _module_called(self, module: Any) -> None:
        import torch

        if self._backward_depth or not _uses_cuda(torch):  # recomputed, or built on the host
            return
        hook, self._module_hook = self._module_hook, None
        if hook is not None:
            hook.remove()
        self._watch_safetensors()
        look_once()
        self.holders.see_module(module)
        if torch.is_grad_enabled():
            self._trained.update(module.modules())
            self.enter(FORWARD)
            return
        self.enter(EVALUATION)
        # A discriminator's step runs the generator without gradients, too: an evaluation has a trained model in eval().
        if not module.training and module in self._trained:
            self.seen.add(EVALUATION)
            self.note(EVALUATION, self.steps)
        self._await_module()

    def _before_step(self, optimizer: Any) -> None:
        if self.phase != UPDATE and not self._backward_depth:
            self.enter(UPDATE)
        self._note(optimizer)
        engine = _deepspeed_engine(sys._getframe())
        if engine is not None:
            self.optimizers.stepped(optimizer)
            if engine.global_steps > self.steps:
                _await_watchdog()
                self.steps = int(engine.global_steps)
                self._sample()
            self._end_if_done()

    def _after_step(self, optimizer: Any) -> None:
        self._note(optimizer)
        if _deepspeed_engine(sys._getframe()) is not None:  # it steps once for each group of parameters
            return
        self.at_update = _held_by(optimizer)
        self.optimizers.stepped(optimizer)
        steps = self.optimizers.steps(self.max_steps)
        if steps > self.steps:
            _await_watchdog()
            self.read_peaks()
            self.steps = steps
            self.is_warming_up = _is_on_side_stream()
            self._sample()
            self.write()
            self._end_if_done()
        self._await_module()

    def _note(self, optimizer: Any) -> None:
        if self._tells_lines():
            self.holders.see_optimizer(optimizer)
            self.holders.note()

    def _end_if_done(self) -> None:
        """After the last step keep the process alive: other ranks may still need its sockets and memory."""
        if self.until:
            if not self.is_past(self.until):
                return
        else:
            if self.steps < self.max_steps or self._awaits_optimizer():
                return
            if self.steps < shardkit_history.STEPS and shardkit_history.is_likely(self.over_time):
                return
        self.finish("steps")
        while True:
            time.sleep(3600)

    def _awaits_optimizer(self) -> bool:
        """Whether an optimizer has still to make its states, or the step with all of them has still to come."""
        most = self.optimizers.most_steps()
        return most < PATIENCE * self.max_steps and (
            bool(self.optimizers.never_stepped()) or most <= self.optimizers.last_new_at
        )


def look_once() -> None:
    """Let DTensor look once, not for each tensor of a list, whether an operator's tensors are sharded in strides.

    torch 2.13 asks that of the whole list for each of its members. In the first update of a model of 8 billion
    parameters it is half of what working out the optimizer's shardings costs, and it grows with the square of the
    number of tensors.
    """
    propagation: Any = sys.modules.get("torch.distributed.tensor._sharding_prop")
    strided = getattr(propagation, "_StridedShard", None)
    propagate = getattr(propagation, "_propagate_use_strided_shard_flag", None)
    if strided is None or propagate is None or hasattr(propagate, "__wrapped__"):
        return
    last: tuple[Any, bool] = (None, False)

    @functools.wraps(propagate)
    def propagate_if_strided(op_strategy: Any, op_schema: Any) -> None:
        nonlocal last
        schema, has_strides = last  # of any thread: read and written at once
        if schema is not op_schema:
            has_strides = any(isinstance(shard, strided) for spec in op_schema.args_spec for shard in spec.placements)
            last = (op_schema, has_strides)
        if has_strides:
            propagate(op_strategy, op_schema)

    propagation._propagate_use_strided_shard_flag = propagate_if_strided


def _await_watchdog() -> None:
    """Let ProcessGroupNCCL's watchdog drop what collectives held that are done: DDP's first buckets, for example.

    It looks every 100 ms, and nobody tells when it has looked. A step on a GPU lasts longer than that; here kernels
    take no time.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        time.sleep(0.25)


def _configured_fraction() -> float:
    """The part of a card that torch's allocator may take by its variable; 0: all of it."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    match = re.search(r"per_process_memory_fraction:([0-9.]+)", text)
    return float(match[1]) if match else 0.0


def _launched_as() -> tuple[int, int]:
    """The launcher's rank and number of ranks; without a launcher one of one."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else (0, 1)


def _resident() -> dict[str, int]:
    """Bytes of host memory that this process has, and had at most."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    kib = {name: int(fields.get(field, "0").split()[0]) for name, field in (("rss", "VmRSS"), ("peak_rss", "VmHWM"))}
    return {name: size * 1024 for name, size in kib.items()}


def _uses_cuda(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized())


def _is_on_side_stream() -> bool:
    """Whether the program runs on a stream of its choice and captures nothing: steps before a CUDA graph do."""
    import torch

    if not _uses_cuda(torch) or torch.cuda.is_current_stream_capturing():
        return False
    return bool(torch.cuda.current_stream() != torch.cuda.default_stream())


def _held_by(optimizer: Any) -> dict[str, int]:
    """Bytes on GPUs of an optimizer's parameters, their gradients and its states; each tensor counts once."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {
        "parameters": parameters, "gradients": [parameter.grad for parameter in parameters],
        "optimizer states": [tensor for state in optimizer.state.values() for tensor in state.values()],
    }  # fmt: skip
    sizes: dict[str, dict[int, int]] = {name: {} for name in tensors}
    for name, members in tensors.items():
        for part in (part for tensor in members for part in shardkit_state.parts(tensor) if part.is_cuda):
            sizes[name][part.data_ptr()] = int(part.nbytes)
    return {name: sum(each.values()) for name, each in sizes.items()}


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
    steps = int(os.environ.get("SHARDKIT_REHEARSAL_STEPS", "3"))
    RECORDING = Recording(os.environ["SHARDKIT_REHEARSAL"], steps, os.environ.get("SHARDKIT_REHEARSAL_UNTIL", ""))
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
        import emucuda

        RECORDING.attach()
        emucuda.attach()
        RECORDING.assumed.attach(str(emucuda.LIBRARIES / "libemucuda_no_compute.so"))
        if live := os.environ.get("SHARDKIT_REHEARSAL_LIVE"):
            import shardkit_pretended  # type: ignore[import-not-found]

            shardkit_pretended.attach([int(rank) for rank in live.split(",")])
            RECORDING.with_messages = shardkit_pretended.Team.with_messages
        _record_exceptions()
        atexit.register(lambda: RECORDING.finish("exit") if RECORDING is not None else None)


def assume_rows(imbalance: float) -> None:
    """Record that a rank's experts get so many times the average rows, since no router computes (`parallel.ep`)."""
    if RECORDING is not None:
        RECORDING.assumed.counts["rows", f"parallel.ep_imbalance={imbalance:g}", 0] += 1


def _begin_in_child() -> None:
    if RECORDING is not None:
        RECORDING.__init__(RECORDING.folder, RECORDING.max_steps, RECORDING.until)  # type: ignore[misc]


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
    programs = [frame for frame in frames if not any(part in frame.filename for part in INSTALLED)]
    if not frames:
        return ""
    frame = (programs or frames)[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line or ''}".strip()
