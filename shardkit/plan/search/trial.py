"""Run a few real steps of a config in fresh processes and read their memory, speed or failure."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from ...config.schema import RunConfig
from ...errors import ConfigError
from ...files import module_command
from ...memory import read_jsonl

TRACED = 2  # step 1 creates the optimizer's state; step 2 is like all later steps


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create a folder for results before a long command, and see that it is writable; it goes if nothing is written."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"?")
        yield
    except OSError as error:
        cause = f"--out {folder} cannot be written: {error.strerror or error}"
        raise ConfigError(cause, "pass a directory you can write, with room in it") from error
    finally:
        if is_new:
            with suppress(OSError):  # it has results, or could not be made
                folder.rmdir()


@dataclass(frozen=True)
class Trial:
    outcome: Literal["ok", "out of memory", "failed"]
    peak: int | None = None  # peak bytes of tensors on any rank: by the allocator on a GPU, by a trace on the CPU
    reserved: int | None = None  # peak bytes that the allocator reserved on any rank; `None` on the CPU
    tokens_per_s: float | None = None  # tokens/s of all ranks, the median over the steps after the traced one
    losses: tuple[float, ...] = ()  # the loss of every step
    message: str = ""  # the reason of a failure


def run_trial(
    config: str | None, overrides: Sequence[str], ranks: int, folder: Path, steps: int = 4, cap: str | None = None
) -> Trial:
    """Train for `steps` steps in `folder`, whose contents are replaced; an out-of-memory error is a result."""
    settings = trial_settings(overrides, folder, steps, cap)
    if ranks == 1:
        command = [*module_command("shardkit.train"), *(["--config", config] if config else []), *settings]
    else:
        launch = ["launch", config or "-", *settings, "--nproc-per-node", str(ranks)]
        command = [*module_command("shardkit.cli"), *launch]
    shutil.rmtree(folder / "oom", ignore_errors=True)  # an earlier run's; this run may fail before it would clear it
    process = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return read_trial(folder, process.returncode, process.stderr)


def trial_settings(
    overrides: Sequence[str], folder: Path, steps: int, cap: str | None, traced: bool = True
) -> list[str]:
    """Overrides of a short run that leaves its memory behind, and no checkpoint."""
    defaults = RunConfig()
    # A run without evaluation refuses settings of it that it would ignore.
    keys = ("eval_every", "sample_prompts", "sample_tokens", "sample_temperature")
    without_evaluation = [f"train.{key}={json.dumps(getattr(defaults.train, key))}" for key in keys]
    without_evaluation += [f"data.val_fraction={json.dumps(defaults.data.val_fraction)}", "data.val_path=null"]
    return [
        *overrides, f"run.dir={folder}", "run.overwrite=true", "run.resume=false", f"train.max_steps={steps}",
        "train.epochs=null", "train.eval_samples=0", *without_evaluation,
        "checkpoint.at_end=false", "checkpoint.every_steps=null", "logging.tensorboard=false",
        "memory.interval=1", "memory.plan=false",
        f"memory.trace_step={TRACED if traced else 'null'}",
        *([f"memory.cap={cap}"] if cap else []),
    ]  # fmt: skip


def read_trial(folder: Path, exit_code: int, output: str = "") -> Trial:
    """Read the result of a run that `run_trial` started, from its run directory."""
    if exit_code:
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        message = errors[0] if errors else (output.strip().splitlines() or ["it said nothing"])[-1]
        return Trial("out of memory" if [*(folder / "oom").glob("rank*.json")] else "failed", message=message)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [record["tokens_per_s"] for record in metrics if record["step"] > TRACED]
    rows = [row for _, gathered in read_jsonl(folder / "memory.jsonl") for row in gathered]
    on_device = [row.device_mem for row in rows if row.device_mem is not None]
    traces = [json.loads(path.read_text()) for path in sorted((folder / "trace").glob("rank*.json"))]
    peaks = [memory.peak_allocated for memory in on_device] or [trace["peak"]["bytes"] for trace in traces]
    return Trial(
        "ok",
        peak=max(peaks, default=None),
        reserved=max((memory.peak_reserved for memory in on_device), default=None),
        tokens_per_s=median(speeds) if speeds else None,
        losses=tuple(record["loss"] for record in metrics),
    )
