"""Every strategy and world size saved, and loaded under every other, as `tests/checkpoint/test_matrix.py` checks.

`python -m benchmarks.checkpoint_matrix` runs all pairs in fp32 and in bf16 and writes how many were bit-equal, and how
far the losses after the load differ from those of the run that was never saved.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.checkpoint import cases, matrix

from .common import measure_each
from .options import options


def measure(mode: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        outcome = matrix.run(matrix.full(), Path(folder), [mode])
    loads = [pair for pair in outcome.pairs if pair.source]
    worst = max(loads, key=outcome.distance)
    return {
        "pairs": len({(p.source, p.target) for p in loads}),
        "not_bit_equal": sorted({f"{p.source} → {p.target}" for p in loads if p.differing}),
        "steps_compared": len(worst.losses),
        "worst_loss_difference": outcome.distance(worst),
        "worst_pair": f"{worst.source} → {worst.target}",
    }


def main() -> None:
    args = options(__doc__, modes=("fp32", "bf16"))
    worlds = {case: cases.worlds(case) for case in cases.CASES}
    measure_each("checkpoint_matrix", "modes", args.modes, measure, world_sizes=worlds)


if __name__ == "__main__":
    main()
