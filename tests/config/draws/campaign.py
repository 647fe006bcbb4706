"""Draws configs, trains each on two ranks and on one, and judges."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.config.load import load_config
from shardkit.config.schema import STRATEGIES
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.strategies.graphs.engines import Report
from tests.strategies.graphs.pool import Pool
from tests.texts import write_numbers

from .keys import draw

STEPS = 3
TASKS: dict[str, dict[str, Any]] = {
    "causal_lm": {
        "model.d_model": 32, "model.n_layers": 3, "model.n_heads": 2, "model.max_seq_len": 32, "train.seq_len": 32,
    },
    "gpt2": {"task.name": "hf_causal_lm", "model.preset": "gpt2-debug", "train.seq_len": 32},
    "llama": {"task.name": "hf_causal_lm", "model.preset": "llama-debug", "train.seq_len": 32},
    "bert": {"task.name": "hf_masked_lm", "model.preset": "bert-debug", "train.seq_len": 32},
    "vit": {"task.name": "image_classification", "model.preset": "vit-debug"},
    "swin2sr": {"task.name": "super_resolution", "model.preset": "swin2sr-debug", "data.crop_size": 32},
}  # fmt: skip
OF_RANKS = {"precision.autocast", "precision.reduce_dtype", "train.grad_accum_steps"}
"""Keys beside `parallel` that say how ranks do it, not what is computed: the single process goes without them."""
TOLERANCES = {"fp32": (2e-5, 5e-4), "other": (3e-2, 0.3)}
"""Relative, on losses and gradient norms: in fp32, and where a type with fewer digits computes or travels."""
MISSING = float("nan")


@dataclass(frozen=True)
class Draw:
    """A training of some steps by these settings."""

    settings: dict[str, Any]

    @property
    def compiles(self) -> bool:
        return any("offload" in key for key in self.settings)

    def run(self, curve: list[tuple[float, float]]) -> None:
        with ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            job = stack.enter_context(start(load_config(None, self.settings)))
            for record in Trainer(job).recorded_steps():
                loss = record["loss"] + record.get("val_loss", 0.0)
                curve.append((loss, record.get("grad_norm", MISSING)))


def settings(seed: int, folder: Path) -> dict[str, Any]:
    """The config of a seed: a task, a strategy, and 2 to 5 keys."""
    draws = random.Random(f"{seed} config")
    task, strategy = draws.choice(list(TASKS)), draws.choice([name for name in STRATEGIES if name != "single"])
    base: dict[str, Any] = {
        **TASKS[task], "parallel.strategy": strategy, "train.max_steps": STEPS, "train.global_batch_size": 8,
        "train.micro_batch_size": 2, "run.device": "cpu", "run.dir": str(folder / f"run-{seed}"),
        "run.overwrite": True, "logging.tensorboard": False,
        "memory.plan": False, "logging.level": "error", "train.eval_samples": 8,
    }  # fmt: skip
    if task in ("causal_lm", "gpt2", "llama", "bert"):
        base |= {"data.path": str(folder / "text"), "data.cache_dir": str(folder / "cache")}
    return base | draw(draws, draws.randint(2, 5))


def alone(config: dict[str, Any]) -> dict[str, Any]:
    """The same training in one process."""
    shared = {k: v for k, v in config.items() if not k.startswith("parallel.") and k not in OF_RANKS}
    return shared | {"parallel.strategy": "single", "run.dir": f"{config['run.dir']}-alone"}


@dataclass(frozen=True)
class Verdict:
    seed: int
    outcome: str
    words: str


def judge(ranks: list[Report | None], one: Report | None, config: dict[str, Any]) -> tuple[str, str]:
    """(outcome, words) of a draw's two ranks against one process."""
    if None in ranks:
        return "hang", next((report.error for report in ranks if report is not None), "")
    reports = sorted((report for report in ranks if report is not None), key=lambda report: report.at)
    if reports[0].error and not reports[0].refused:
        return "traceback", reports[0].error[-400:]
    if reports[0].error:
        # With the optimizer's states a later step takes more: a cap that it exceeds ends it there, as a card would.
        late = any(report.curve for report in reports) and "ran out of memory" not in reports[0].error
        return ("stray" if late else "refused"), " ".join(reports[0].error.split())
    if one is None or one.error:
        return "no reference", "hang" if one is None else " ".join(one.error.split())[-300:]
    exact = config.get("precision.mode", "fp32") in ("fp32", "tf32")
    exact = exact and "8bit" not in config.get("optim.name", "")
    exact = exact and config.get("precision.reduce_dtype", "auto") in ("auto", "fp32")
    tolerances = TOLERANCES["fp32" if exact else "other"]
    for step, (got, want) in enumerate(zip(reports[0].curve, one.curve, strict=True)):
        for name, mine, right, tolerance in zip(("loss", "norm"), got, want, tolerances, strict=True):
            both_missing = mine != mine and right != right
            if not both_missing and not abs(mine - right) <= tolerance * max(abs(right), 1e-3):
                return "wrong", f"step {step}: {name} {mine:.7f} against {right:.7f}"
    return "equal", ""


@dataclass
class Campaign:
    limit_s: float = 60.0
    verdicts: list[Verdict] = field(default_factory=list)

    def run(self, seeds: Iterable[int], until: float | None = None) -> None:
        with tempfile.TemporaryDirectory(prefix="draws-") as name, Pool(2, self.limit_s) as two, Pool(1, 60) as one:
            folder = Path(name)
            write_numbers(folder / "text")
            for seed in seeds:
                if until is not None and time.monotonic() > until:
                    break
                self._judge(seed, settings(seed, folder), one, two)

    def _judge(self, seed: int, config: dict[str, Any], one: Pool, two: Pool) -> None:
        ranks = two.run(Draw(config))
        trained = all(report is not None and not report.error for report in ranks)
        (alone_report,) = one.run(Draw(alone(config))) if trained else [None]
        outcome, words = judge(ranks, alone_report, config)
        self.verdicts.append(Verdict(seed, outcome, words))
        if outcome not in ("equal", "refused"):
            drawn = {k: v for k, v in config.items() if k not in ("run.dir", "data.cache_dir", "data.path")}
            print(f"{outcome:12} {seed}: {words}\n      {drawn}", flush=True)
