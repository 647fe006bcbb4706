"""Does `shardkit plan --auto` choose well? Every setting of a small grid is trained, its choice compared with the best.

`python -m benchmarks.auto` on an otherwise idle machine: speeds are calibrated, then each strategy × checkpointing
policy × micro-batch is trained for a few steps on 2 CPU ranks. For several caps on memory the search then chooses
without having seen any of it. The choice and the fastest settings whose measured peaks are under the cap are run again,
in turns: the best of them is what it is compared with. The choice is run once more under the real cap.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from shardkit.config import RunConfig
from shardkit.config_io import load_config
from shardkit.plan import search as searching
from shardkit.plan.client import Planner
from shardkit.plan.estimate import MemoryEstimate
from shardkit.plan.search import Search, Setting
from shardkit.plan.target import Target
from shardkit.plan.trial import run_trial

from .common import median_ci, write_result

RANKS, SAMPLES, STEPS = 2, 2, 7
BASE = (
    "run.device=cpu", "precision.mode=fp32", "model.vocab_size=1024", "model.d_model=256", "model.n_layers=6",
    "model.n_heads=4", "model.max_seq_len=512", "train.seq_len=512", f"train.global_batch_size={RANKS * SAMPLES}",
    "train.micro_batch_size=1",
)  # fmt: skip
GIVEN = {"precision.mode"}
GRID = list(product(("ddp", "fsdp", "zero1", "zero2", "zero3"), ("none", "selective_op", "selective", "full"), (1, 2)))
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Of the grid that is under a cap."""
MARGIN = 0.05
RIVALS = 2
"""Fastest settings of the grid that the choice is run against."""
Cell = tuple[str, str, int]


def settings_of(strategy: str, policy: str, micro_batch: int) -> tuple[str, ...]:
    return (
        f"parallel.strategy={strategy}", f"activation.policy={policy}", f"train.micro_batch_size={micro_batch}"
    )  # fmt: skip


def calibrate(cache: Path) -> None:
    """This machine's speeds, measured by two ranks, where only this benchmark sees them."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    subprocess.run([*command, "-m", "shardkit.cli", "doctor", "--calibrate"], stdout=subprocess.DEVNULL, check=False)
    if not (cache / "shardkit" / "calibration.json").exists():
        raise SystemExit("the calibration left nothing behind: run `shardkit doctor --calibrate` to see why")


class Kept:
    """What was measured so far, in a file: an interrupted benchmark goes on where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
            self._path.write_text(json.dumps(self._known))
            print(f"{key}: {self._known[key]}"[:160], file=sys.stderr, flush=True)
        return self._known[key]


def train(cell: Cell, work: Path, cap: str | None = None) -> dict[str, Any]:
    trial = run_trial(None, [*BASE, *settings_of(*cell)], RANKS, work / "run", STEPS, cap)
    return {"outcome": trial.outcome, "peak": trial.peak, "tokens_per_s": trial.tokens_per_s}


def caps(grid: dict[Cell, Any]) -> list[int]:
    """Limits in MiB, just above what the given shares of the grid needed."""
    peaks = sorted(run["peak"] for run in grid.values() if run["peak"] is not None)
    return [int(1.02 * peaks[min(len(peaks) - 1, int(share * len(peaks)))] / 2**20) + 1 for share in SHARES]


class Remembering(Planner):
    """Searches under several caps ask for the same traces, of which only the limit differs."""

    answers: dict[str, MemoryEstimate] = {}

    def predict(self, config: RunConfig, **how: bool) -> MemoryEstimate:
        key = f"{config.model_dump_json()} {how}"
        if key not in self.answers:
            self.answers[key] = super().predict(config, **how)
        return self.answers[key].limited(self.target.device_memory, None)


def choose(mib: int) -> dict[str, Any]:
    """What the search chooses under a cap, and all that it predicted: [[*cell, bytes, tokens/s], …]."""
    target = Target(RANKS, None, RANKS, cap=mib * 2**20)
    with Search(
        lambda more: load_config(None, [*BASE, *more]).config, target, GIVEN, MARGIN, lambda said: None
    ) as search:
        found = search.run()
    seen = {cell_of(one): one for one in (*found.fitting, *found.misfits, *found.sizes)}
    return {
        "chosen": cell_of(found.best),
        "predicted": [[*cell, one.needed, one.tokens_per_s] for cell, one in seen.items()],
    }


def cell_of(setting: Setting) -> Cell:
    return setting.combination.engine, setting.combination.policy, setting.micro_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/auto"), help="for runs and what was measured so far")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument(
        "--until", choices=("grid", "choices", "end"), default="end", help="stop there; run again to go on"
    )
    options = parser.parse_args()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "cache" / "shardkit" / "calibration.json").exists():
        calibrate(work / "cache")
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    searching.Planner = Remembering  # type: ignore[misc]
    kept = Kept(work / "kept.json")
    grid: dict[Cell, Any] = {cell: kept.get(f"grid {cell}", partial(train, cell, work)) for cell in GRID}
    if options.until == "grid":
        return
    choices = {mib: kept.get(f"choice {mib}", partial(choose, mib)) for mib in caps(grid)}
    if options.until == "choices":
        return
    rivals = {mib: contenders(mib, tuple(choice["chosen"]), grid) for mib, choice in choices.items()}
    speeds: dict[Cell, list[float]] = {cell: [] for cells in rivals.values() for cell in cells}
    for turn in range(options.repeats):
        for cell in sorted(speeds):
            speeds[cell].append(kept.get(f"turn {turn} {cell}", partial(train, cell, work))["tokens_per_s"])
    predicted = {tuple(one[:3]): one[3:] for choice in choices.values() for one in choice["predicted"]}
    payload = {
        "ranks": RANKS, "samples": SAMPLES, "steps": STEPS, "settings": BASE, "margin": MARGIN,
        "calibration": json.loads((work / "cache" / "shardkit" / "calibration.json").read_text()),
        "grid": [
            {"settings": cell, "peak": run["peak"], "tokens_per_s": run["tokens_per_s"],
             "predicted_peak": predicted.get(cell, [None, None])[0],
             "predicted_tokens_per_s": predicted.get(cell, [None, None])[1]}
            for cell, run in grid.items()
        ],
        "caps": [],
    }  # fmt: skip
    for mib, choice in choices.items():
        chosen: Cell = tuple(choice["chosen"])
        best = max(rivals[mib], key=lambda cell: median(speeds[cell]))
        ratios = [mine / other for mine, other in zip(speeds[chosen], speeds[best], strict=True)]
        capped = kept.get(f"capped {mib} {chosen}", partial(train, chosen, work, f"{mib}MiB"))
        payload["caps"].append({
            "cap_mib": mib, "chosen": chosen, "best": best, "rivals": rivals[mib],
            "feasible": sum(fits(run, mib) for run in grid.values()), "of": len(GRID),
            "ratio": median_ci(ratios) if len(ratios) >= 6 else [median(ratios)] * 3,
            "chosen_peak": grid[chosen]["peak"], "under_cap": capped["outcome"],
        })  # fmt: skip
    payload["turns"] = [{"settings": cell, "tokens_per_s": found} for cell, found in speeds.items()]
    print(write_result("auto", payload))


def fits(run: dict[str, Any], mib: int) -> bool:
    return run["peak"] is not None and run["peak"] <= mib * 2**20


def contenders(mib: int, chosen: Cell, grid: dict[Cell, Any]) -> list[Cell]:
    """The choice and the fastest of the grid that fit: one run each does not tell which is the best of them."""
    able = [cell for cell, run in grid.items() if fits(run, mib)]
    fastest = sorted(able, key=lambda cell: -grid[cell]["tokens_per_s"])[:RIVALS]
    return sorted({chosen, *fastest})


if __name__ == "__main__":
    main()
