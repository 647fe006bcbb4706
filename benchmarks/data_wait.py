"""The share of a step that waits for data, with tokens on a disk and with rows tokenised while they are read.

`python -m benchmarks.data_wait` trains on 2 CPU ranks over gloo under DDP, one thread each, with loaders in the
training process and in one process a rank. The model is small, so that a rank takes many tokens a second and the loader
is asked for as much as by a GPU with a large model: an H100 at 40 % of its 989 TFLOP/s takes 8,200 tokens/s through 8
billion parameters.
"""

from __future__ import annotations

import json
import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from . import sft_data
from .common import median_ci, publish
from .options import options, samples
from .overhead import execute, torchrun

NAME = "data_wait"
WARMUP = 3  # steps until workers have filled their queues
STEPS = 15
MODEL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
KINDS = {
    "packed, tokens on a disk": ["data.packing=packed", "train.seq_len=512", "train.micro_batch_size=16"],
    "streamed": ["data.streaming=true", "train.seq_len=128", "train.micro_batch_size=64"],
}
WORKERS = (0, 1)


def records(model: Path, data: Path, kind: str, workers: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """What rank 0 says of each step after the first `WARMUP`."""
    run = folder / f"run-{kind.partition(',')[0]}-{workers}"
    execute(torchrun([
        "shardkit.train", "task.name=hf_causal_lm", f"model.hf_config={model}", f"model.hf={json.dumps(MODEL)}",
        f"data.path={data}", f"data.cache_dir={folder}/cache", "data.loss_on=all", f"data.workers={workers}",
        "data.max_bad_rows=0.01", f"train.max_steps={WARMUP + steps}", "train.eval_samples=0",
        "parallel.strategy=ddp", "run.device=cpu", f"run.dir={run}", "checkpoint.at_end=false",
        "logging.tensorboard=false", *KINDS[kind],
    ]))  # fmt: skip
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARMUP:]


def figures(steps: list[dict[str, Any]], ranks: int = 2) -> dict[str, Any]:
    """Shares of the steps' time that were waits, and the rate at which a rank took tokens."""
    waits, times = ([step[key] for step in steps] for key in ("data_wait_s", "step_time_s"))
    return {
        "share": median_ci([wait / time for wait, time in zip(waits, times, strict=True)]),
        "share_of_all": sum(waits) / sum(times),
        "step_s": median_ci(times),
        "tokens_per_s": median_ci([step["tokens"] / step["step_time_s"] / ranks for step in steps]),
    }


def main() -> None:
    args = options(__doc__, steps=samples(STEPS, "measured steps of each setting"))
    load = os.getloadavg()[0]
    kinds: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        model, data = sft_data.write(folder)
        for kind, workers in product(KINDS, WORKERS):
            steps = records(model, data, kind, workers, args.steps, folder)
            kinds.setdefault(kind, {})[str(workers)] = figures(steps)
    publish(NAME, {"load": load, "steps": args.steps, "kinds": kinds})


if __name__ == "__main__":
    main()
