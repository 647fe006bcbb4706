"""`torchrun -m shardkit.train --config FILE [section.key=value ...]`, or `python -m shardkit.train` on one device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .config_io import LoadedConfig, load_config
from .errors import ShardkitError, report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shardkit.train", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="wins over the file")
    parser.add_argument("--config", metavar="FILE", help="YAML configuration; defaults for everything without it")
    parser.add_argument(
        "--print-config", action="store_true", help="show the resolved config and where values came from"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    # The deepspeed launcher appends --local_rank=N; the rank is read from the environment.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training; returns the process's exit code (see docs/reference.md)."""
    args = parse(argv)
    try:
        loaded = load_config(args.config, args.overrides)
        if args.print_config:
            print(loaded.render(), end="")
            return 0
        return run(loaded)
    except ShardkitError as error:
        if args.debug:
            raise
        # Such errors are the same on every rank of a machine, or agreed on by all: say it once.
        return report(error) if os.environ.get("LOCAL_RANK", "0") == "0" else error.exit_code
    except KeyboardInterrupt:
        return 130


def run(loaded: LoadedConfig) -> int:
    from .job import start
    from .preemption import PREEMPTED
    from .trainer import Trainer

    with start(loaded) as job:
        outcome = Trainer(job).fit()
    return PREEMPTED if outcome.stopped_by else 0


if __name__ == "__main__":
    sys.exit(main())
