"""The overhead of shardkit over the shortest hand-written loop for the same engine, on 2 CPU ranks.

`python -m benchmarks.overhead` measures DDP, FSDP2 and ZeRO-2 with the same model, weights, data order and settings on
both sides, and shardkit's ledger, metrics and progress on: step time (interleaved pairs in one process group), peak
tensor memory (one run each under the tensor tracker) and time from command to the first step's end (interleaved
commands).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.ranks import run_ranks

from . import bare
from .common import REPO, in_turns, measure_each, paired_ratio, stamp
from .options import RESUME, options, samples

ENGINES = ("ddp", "fsdp", "zero2")
WARMUP = 3
"""Steps of each arm before those that count."""
GOALS = {"step_time": 1.02, "peak_tensor_memory": 1.01, "first_step": 1.10}


def overrides(engine: str, tokens: str, run_dir: str, max_steps: int) -> list[str]:
    sizes = [f"model.{key}={value}" for key, value in bare.SIZES.items()]
    return [
        *sizes, f"parallel.strategy={engine}", f"data.path={tokens}", "data.shuffle=false", f"run.dir={run_dir}",
        "run.device=cpu", f"train.seq_len={bare.SEQ}", f"train.micro_batch_size={bare.MICRO}",
        f"train.grad_accum_steps={bare.ACCUM}", f"train.max_norm={bare.MAX_NORM}", f"train.max_steps={max_steps}",
        "train.eval_samples=0", "train.seed=0", f"optim.lr={bare.LR}", "optim.schedule=constant",
        f"optim.weight_decay={bare.WEIGHT_DECAY}",
    ]  # fmt: skip


class Ours:
    """The trainer, one step at a time, with all files of a run."""

    def __init__(self, settings: Sequence[str]) -> None:
        from shardkit.config.load import load_config
        from shardkit.run.job import start
        from shardkit.run.trainer import Trainer

        self._started = start(load_config(None, settings))
        self.trainer = Trainer(self._started.__enter__())
        self._records: Any = self.trainer.recorded_steps()

    def step(self) -> float:
        return float(self.record()["loss"])

    def record(self) -> dict[str, float]:
        """The next step's line of metrics.jsonl."""
        record: dict[str, float] = next(self._records)
        return record

    def close(self) -> None:
        self._records.close()
        self._started.__exit__(None, None, None)


def paired_steps(settings: Sequence[str], theirs: bare.Step, data: Iterator[list[Any]], pairs: int) -> dict[str, Any]:
    """Steps of the trainer and of a hand-written loop, in turns in one process group; collective.

    `settings`: those of a run of at least `pairs + WARMUP` steps.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    ours = Ours(settings)

    def timed(step: Callable[[], float]) -> tuple[float, float, float]:
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        loss = step()
        return loss, time.perf_counter() - began, time.process_time() - cpu

    arms = {"shardkit": partial(timed, ours.step), "bare": partial(timed, lambda: theirs(next(data)))}
    taken = in_turns(arms, pairs + WARMUP)
    losses, times, spent = ({arm: [step[i] for step in steps] for arm, steps in taken.items()} for i in range(3))
    times, spent = ({arm: steps[WARMUP:] for arm, steps in figures.items()} for figures in (times, spent))
    every: list[Any] = [None] * world
    dist.all_gather_object(every, losses["bare"])
    mean = [sum(values) / world for values in zip(*every, strict=True)]
    worst = max(abs(a - b) for a, b in zip(losses["shardkit"], mean, strict=True))
    ledger = ours.trainer.job.ledger
    share = ledger.overhead_s / sum(times["shardkit"])
    ours.close()
    return {"times": times, "spent": spent, "loss_difference": worst, "ledger_share": share}


def paired_figures(paired: dict[str, Any]) -> dict[str, Any]:
    """The ratios of `paired_steps`, with their samples."""
    return {
        key: {
            "ratio": paired_ratio(paired[name]["shardkit"], paired[name]["bare"]),
            "median_s": median(paired[name]["bare"]), "samples": paired[name],
        }
        for key, name in (("step_time", "times"), ("processor_time", "spent"))
    } | {"loss_difference": paired["loss_difference"]}  # fmt: skip


def measure_pairs(engine: str, tokens: str, folder: str, pairs: int) -> dict[str, Any]:
    import torch.distributed as dist

    settings = overrides(engine, tokens, f"{folder}/run", pairs + WARMUP)
    data = bare.batches(tokens, dist.get_rank(), dist.get_world_size())
    return paired_steps(settings, bare.ENGINES[engine](), data, pairs)


def measure_peak(arm: str, engine: str, tokens: str, folder: str) -> int:
    import torch.distributed as dist

    from shardkit.memory import TensorTracker

    with TensorTracker() as tracker:
        if arm == "shardkit":
            ours = Ours(overrides(engine, tokens, f"{folder}/run", 4))
            for _ in range(4):
                ours.step()
            ours.close()
        else:
            step, data = bare.ENGINES[engine](), bare.batches(tokens, dist.get_rank(), dist.get_world_size())
            for _ in range(4):
                step(next(data))
    return tracker.peak("cpu")


def torchrun(module_args: list[str], ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", *module_args]


def rank_environ() -> dict[str, str]:
    """The environment of measured ranks: one thread each, and cached byte code as for an installed package."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return environ | {"OMP_NUM_THREADS": "1", "DEEPSPEED_LOG_LEVEL": "error"}


def on_two_ranks(function: Callable[..., Any], limit_s: float = 3600, **arguments: Any) -> Any:
    """Rank 0's result of a function on two fresh processes that form a gloo group."""
    name = sys.modules[function.__module__].__spec__.name  # type: ignore[union-attr]
    environ = {"DEEPSPEED_LOG_LEVEL": "error"}
    return run_ranks(2, f"{name}:{function.__name__}", timeout=limit_s, env=environ, **arguments)[0]


def execute(argv: list[str], **env: str) -> str:
    """Run a command that starts measured ranks; returns its output."""
    done = subprocess.run(argv, cwd=REPO, env={**rank_environ(), **env}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def step_times(run_dir: Path) -> list[tuple[int, float]]:
    """(step, time of its end) of every gather."""
    records = [json.loads(line) for line in (run_dir / "memory.jsonl").read_text().splitlines()]
    return [(int(record["step"]), float(record["time"])) for record in records]


def first_step_seconds(arm: str, engine: str, tokens: str, folder: Path) -> float:
    """Wall time from starting the command to the end of the first optimizer step."""
    run_dir = folder / f"start-{time.monotonic_ns()}"
    began = time.time()
    if arm == "bare":
        out = execute(torchrun(["benchmarks.bare", engine, tokens]))
        return float(out.rpartition("first step done at ")[2].split()[0]) - began
    execute(torchrun(["shardkit.train", *overrides(engine, tokens, str(run_dir), 1)]))
    return step_times(run_dir)[0][1] - began


def write_tokens(folder: Path) -> str:
    """A token file for both sides: the standard library's source, as bytes."""
    import numpy as np

    from shardkit.config.schema import RunConfig
    from shardkit.tasks.causal_lm import CausalLM

    path = folder / "tokens.bin"
    corpus = CausalLM(RunConfig()).data.corpus
    assert corpus is not None, "bytes are a stream"
    np.asarray(corpus.train[:4_000_000], dtype=np.uint16).tofile(path)
    return str(path)


def main() -> None:
    args = options(__doc__, pairs=samples(40), starts=samples(9), engines=ENGINES, resume=RESUME)
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        tokens = write_tokens(folder)
        measured = partial(measure, tokens=tokens, folder=folder, pairs=args.pairs, starts=args.starts)
        measure_each("overhead", "engines", args.engines, measured, args.resume, goals=GOALS, settings=bare.SIZES)


def measure(engine: str, tokens: str, folder: Path, pairs: int, starts: int) -> dict[str, Any]:
    paired = on_two_ranks(measure_pairs, engine=engine, tokens=tokens, folder=f"{folder}/{engine}-pairs", pairs=pairs)
    arms = ("shardkit", "bare")
    peaks = {
        arm: on_two_ranks(measure_peak, arm=arm, engine=engine, tokens=tokens, folder=f"{folder}/{engine}-{arm}")
        for arm in arms
    }  # fmt: skip
    begins = in_turns({arm: partial(first_step_seconds, arm, engine, tokens, folder) for arm in arms}, starts)
    start_ratio = paired_ratio(begins["shardkit"], begins["bare"])
    return {
        "measured": stamp(),
        **paired_figures(paired),
        "ledger_share_of_step_time": paired["ledger_share"],
        "peak_tensor_memory": {"ratio": peaks["shardkit"] / peaks["bare"], **peaks},
        "first_step": {"ratio": start_ratio, "median_s": median(begins["bare"]), "samples": begins},
    }


if __name__ == "__main__":
    main()
