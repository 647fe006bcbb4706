"""The cost of `shardkit launch` at start, the time to recover, and the cost of the watchdog, on 2 CPU ranks.

`python -m benchmarks.launch` measures in turns the time from the command to the end of the first optimizer step of the
same training module under torchrun, `shardkit launch`, `accelerate launch` and the `deepspeed` launcher; then the time
from a rank's SIGKILL to the first step after the restart; then, step by step, the time inside the watchdog's and the
preemption flag's calls and inside the step's one reduction.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.launch.tasks import Troubled

from .common import earlier, in_turns, median_ci, paired_ratio, publish
from .options import Option, options, samples
from .overhead import Ours, execute, on_two_ranks, overrides, step_times, torchrun, write_tokens

GOALS = {"first_step": 1.10, "watching": 0.005}
ENGINE = "ddp"
TOOLS = Path(sys.executable).parent


def commands(args: list[str], port: int) -> dict[str, list[str]]:
    """Each launcher's own command for the same module and arguments."""
    train = ["-m", "shardkit.train", *args]
    return {
        "torchrun": torchrun(train[1:]),
        "shardkit launch": [sys.executable, "-m", "shardkit.cli", "launch", "-", "--nproc-per-node", "2", *args],
        "accelerate launch": [
            str(TOOLS / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", *train,
        ],
        "deepspeed": [
            str(TOOLS / "deepspeed"), "--num_gpus", "2", "--master_port", str(port), "--module", *train[1:]
        ],
    }  # fmt: skip


def first_steps(rounds: int, tokens: str, folder: Path) -> dict[str, list[float]]:
    """Seconds from each command to the end of its first step; the first launcher rotates."""

    def start(name: str) -> float:
        with socket.create_server(("", 0)) as free:  # the deepspeed launcher wants a number
            port = free.getsockname()[1]
        run_dir = tempfile.mkdtemp(dir=folder) + "/run"
        argv = commands(overrides(ENGINE, tokens, run_dir, 1), port)[name]
        began = time.time()
        execute(argv, DS_ACCELERATOR="cpu")
        return step_times(Path(run_dir))[0][1] - began

    return in_turns({name: partial(start, name) for name in commands([], 0)}, rounds)


class Dying(Troubled):
    """A task whose rank 1 kills itself in step 4 of the first attempt, and records the time."""

    def __init__(self, config: Any, note: str) -> None:
        super().__init__(config, how="kill", calls=4)
        self.note = Path(note)

    def go_wrong(self) -> None:
        self.note.write_text(str(time.time()))
        super().go_wrong()


def recovery(rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds from a rank's SIGKILL to the end of the first step after it; every step saves a checkpoint."""
    times = []
    for index in range(rounds):
        run_dir, note = folder / f"killed-{index}", folder / f"killed-{index}.time"
        settings = [
            f"run.dir={run_dir}", "run.device=cpu", "train.max_steps=6", "train.micro_batch_size=2",
            "task.factory=benchmarks.launch:Dying", f"task.args.note={note}", "checkpoint.every_steps=1",
            "memory.interval=1", "logging.tensorboard=false",
        ]  # fmt: skip
        argv = [sys.executable, "-m", "shardkit.cli", "launch", "-", "--nproc-per-node", "2", "--max-restarts", "1"]
        execute([*argv, *settings], DS_ACCELERATOR="cpu")
        died = float(note.read_text())
        times.append(min(when for _, when in step_times(run_dir) if when > died) - died)
    return {"interval_s": median_ci(times), "samples": times}


class Timed:
    """Seconds spent inside the functions given to `around`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any], before: Callable[[], object] = lambda: None) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before()
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def watching(tokens: str, folder: str, steps: int) -> dict[str, float]:
    """Time inside the calls, as shares of the step time; on one rank of the job.

    The ranks wait for each other before the reduction is timed: waiting for the slower one is not a cost of the
    reduction. That wait is left out of the step time as well.
    """
    import torch.distributed as dist

    from shardkit.run.agreement import Reduction

    warmup = 3
    ours = Ours(overrides(ENGINE, tokens, f"{folder}/watched", steps + warmup))
    clocks = {name: Timed() for name in ("watchdog", "preemption flag", "reduction", "wait")}
    trainer: Any = ours.trainer
    trainer.watchdog.beat = clocks["watchdog"].around(trainer.watchdog.beat)
    trainer.stop.flags = clocks["preemption flag"].around(trainer.stop.flags)
    trainer.stop.agree = clocks["preemption flag"].around(trainer.stop.agree)
    wait = clocks["wait"].around(lambda: dist.barrier(group=trainer.world.control_group))
    Reduction.begin = clocks["reduction"].around(Reduction.begin, before=wait)  # type: ignore[method-assign]
    Reduction.wait = clocks["reduction"].around(Reduction.wait)  # type: ignore[method-assign]
    for _ in range(warmup):
        ours.step()
    for clock in clocks.values():
        clock.seconds = 0.0
    began = time.perf_counter()
    for _ in range(steps):
        ours.step()
    total = time.perf_counter() - began - clocks.pop("wait").seconds
    ours.close()
    if idle := [name for name, clock in clocks.items() if not clock.seconds]:
        raise RuntimeError(f"never called in a step: {', '.join(idle)}")
    return {**{name: clock.seconds / total for name, clock in clocks.items()}, "step_s": total / steps}


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """Each launcher's times and their ratio to torchrun's of the same round."""
    return {
        name: {
            "median_s": median(values),
            "ratio": paired_ratio(values, times["torchrun"]),
            "samples": values,
        }
        for name, values in times.items()
    }


def main() -> None:
    args = options(
        __doc__,
        rounds=samples(9, "starts of each launcher"),
        kills=samples(7, "ranks that are killed"),
        steps=Option(60, "watched steps"),
        parts=("first_step", "recovery", "watching"),
    )
    result = {**earlier("launch"), "goals": GOALS}
    result.pop("environment", None)
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        tokens = write_tokens(folder)
        measures: dict[str, Callable[[], Any]] = {
            "first_step": lambda: compared(first_steps(args.rounds, tokens, folder)),
            "recovery": lambda: recovery(args.kills, folder),
            "watching": lambda: on_two_ranks(watching, tokens=tokens, folder=str(folder), steps=args.steps),
        }
        for part in args.parts:
            result[part] = measures[part]()
            publish("launch", result)


if __name__ == "__main__":
    main()
