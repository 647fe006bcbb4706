"""Other launchers start the same training module; two jobs on one host do not get in each other's way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.launch.local.rendezvous import ReservedPort
from tests.launch.jobs import REPO, command, environment, losses, run, settings

pytestmark = pytest.mark.dist
TOOLS = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("tool", ["accelerate", "deepspeed"])
def test_other_launchers_start_the_same_module(tool: str, tmp_path: Path) -> None:
    pytest.importorskip(tool, reason=f"needs {tool}")
    port = ReservedPort()  # deepspeed asks for a number; nobody else is given this one
    # On CPUs accelerate starts several ranks only under --multi_gpu, or through mpirun; port 0: the system picks one.
    words = {
        "accelerate": ["launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
                       "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m"],
        "deepspeed": ["--num_gpus", "2", "--master_port", str(port.port), "--module"],
    }  # fmt: skip
    argv = [str(TOOLS / tool), *words[tool], "shardkit.train", "--config", str(REPO / "configs/ddp.yaml")]
    variables = {"DS_ACCELERATOR": "cpu"} if tool == "deepspeed" else {}
    try:
        run([*argv, *settings(tmp_path / "run")], code=0, **variables)
    finally:
        port.close()
    first, *_ = (tmp_path / "run/memory.jsonl").read_text().splitlines()
    assert len(json.loads(first)["ranks"]) == 2
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_two_jobs_at_once_on_one_host(tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            command("--nproc-per-node", "2", *settings(tmp_path / name)),
            cwd=REPO, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    ends = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
