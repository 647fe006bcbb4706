"""A rank that joins, sums a number and leaves, several times, then trains a step under each of the strategies:
`python -m tests.parallel.starts COUNT RUN_DIR [STRATEGY…]`."""

from __future__ import annotations

import sys

import shardkit
from shardkit.config.load import load_config
from tests.strategies import cases

RUN = {"run.device": "cpu", "run.init_timeout_s": 240}


def main() -> None:
    count, run_dir = int(sys.argv[1]), sys.argv[2]
    loaded = load_config(None, {**RUN, "run.dir": run_dir})
    sums = []
    for number in range(count):
        with shardkit.start(loaded) as job:
            sums.append(job.world.sum([float(number)])[0])
    sys.stdout.write(f"{sums}\n")  # in one piece, unlike print: the ranks share the stream
    for strategy in sys.argv[3:]:
        with shardkit.start(load_config(None, {**cases.overrides(strategy, 2, "adamw_clipped"), **RUN})) as job:
            cases.wrap(job)
            batches = cases.micro_batches(0, job.world.rank, job.world.size)
            sys.stdout.write(f"{job.step(batches, cases.loss_fn, cases.n_targets).loss:.5f}\n")


if __name__ == "__main__":
    main()
