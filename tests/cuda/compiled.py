"""Compiled trainings on an emulated card that computes nothing: the cases, and what their ranks count.

torch.compile is the real one: Triton makes device code, modules load, CUDA graphs are captured; launches do nothing.
"""

from __future__ import annotations

import gc
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.errors import CheckpointError
from shardkit.parallel.compat import graph_breaks
from shardkit.run import loop
from shardkit.run.job import start
from shardkit.run.optimizer_step import OptimizerStep
from shardkit.run.trainer import Trainer
from shardkit.strategies.clocks import HostValue
from tests.cuda.parity import Case as Engine
from tests.cuda.parity import pool as engine_pool

SEQ, MICRO, ACCUM = 512, 8, 2
SIZES: dict[str, Any] = {
    "model.vocab_size": 512, "model.max_seq_len": SEQ, "model.d_model": 512, "model.n_layers": 2, "model.n_heads": 8,
}  # fmt: skip
WORKSPACE = 32 * 2**20
"""Bytes of cuBLAS's workspace for each thread and stream on sm 9.0."""
STEPS, RAGGED, EVAL_EVERY, RESUMED = 7, 5, 3, 2
"""Steps of a case, the one at the end of the epoch whose batch is smaller, and the steps after it was resumed."""


@dataclass(frozen=True)
class Case:
    """One training; `scope` "eager" compiles nothing, and is the others' measure."""

    engine: str
    scope: str = "block"
    policy: str = "none"
    mode: str = "default"

    def __str__(self) -> str:
        return " ".join([self.engine, self.scope, self.policy, self.mode])

    @staticmethod
    def named(name: str) -> Case:
        return Case(*name.split(" "))

    def settings(self) -> dict[str, Any]:
        """Overrides, without data and run directory."""
        out = Engine(self.engine, accum=ACCUM).settings()
        out |= SIZES | {
            "precision.mode": "bf16", "activation.policy": self.policy, "train.micro_batch_size": MICRO,
            "train.seq_len": SEQ, "train.max_steps": STEPS, "train.eval_every": EVAL_EVERY, "memory.interval": 1,
            "logging.tensorboard": False, "memory.plan": False, "data.shuffle": False,
        }  # fmt: skip
        if self.scope != "eager":
            out |= {"compile.enabled": True, "compile.scope": self.scope, "compile.mode": self.mode}
        return out

    @property
    def world(self) -> int:
        return int(self.engine.partition("@")[2])


def pool(case: Case) -> tuple[int, str]:
    """Ranks, and the backend of their group."""
    return engine_pool(Engine(case.engine))


def write_data(folder: Path, case: Case) -> dict[str, Any]:
    """Texts of a length that leaves a smaller last batch in the epoch, and smaller batches in evaluation."""
    seq = case.settings()["train.seq_len"]
    step = MICRO * ACCUM * case.world
    sizes = {"train": (RAGGED - 1) * step + step - ACCUM * case.world, "val": (MICRO + 1) * case.world}
    for name, n_samples in sizes.items():
        (folder / f"{name}.txt").write_text(("abcdefgh" * (n_samples * seq // 8) + "a")[: n_samples * seq + 1])
    return {"data.path": str(folder / "train.txt"), "data.val_path": str(folder / "val.txt")}


class Counts(logging.Handler):
    """What torch.compile has done in this process, span by span."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self.spans: list[dict[str, Any]] = []
        self.held = left_behind()
        """Bytes that earlier cases in this process have left; they belong to no peak."""
        self._last = self._now()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.name}: {record.getMessage().splitlines()[0][:200]}")

    def _now(self) -> dict[str, int]:
        import emucuda
        from torch._dynamo.utils import counters, get_compilation_metrics

        made, metrics = emucuda.counts(), get_compilation_metrics()
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "recompiled": sum(1 for found in metrics if found.recompile_reason),
            "breaks": sum(graph_breaks().values()),
            "without_cuda_graph": counters["inductor"]["cudagraph_skips"],
            "launches": made["launch"],
            "graph_launches": made.get("graph_launch", 0),
        }

    def end(self, name: str, **more: Any) -> None:
        """Close a span; the next one begins here."""
        now = self._now()
        self.spans.append({"span": name, **{key: now[key] - self._last[key] for key in now}, **more})
        self._last = now

    def skip(self) -> None:
        """What was done since the last span belongs to none."""
        self._last = self._now()


def left_behind() -> int:
    """Allocated bytes without cuBLAS's workspaces, which stay in the process: in its own one, each case has them."""
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    kept = sum(block["size"] for block in blocks if block.get("requested_size") == WORKSPACE)
    return torch.cuda.memory_allocated() - kept


@contextmanager
def counted() -> Iterator[Counts]:
    from torch._dynamo.utils import clear_compilation_metrics, counters, set_compilation_metrics_limit

    torch.compiler.reset()
    counters.clear()
    set_compilation_metrics_limit(100_000)
    clear_compilation_metrics()
    counts = Counts()
    logger = logging.getLogger("torch")
    logger.addHandler(counts)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            yield counts
        counts.said += [f"{w.category.__name__}: {str(w.message).splitlines()[0][:200]}" for w in warned]
    finally:
        logger.removeHandler(counts)


@contextmanager
def replaced(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """`owner.name` is `around(function)` in place of its function."""
    own = getattr(owner, name)
    setattr(owner, name, around(own))
    try:
        yield
    finally:
        setattr(owner, name, own)


def finite(item: Callable[..., float]) -> Callable[..., float]:
    """A number that nothing has computed may be anything; it must not end the run."""

    def read(self: HostValue) -> float:
        value = item(self)
        return value if math.isfinite(value) else 0.0

    return read


def untuned(tuner: Any, benchmark: Callable[[Any], float], config: Any, timing: float | None = None) -> Any:
    """Coordinate descent's first configuration: the next ones would be hundreds of kernels to compile."""
    return config


@contextmanager
def without_timing() -> Iterator[None]:
    """Kernels are chosen by timing launches, which do nothing here: take the first one at once."""
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def timed(autotuner: Any, launcher: Any, *args: Any, **kwargs: Any) -> float:
        return 1.0  # milliseconds

    with (
        replaced(CoordescTuner, "autotune", lambda own: untuned),
        replaced(CachingAutotuner, "bench", lambda own: timed),
    ):
        yield


def train(settings: dict[str, Any], counts: Counts, resumed: bool) -> None:
    """Train; each step and each evaluation is a span."""
    with start(None, settings) as job:
        run = Trainer(job)
        run.loop.first_update.is_checked = True  # nothing is computed: no parameter changes

        def begun(compute: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                counts.skip()
                return compute(*args)

            return counted

        def step_counted(update: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                out = update(*args)
                rows = job.ledger.row().phases
                phases = [rows[name] for name in ("forward", "backward", "update")]
                kind = "resumed" if resumed else {1: "first", RAGGED: "ragged"}.get(run.loop.step, "step")
                counts.end(
                    f"{kind} {run.loop.step}", peak=max(phase.peak_allocated or 0 for phase in phases) - counts.held,
                    reserved=max(phase.peak_reserved or 0 for phase in phases),
                )  # fmt: skip
                return out

            return counted

        def evaluation_counted(evaluate: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                counts.skip()
                out = evaluate(*args)
                counts.end(f"evaluation {run.loop.step}")
                return dict.fromkeys(out, 0.0)  # nothing has computed them

            return counted

        with (
            replaced(OptimizerStep, "compute", begun),
            replaced(OptimizerStep, "update", step_counted),
            replaced(loop, "evaluate", evaluation_counted),
            replaced(HostValue, "item", finite),
        ):
            run.fit()


def measure(case: Case) -> dict[str, Any]:
    """All spans of a training and of its continuation, which compiles anew as a new process does."""
    from torch._dynamo.utils import get_compilation_metrics

    folder = Path(of_rank_0(lambda: tempfile.mkdtemp(prefix="compiled-")))  # the pool's end deletes it
    data = write_data(folder, case)
    settings = case.settings() | data | {"run.dir": str(folder / "run")}
    # Compiled code has no collectives, so the other ranks need not compile.
    stance = "default" if dist.get_rank() == 0 else "force_eager"
    with without_timing(), torch.compiler.set_stance(stance), counted() as counts:
        train(settings, counts, resumed=False)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
        counts.held = left_behind()
        not_resumed = None
        try:
            train(settings | {"run.resume": True, "train.max_steps": STEPS + RESUMED}, counts, resumed=True)
        except CheckpointError as error:  # a norm that nothing has computed can skip every update: no state to resume
            not_resumed = str(error).splitlines()[0]
        reasons = [m.recompile_reason.splitlines()[-1][:200] for m in get_compilation_metrics() if m.recompile_reason]
        breaks = {reason[:200]: number for reason, number in graph_breaks().items()}
    gc.collect()
    torch.cuda.empty_cache()
    said = [line for line in dict.fromkeys(counts.said) if "checkpoint" not in line.lower()]
    return {"spans": counts.spans, "recompile_reasons": reasons, "break_reasons": breaks, "said": said[:20],
            "not_resumed": not_resumed}  # fmt: skip


def of_rank_0(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank."""
    made = [make() if dist.get_rank() == 0 else None]
    group = dist.new_group(backend="gloo")
    dist.broadcast_object_list(made, src=0, group=group)
    dist.destroy_process_group(group)
    return made[0]


def run(todo: list[str], backend: str) -> dict[str, dict[str, Any]]:
    """The results of each case in turn."""
    from tests.cuda.parity_ranks import join

    join(backend)
    return {name: measure(Case.named(name)) for name in todo}
