"""Does `shardkit plan --auto` choose well? Train every setting of a small grid and compare its choice with the best.

`python -m benchmarks.auto` on an otherwise idle machine: speeds are calibrated, then each strategy × checkpointing
policy × micro-batch is trained for a few steps on 2 CPU ranks, several settings at once that take turns, one step each,
with the same reference among them. For several memory caps, the search then chooses without these measurements. The
choices and the fastest settings whose measured peaks are under the caps take turns once more, for longer: a choice is
compared with the best of them. Each choice also runs alone under the real cap.

Measurements are kept in --folder as they come: started again, the benchmark goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.plan.client import Planner
from shardkit.plan.model.estimate import MemoryEstimate
from shardkit.plan.search import search as searching
from shardkit.plan.search.search import Search, Setting
from shardkit.plan.search.trial import TRACED, run_trial
from shardkit.plan.target import Target

from .common import REPO, in_turns, paired_ratio, publish
from .options import AGAIN, Option, options, samples
from .overhead import Ours, torchrun
from .turns import RANKS, Ranks, timed

FOLDER = REPO / "build" / "auto"
MEASURED = "measured.json"
SAMPLES = 2
BASE = (
    "run.device=cpu", "precision.mode=fp32", "model.vocab_size=1024", "model.d_model=256", "model.n_layers=6",
    "model.n_heads=4", "model.max_seq_len=512", "train.seq_len=512", f"train.global_batch_size={RANKS * SAMPLES}",
    "train.micro_batch_size=1",
)  # fmt: skip
SET_BY_USER = {"precision.mode"}
GRID = list(product(("ddp", "fsdp", "zero1", "zero2", "zero3"), ("none", "selective_op", "selective", "full"), (1, 2)))
Cell = tuple[str, str, int]
REFERENCE: Cell = ("ddp", "none", 1)
AT_ONCE = 8
"""Settings of the grid that take turns, besides the reference."""
CAPS = 5
WARMUP = TRACED + 1
RIVALS = 3
"""Fastest settings of the grid that a choice is run against."""


def settings_of(strategy: str, policy: str, micro_batch: int) -> tuple[str, ...]:
    return (
        f"parallel.strategy={strategy}", f"activation.policy={policy}", f"train.micro_batch_size={micro_batch}"
    )  # fmt: skip


def calibrate(cache: Path) -> None:
    """Measure this machine's speeds with two ranks, and keep them where only this benchmark sees them."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    command = torchrun(["shardkit.cli", "doctor", "--calibrate"])
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if not (cache / "shardkit" / "calibration.json").exists():
        raise SystemExit("the calibration left nothing behind: run `shardkit doctor --calibrate` to see why")


class Measurements:
    """The measurements so far, in a file: an interrupted benchmark continues where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
            self._path.write_text(json.dumps(self._known))
            print(f"{key}: {self._known[key]}"[:160], file=sys.stderr, flush=True)
        return self._known[key]


def take_turns(cells: Sequence[Cell], work: Path, steps: int) -> dict[str, Any]:
    """Run all cells at once, a step each in turns: bytes at the peak, and seconds of every step after the warm-up.

    Returns:
        {"peaks": …, "seconds": …}, both in the order of `cells`.
    """
    with ExitStack() as running:
        alive = [
            running.enter_context(
                Ranks(str(cell), "benchmarks.auto:answers", work, settings=[*BASE, *settings_of(*cell)])
            )
            for cell in cells
        ]
        for ranks in alive:
            ranks.first_step()
        taken = in_turns({index: ranks.step for index, ranks in enumerate(alive)}, steps, WARMUP)
        peaks = [peak(ranks.scratch / "run") for ranks in alive]
    return {"peaks": peaks, "seconds": [[took for took, *_ in timed] for timed in taken.values()]}


def peak(run_dir: Path) -> int:
    """Peak bytes of tensors in the traced step, on the rank with the largest peak."""
    traces = [json.loads(path.read_text()) for path in (run_dir / "trace").glob("rank*.json")]
    return max(int(trace["peak"]["bytes"]) for trace in traces)


def answers(stream: TextIO, scratch: str, settings: list[str]) -> Iterator[dict[str, Any]]:
    """What a rank answers: the trainer's steps."""
    ours = Ours([
        *settings, f"run.dir={scratch}/run", "train.max_steps=1000", "train.eval_samples=0", "memory.plan=false",
        "checkpoint.at_end=false", "logging.tensorboard=false", f"memory.trace_step={TRACED}",
    ])  # fmt: skip
    yield from timed(({"loss": ours.step()} for _ in count()), stream)
    ours.close()


def caps(peaks: Sequence[int]) -> list[int]:
    """Limits in MiB, evenly spaced between the smallest and the largest peak of the grid."""
    low, high = min(peaks) / 2**20, max(peaks) / 2**20
    return [round(low + (high - low) * step / (CAPS + 1)) for step in range(1, CAPS + 1)]


class Remembering(Planner):
    """Searches under several caps need the same traces; only the limit differs."""

    answers: dict[str, MemoryEstimate] = {}

    def predict(self, config: RunConfig, **arguments: Any) -> MemoryEstimate:
        key = f"{config.model_dump_json()} {arguments}"
        if key not in self.answers:
            self.answers[key] = super().predict(config, **arguments)
        return self.answers[key].limited(self.target.device_memory, None)


def choose(mib: int) -> dict[str, Any]:
    """The search's choice under a cap, and all its predictions: [[*cell, bytes, tokens/s], …]."""
    target = Target(RANKS, None, RANKS, cap=mib * 2**20)
    with Search(
        lambda more: load_config(None, [*BASE, *more]).config, target, SET_BY_USER, None, lambda line: None
    ) as search:
        outcome = search.run()
    reported = (*outcome.fitting, *outcome.misfits, *outcome.sizes)
    predictions = {cell_of(setting): (setting.needed, setting.tokens_per_s) for setting in reported}
    assert outcome.best.estimate is not None
    return {
        "chosen": cell_of(outcome.best),
        "uncertainty": outcome.best.estimate.uncertainty,
        "predicted": [[*cell, *prediction] for cell, prediction in predictions.items()],
    }


def cell_of(setting: Setting) -> Cell:
    return setting.combination.engine, setting.combination.policy, setting.micro_batch


def run_capped(cell: Cell, mib: int, work: Path) -> str:
    return run_trial(None, [*BASE, *settings_of(*cell)], RANKS, work / "run", WARMUP + 2, f"{mib}MiB").outcome


def main() -> None:
    args = options(
        __doc__,
        folder=Option(FOLDER, "where runs and measurements are kept"),
        steps=Option(8, "of each setting of the grid"),
        final_steps=samples(24, "of the choices and the fastest"),
        again=AGAIN,
    )
    work: Path = args.folder.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if args.again:
        (work / MEASURED).unlink(missing_ok=True)
    if not (work / "cache" / "shardkit" / "calibration.json").exists():
        calibrate(work / "cache")
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    searching.Planner = Remembering  # type: ignore[misc]
    measurements = Measurements(work / MEASURED)
    grid = measure_grid(measurements, work, args.steps)
    limits = caps([run["peak"] for run in grid.values()])
    choices = {mib: measurements.get(f"choice {mib}", partial(choose, mib)) for mib in limits}
    rivals = {mib: contenders(mib, tuple(choice["chosen"]), grid) for mib, choice in choices.items()}
    finalists = sorted({cell for cells in rivals.values() for cell in cells})
    final = measurements.get(
        f"{args.final_steps} steps of {finalists}", partial(take_turns, finalists, work, args.final_steps)
    )
    seconds: dict[Cell, list[float]] = dict(zip(finalists, final["seconds"], strict=True))
    predicted = {tuple(row[:3]): row[3:] for choice in choices.values() for row in choice["predicted"]}
    payload = {
        "ranks": RANKS, "samples": SAMPLES, "settings": BASE, "reference": REFERENCE,
        "calibration": json.loads((work / "cache" / "shardkit" / "calibration.json").read_text()),
        "grid": [
            {"settings": cell, **run, "predicted_peak": predicted.get(cell, [None, None])[0],
             "predicted_tokens_per_s": predicted.get(cell, [None, None])[1]}
            for cell, run in grid.items()
        ],
        "caps": [],
        "final": [{"settings": cell, "seconds": taken} for cell, taken in seconds.items()],
    }  # fmt: skip
    for mib, choice in choices.items():
        chosen: Cell = tuple(choice["chosen"])
        best = min(rivals[mib], key=lambda cell: median(seconds[cell]))
        payload["caps"].append({
            "cap_mib": mib, "chosen": chosen, "best": best, "rivals": rivals[mib],
            "uncertainty": choice["uncertainty"],
            "feasible": sum(fits(run, mib) for run in grid.values()), "of": len(GRID),
            "ratio": paired_ratio(seconds[best], seconds[chosen]),
            "chosen_peak": grid[chosen]["peak"],
            "under_cap": measurements.get(f"capped {mib} {chosen}", partial(run_capped, chosen, mib, work)),
        })  # fmt: skip
    publish("auto", payload)


def measure_grid(measurements: Measurements, work: Path, steps: int) -> dict[Cell, dict[str, Any]]:
    """Every setting's peak, and its speed relative to the reference that took turns with it."""
    grid: dict[Cell, dict[str, Any]] = {}
    for start in range(0, len(GRID), AT_ONCE):
        cells = GRID[start : start + AT_ONCE]
        turns = measurements.get(f"{steps} steps of {cells}", partial(take_turns, [REFERENCE, *cells], work, steps))
        reference, *others = turns["seconds"]
        for cell, taken, n_bytes in zip(cells, others, turns["peaks"][1:], strict=True):
            speed = median(a / b for a, b in zip(reference, taken, strict=True))
            grid[cell] = {"peak": n_bytes, "speed": speed, "seconds": taken, "reference_seconds": reference}
    return grid


def fits(run: dict[str, Any], mib: int) -> bool:
    return bool(run["peak"] <= mib * 2**20)


def contenders(mib: int, chosen: Cell, grid: dict[Cell, dict[str, Any]]) -> list[Cell]:
    """The choice and the fastest of the grid that fit: a few steps cannot tell which one is best."""
    able = [cell for cell, run in grid.items() if fits(run, mib)]
    fastest = sorted(able, key=lambda cell: -grid[cell]["speed"])[:RIVALS]
    return sorted({chosen, *fastest})


if __name__ == "__main__":
    main()
