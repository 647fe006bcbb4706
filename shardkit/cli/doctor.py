"""`shardkit doctor`: examine this machine, and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import LaunchError
from .program import load


def doctor(
    run_dir: Annotated[str, typer.Option("--run-dir", metavar="DIR", help="Check this directory's disk.")] = "runs",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Keep the measured constants for planning.")] = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device to measure.")] = "auto",
) -> None:
    """Look for problems that make training fail or crawl; under torchrun or srun also measure the ranks together."""
    from ..files import cache_dir
    from ..hardware import calibration
    from ..launch import doctor as machine
    from ..launch.ranks.env import detect

    if device not in ("auto", "cpu", "cuda"):
        raise LaunchError(f"--device {device!r} is not a device", "pass auto, cpu or cuda")
    try:
        env = detect()
    except LaunchError:  # `examine` reports it as a finding
        env = None
    measured = None
    if calibrate or (env is not None and env.world_size > 1):
        from ..hardware.measure import measure

        config = load("-", [f"run.device={device}", f"run.dir={run_dir}"]).config
        measured = measure(config)
        if measured is None:
            return
        if calibrate:
            calibration.save(measured[0])
    checks = machine.examine(Path(run_dir), cache_dir()) + (machine.findings(*measured) if measured else [])
    extra = {"measured": measured[0]} if measured else {}
    typer.echo(machine.as_json(checks, extra) if json_output else machine.render(checks))
    raise typer.Exit(1 if machine.worst(checks) == "fail" else 0)
