"""`shardkit submit`: check before it queues, keep what was submitted, pass Slurm's answer on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, LaunchError
from ..job import JobSpec, SlurmOptions
from . import fit, lead, snapshot
from . import script as slurm

if TYPE_CHECKING:
    from ...config.load import LoadedConfig


@dataclass(frozen=True)
class Submission:
    """A job that is ready to be submitted.

    Attributes:
        spec: with the snapshot's config in place of the user's.
        config: the resolved config as YAML.
        script: for sbatch.
    """

    spec: JobSpec
    config: str
    script: str


def prepare(
    config: str,
    overrides: Sequence[str],
    *,
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int,
    max_restarts: int = 0,
    name: str | None = None,
    options: SlurmOptions = SlurmOptions(),  # noqa: B008 - immutable
) -> Submission:
    """Check the config on the asked nodes and GPUs, and render the script; writes nothing.

    Raises:
        ConfigError: the config is wrong, or does not fit the number of ranks.
        LaunchError: the run directory holds a run already, or options that Slurm could not take.
    """
    by_index = [item for item in overrides if "%a" in item and options.array is not None]
    fixed = [item for item in overrides if item not in by_index]
    loaded = _checked(config, fixed, by_index, options.array, nodes, ranks_per_node, gpus_per_node)
    run_dir = Path(loaded.config.run.dir).absolute()
    if options.array is None:
        _refuse_taken(run_dir, loaded)
    spec = JobSpec(
        config=str(run_dir / snapshot.FOLDER / "config.yaml"),
        overrides=tuple(by_index),
        run_dir=str(run_dir),
        nproc_per_node=ranks_per_node,
        nodes=(nodes, nodes),
        gpus_per_node=gpus_per_node,
        max_restarts=max_restarts,
        python=sys.executable,
        cwd=os.getcwd(),
        name=name or f"shardkit-{run_dir.name}",
        slurm=replace(options, signal_s=lead.signal_s(options.signal_s, run_dir, loaded.config.run.resume)),
    )
    return Submission(spec, loaded.render(), slurm.render_sbatch(spec))


def submit(job: Submission) -> str:
    """Write the snapshot and hand its script to sbatch; returns the job's id.

    Raises:
        LaunchError: Slurm is not installed, or sbatch refused; then nothing of the snapshot is left.
    """
    run_dir = Path(job.spec.run_dir)
    slurm.require("sbatch")
    snapshot.write(run_dir, job.config, job.script)
    try:
        said = slurm.call("sbatch", "--parsable", str(run_dir / snapshot.FOLDER / "job.sbatch"))
    except LaunchError:
        snapshot.remove(run_dir)
        raise
    job_id = said.strip().splitlines()[-1].partition(";")[0]
    (run_dir / snapshot.FOLDER / "job_id").write_text(job_id + "\n")
    return job_id


def _checked(
    config: str,
    fixed: Sequence[str],
    by_index: Sequence[str],
    array: str | None,
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int,
) -> LoadedConfig:
    from ...config.load import load_config

    path = None if config == "-" else config
    loaded = load_config(path, fixed)
    first = re.match(r"\d+", array or "")
    whole = load_config(path, [*fixed, *(item.replace("%a", first[0] if first else "0") for item in by_index)])
    fit.check(whole.config, nodes, ranks_per_node, gpus_per_node)
    return loaded


def _refuse_taken(run_dir: Path, loaded: LoadedConfig) -> None:
    run = loaded.config.run
    if run.overwrite or run.resume is not False:
        return
    if any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        raise ConfigError(
            f"run.dir={loaded.config.run.dir} already holds a run",
            "set run.resume=true to go on with it, run.overwrite=true to delete it, or another run.dir",
        )
