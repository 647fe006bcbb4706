"""A rank that joins, sums a number and leaves, several times: `python -m tests.parallel.starts COUNT RUN_DIR`."""

from __future__ import annotations

import sys

import shardkit
from shardkit.config.load import load_config


def main() -> None:
    count, run_dir = int(sys.argv[1]), sys.argv[2]
    loaded = load_config(None, ["run.device=cpu", f"run.dir={run_dir}", "run.init_timeout_s=60"])
    sums = []
    for number in range(count):
        with shardkit.start(loaded) as job:
            sums.append(job.world.sum([float(number)])[0])
    print(sums, flush=True)


if __name__ == "__main__":
    main()
