"""`torchrun -m shardkit.train --config FILE [section.key=value ...]`, or `python -m shardkit.train` on one device."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from .config.load import LoadedConfig, load_config
from .errors import ConfigError, OutOfMemoryError, ShardkitError, report
from .files import outlive_full_disks
from .launch.failures import failure
from .launch.local import processes, restart
from .launch.ranks import affinity
from .launch.ranks.env import detect, grow_segments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, "write --config FILE section.key=value …; --help lists the options")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = _Parser(prog="shardkit.train", description=__doc__)
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
    processes.note_early()
    processes.end_with_torchrun(os.environ)
    debug = False
    try:
        args = parse(argv)
        debug = args.debug
        loaded = load_config(args.config, args.overrides)
        again = restart.overrides(loaded.config.run.dir, loaded.config.run.resume)
        if again:
            loaded = load_config(args.config, [*args.overrides, *again])
        if args.print_config:
            with suppress(BrokenPipeError):  # `| head` has read enough
                print(loaded.render(), end="")
            return 0
        with failure.reserved():
            try:
                return run(loaded)
            except SystemExit as error:  # in the middle of a run it fails the job, also with 0: its peers wait for it
                failure.record(error)
                traceback.print_exception(error)
                return failure.exit_code_after(error)
    except ShardkitError as error:
        failure.record(error)
        if debug:
            raise
        # Every rank of a machine has the same error, or all ranks agreed on it: print it once.
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")
        reports_here = local_rank == "0" or isinstance(error, OutOfMemoryError)
        return report(error) if reports_here else error.exit_code
    except KeyboardInterrupt as error:
        failure.record(error)
        return failure.exit_code_after(error)
    except SystemExit:  # of --help
        raise
    except BaseException as error:  # a group may hold a KeyboardInterrupt
        failure.record(error)
        raise


def run(loaded: LoadedConfig) -> int:
    binding = affinity.bind(detect())  # before torch starts threads
    grow_segments(os.environ)
    from .run.job import start
    from .run.planning import RunPlan
    from .run.trainer import Trainer

    with RunPlan() as plan:
        with start(loaded) as job:
            if binding and job.world.is_main:
                print(binding, flush=True)
            plan.explain(job)
            trainer = Trainer(job)
            plan.begin(job, trainer.run_dir)
            outcome = trainer.fit()
        if job.world.is_main and outcome.stopped_by is None:  # the groups are gone: no rank waits for this
            plan.close(loaded.config, trainer.run_dir)
    if outcome.stopped_by is None or outcome.steps == trainer.config.train.max_steps:
        return 0
    return restart.stopped(loaded.config.run.dir, outcome.stopped_by)


if __name__ == "__main__":
    outlive_full_disks()
    try:
        sys.exit(main())
    finally:
        processes.keep_exit_code(os.environ)
