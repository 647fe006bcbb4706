"""Golden losses: those of the built-in tasks on their debug models in one process, kept in golden.json.

The other tests compare strategies with one process; these losses notice a change that is the same everywhere: of the
initial values, the order of the data, a model or an optimizer. `python -m tests.tasks.golden` shows what differs from
the file; `--write` records the losses anew, for a change that is meant (name the reason in the commit).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.tasks import cases
from tests.texts import write_words

PATH = Path(__file__).with_suffix(".json")
TOLERANCE = 1e-4
"""Of a loss near 5: processors sum in different orders."""
KEPT = ("loss", "grad_norm", "val_loss")
Losses = dict[str, list[dict[str, float]]]
"""Task → for each step, the figures in `KEPT` that it has."""


def train(folder: str) -> Losses:
    """Train every task; in one rank."""
    own = {"task.name": "causal_lm", "model.preset": "debug", "train.seq_len": 24}
    own |= {"data.path": f"{folder}/text.txt", "data.cache_dir": f"{folder}/cache"}
    cases.TASKS["debug"] = own
    found: dict[tuple[str, str], list[dict[str, Any]]] = cases.records([*cases.TASKS], ["single"], folder)
    return {
        task: [{name: step[name] for name in KEPT if step.get(name) is not None} for step in steps]
        for (task, _), steps in found.items()
    }


def measured() -> Losses:
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        write_words(Path(folder))
        losses: Losses = run_ranks(1, "tests.tasks.golden:train", folder=folder)[0]
    return losses


def golden() -> Losses:
    return json.loads(PATH.read_text(encoding="utf-8"))


def differences(found: Losses, wanted: Losses) -> list[str]:
    """A line for each figure that is beyond the tolerance, missing or new."""
    kept, now = (
        {(task, step, name): value for task, steps in losses.items() for step, one in enumerate(steps, 1)
         for name, value in one.items()}
        for losses in (wanted, found)
    )  # fmt: skip
    return [
        f"{task}, step {step}: {name} {now.get((task, step, name))}, golden {kept.get((task, step, name))}"
        for task, step, name in sorted(kept.keys() | now.keys())
        if abs(now.get((task, step, name), float("inf")) - kept.get((task, step, name), 0.0)) > TOLERANCE
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tasks.golden", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"record {PATH.name} anew")
    write = parser.parse_args().write
    found = measured()
    lines = differences(found, golden() if PATH.exists() else {})
    print("\n".join(lines) or "the losses are the golden ones")
    if write:
        PATH.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(lines) and not write)


if __name__ == "__main__":
    main()
