"""Compiled trainings on an emulated card that computes nothing, and what torch.compile does in each of their spans.

torch.compile is the real one: Triton makes device code, modules load, CUDA graphs are captured; launches do nothing.
"""

from __future__ import annotations

import gc
import logging
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from shardkit.parallel.compat import graph_breaks
from shardkit.run import loop
from shardkit.run.job import start
from shardkit.run.optimizer_step import OptimizerStep
from shardkit.run.trainer import Trainer
from shardkit.strategies.step import HostValue
from tests.cuda.parity import Case
from tests.cuda.parity_ranks import join
from tests.emulated_cuda.counters import counts

SEQ, MICRO, ACCUM = 512, 8, 2
STEPS, RAGGED, EVAL_EVERY, RESUMED = 7, 5, 3, 2
"""Steps of a case, the one at the end of the epoch whose batch is smaller, and the steps after it was resumed."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("single@1", {}),
    "CUDA graphs": ("single@1", {"compile.mode": "reduce-overhead"}),
    "a whole engine": ("zero2+optimizer@1", {"compile.scope": "model"}),
}
SIZES: dict[str, Any] = {
    "model.vocab_size": 512, "model.max_seq_len": SEQ, "model.d_model": 512, "model.n_layers": 2, "model.n_heads": 8,
    "train.micro_batch_size": MICRO, "train.seq_len": SEQ, "train.max_steps": STEPS, "train.eval_every": EVAL_EVERY,
    "precision.mode": "bf16", "logging.tensorboard": False, "memory.plan": False, "data.shuffle": False,
    "compile.enabled": True,
}  # fmt: skip


def write_data(folder: Path) -> dict[str, Any]:
    """Texts of a length that leaves a smaller last batch in the epoch, and smaller batches in evaluation."""
    for name, n_samples in {"train": RAGGED * MICRO * ACCUM - ACCUM, "val": MICRO + 1}.items():
        (folder / f"{name}.txt").write_text("abcdefgh" * (n_samples * SEQ // 8) + "a")
    return {"data.path": str(folder / "train.txt"), "data.val_path": str(folder / "val.txt")}


def now() -> dict[str, int]:
    made = counts()
    graphs = counters["stats"]["unique_graphs"]
    return {"graphs": graphs, "launches": made["launch"], "graph_launches": made.get("graph_launch", 0)}


def train(settings: dict[str, Any], spans: list[dict[str, Any]], resumed: bool) -> None:
    """Train; each step and each evaluation is a span."""
    update, evaluate, item = OptimizerStep.update, loop.evaluate, HostValue.item
    with start(None, settings) as job:
        run = Trainer(job)
        run.loop.first_update.is_checked = True  # nothing is computed: no parameter changes
        before = now()

        def end(name: str) -> None:
            nonlocal before
            after = now()
            spans.append({"span": f"{name} {run.loop.step}", **{key: after[key] - before[key] for key in after}})
            before = after

        def counted_update(*args: Any) -> None:
            update(*args)
            end("resumed" if resumed else {1: "first", RAGGED: "ragged"}.get(run.loop.step, "step"))

        def counted_evaluation(*args: Any) -> dict[str, float]:
            out = evaluate(*args)
            end("evaluation")
            return dict.fromkeys(out, 0.0)  # nothing has computed them

        def finite(self: HostValue) -> float:
            value = item(self)
            return value if math.isfinite(value) else 0.0  # what nothing has computed must not end the run

        with (
            patch.object(OptimizerStep, "update", counted_update), patch.object(loop, "evaluate", counted_evaluation),
            patch.object(HostValue, "item", finite),
        ):  # fmt: skip
            run.fit()


def measure(name: str) -> dict[str, Any]:
    """All spans of a training and of its continuation, which compiles anew as a new process does."""
    engine, extra = CASES[name]
    folder = Path(tempfile.mkdtemp(prefix="compiled-"))  # the pool's end deletes it
    settings = Case(engine, accum=ACCUM).settings() | SIZES | extra | write_data(folder)
    settings["run.dir"] = str(folder / "run")
    torch.compiler.reset()
    counters.clear()
    spans: list[dict[str, Any]] = []
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torch").addHandler(handler)
    # Kernels are chosen by timing launches, which do nothing here: the first one is taken at once.
    untuned = patch.object(CoordescTuner, "autotune", lambda self, benchmark, config, *_, **__: config)
    untimed = patch.object(CachingAutotuner, "bench", lambda *_, **__: 1.0)
    with untuned, untimed, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        train(settings, spans, resumed=False)
        torch.compiler.reset()
        train(settings | {"run.resume": True, "train.max_steps": STEPS + RESUMED}, spans, resumed=True)
    logging.getLogger("torch").removeHandler(handler)
    breaks = graph_breaks()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return {"spans": spans, "breaks": breaks, "said": said + [str(warning.message) for warning in warned]}


def run(backend: str) -> dict[str, dict[str, Any]]:
    join(backend)
    return {name: measure(name) for name in CASES}
