"""Does `shardkit plan --auto` choose well? Every setting of a small grid is trained, its choice compared with the best.

`python -m benchmarks.auto` on an otherwise idle machine: speeds are calibrated, then each strategy × checkpointing
policy × micro-batch is trained for a few steps on 2 CPU ranks. For several caps on memory the search then chooses
without having seen any of it; the best setting is the fastest one whose measured peak is under the cap. Choice and best
are run again, in turns, and the choice once more under the real cap.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from shardkit.config_io import load_config
from shardkit.plan.search import Search, Setting
from shardkit.plan.target import Target
from shardkit.plan.trial import Trial, run_trial

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


def train(settings: tuple[str, ...], folder: Path, cap: str | None = None) -> Trial:
    return run_trial(None, [*BASE, *settings], RANKS, folder, STEPS, cap)


def measure(work: Path) -> dict[tuple[str, str, int], Trial]:
    """The whole grid; what was measured before in `work` is kept."""
    path = work / "grid.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for cell in GRID:
        key = " ".join(settings_of(*cell))
        if key not in known:
            trial = train(settings_of(*cell), work / "run")
            known[key] = {"outcome": trial.outcome, "peak": trial.peak, "tokens_per_s": trial.tokens_per_s}
            path.write_text(json.dumps(known))
            print(f"{key}: {known[key]}", file=sys.stderr, flush=True)
    return {cell: Trial(**known[" ".join(settings_of(*cell))]) for cell in GRID}


def caps(grid: dict[tuple[str, str, int], Trial]) -> list[int]:
    """Limits in MiB, just above what the given shares of the grid needed."""
    peaks = sorted(trial.peak for trial in grid.values() if trial.peak is not None)
    return [int(1.02 * peaks[min(len(peaks) - 1, int(share * len(peaks)))] / 2**20) + 1 for share in SHARES]


def choose(cap: int) -> tuple[Setting, dict[tuple[str, str, int], Setting]]:
    """What the search chooses under a cap in bytes, and everything it predicted."""
    target = Target(RANKS, None, RANKS, cap=cap)
    with Search(
        lambda more: load_config(None, [*BASE, *more]).config, target, GIVEN, MARGIN, lambda said: None
    ) as search:
        found = search.run()
    return found.best, {cell_of(one): one for one in (*found.fitting, *found.misfits, *found.sizes)}


def cell_of(setting: Setting) -> tuple[str, str, int]:
    return setting.combination.engine, setting.combination.policy, setting.micro_batch


def in_turns(cells: set[tuple[str, str, int]], work: Path, repeats: int) -> dict[tuple[str, str, int], list[float]]:
    """Tokens/s of each cell, run one after the other, `repeats` times."""
    found: dict[tuple[str, str, int], list[float]] = {cell: [] for cell in cells}
    for _ in range(repeats):
        for cell in sorted(cells):
            speed = train(settings_of(*cell), work / "run").tokens_per_s
            assert speed is not None
            found[cell].append(speed)
            print(cell, round(speed), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/auto"), help="for runs and what was measured so far")
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "cache" / "shardkit" / "calibration.json").exists():
        calibrate(work / "cache")
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    grid = measure(work)
    rows = []
    predicted: dict[tuple[str, str, int], Setting] = {}
    for mib in caps(grid):
        cap = mib * 2**20
        chosen, seen = choose(cap)
        predicted |= seen
        able = {cell: trial for cell, trial in grid.items() if trial.peak is not None and trial.peak <= cap}
        best = max(able, key=lambda cell: able[cell].tokens_per_s or 0.0)
        rows.append((mib, cell_of(chosen), best, len(able)))
        print(f"{mib} MiB: chosen {cell_of(chosen)}, best {best}", file=sys.stderr, flush=True)
    differing = {cell for _, chosen, best, _ in rows if chosen != best for cell in (chosen, best)}
    speeds = in_turns(differing, work, options.repeats)
    payload = {
        "ranks": RANKS, "samples": SAMPLES, "steps": STEPS, "settings": BASE, "margin": MARGIN,
        "calibration": json.loads((work / "cache" / "shardkit" / "calibration.json").read_text()),
        "grid": [
            {"settings": cell, "peak": trial.peak, "tokens_per_s": trial.tokens_per_s,
             "predicted_peak": predicted[cell].needed if cell in predicted else None,
             "predicted_tokens_per_s": predicted[cell].tokens_per_s if cell in predicted else None}
            for cell, trial in grid.items()
        ],
        "caps": [cap_row(mib, chosen, best, able, grid, speeds, work) for mib, chosen, best, able in rows],
    }  # fmt: skip
    print(write_result("auto", payload))


def cap_row(
    mib: int, chosen: tuple[str, str, int], best: tuple[str, str, int], able: int,
    grid: dict[tuple[str, str, int], Trial], speeds: dict[tuple[str, str, int], list[float]], work: Path,
) -> dict[str, Any]:  # fmt: skip
    """A cap: the choice against the best, each round a ratio (1 where they are the same), and under the real cap."""
    mine, others = speeds.get(chosen, []), speeds.get(best, [])
    ratios = [one / other for one, other in zip(mine, others, strict=False)] if chosen != best else [1.0] * 6
    capped = train(settings_of(*chosen), work / "run", cap=f"{mib}MiB")
    return {
        "cap_mib": mib, "chosen": chosen, "best": best, "feasible": able, "of": len(GRID),
        "ratio": median_ci(ratios) if len(ratios) >= 6 else [median(ratios)] * 3,
        "chosen_tokens_per_s": mine, "best_tokens_per_s": others,
        "chosen_peak": grid[chosen].peak, "under_cap": capped.outcome,
    }  # fmt: skip


if __name__ == "__main__":
    main()
