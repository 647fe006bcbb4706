"""A job that cannot fit is not queued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.config.load import load_config
from shardkit.plan.model.estimate import digest
from tests.commands import python_m
from tests.ranks import REPO
from tests.texts import write_program

SMALL = ["model.preset=debug", "train.micro_batch_size=64", "parallel.strategy=ddp", "--gpus-per-node", "2"]


def submit(run_dir: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return python_m("shardkit.cli", "submit", "-", f"run.dir={run_dir}", "--dry-run", *SMALL, *args)


@pytest.mark.slow
def test_a_misfit_is_refused_with_the_plan_unless_forced(tmp_path: Path) -> None:
    refused = submit(tmp_path / "run", "--gpu-memory", "1200MiB")
    assert refused.returncode == 2
    assert "#SBATCH" not in refused.stdout
    *_, cause, fix = refused.stderr.strip().splitlines()
    assert "on each GPU of 1.17 GiB" in cause and "the peak is in" in cause
    assert "--force" in fix and "=" in fix  # a change that fits
    forced = submit(tmp_path / "run", "--gpu-memory", "1200MiB", "--force")
    assert forced.returncode == 0 and "#SBATCH" in forced.stdout


@pytest.mark.slow
def test_what_fits_is_submitted_and_what_was_planned_is_kept(tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    write_program(fake / "sbatch", "#!/bin/sh\necho 77\n")
    write_program(fake / "scontrol", "#!/bin/sh\nexit 0\n")
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "shardkit.cli", "submit", "-", f"run.dir={run_dir}", "--gpu", "l4", *SMALL]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPO, env={"PATH": f"{fake}:/usr/bin:/bin", "HOME": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert "planned: " in done.stdout and "of 22.00 GiB on each GPU: fits" in done.stdout
    said = json.loads((run_dir / "plan.json").read_text())
    assert said["verdict"] == "fits"
    assert said["ranks"][0]["world_size"] == 2
    queued = load_config(run_dir / "submit" / "1" / "config.yaml", []).config
    assert said["config"] == digest(queued), "the job takes the plan for its own"
