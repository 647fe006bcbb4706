"""`shardkit rehearse` on whole programs: the peaks are the program's own, the verdict is sharp, nothing is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkit.rehearse import build
from shardkit.rehearse.environment import ask, check
from tests.emulated_cuda import needs_emulation
from tests.emulated_cuda.build import WORK

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.timeout(600)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TRAIN = """
import os, sys, torch, torch.distributed as dist
from torch import nn
if "RANK" in os.environ:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
rank = int(os.environ.get("RANK", "0"))
model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)).cuda()
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    x = torch.randn(64, 4096, device="cuda")
    if rank == 1 and step == 1 and "fail" in sys.argv:
        raise ValueError("a bad batch")
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
    print("PEAK", rank, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the emulation in it, linked from the object files of this environment's."""
    folder = tmp_path_factory.mktemp("cache")
    torch = check(ask([sys.executable], os.environ))
    name = f"torch-{torch.version}-cuda{torch.cuda_major}-{build.digest(torch)}"
    build.Build(torch, folder / "shardkit" / "rehearse" / name, WORK).run()
    return folder


def rehearse(
    cache: Path, folder: Path, *options: str, command: list[str], program: str = TRAIN
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The ended command, and its verdict; every process that it started is gone."""
    (folder / "train.py").write_text(program)
    words = [sys.executable, "-m", "shardkit.cli", "rehearse", "--json", *options, "--", *command]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    running = [process.cmdline() for process in psutil.process_iter() if str(folder) in " ".join(cmdline(process))]
    assert not running
    return done, json.loads(done.stdout) if done.stdout else {}


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_two_ranks_fit_with_their_own_peaks_and_touch_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("trained")
    command = [*TORCHRUN, str(tmp_path / "train.py")]
    done, verdict = rehearse(cache, tmp_path, "--gpu", "a100", "--gpus", "2", command=command)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("PEAK")]
    printed = {int(rank): (int(allocated), int(reserved)) for _, rank, allocated, reserved in lines}
    told = {rank["rank"]: (rank["peak_allocated"], rank["peak_reserved"]) for rank in verdict["ranks"]}
    assert told == printed
    assert [rank["steps"] for rank in verdict["ranks"]] == [3, 3]
    assert (tmp_path / "model.pt").read_text() == "trained"
    assert f"would have been overwritten: {tmp_path / 'model.pt'}" in verdict["notes"]


def test_the_verdict_is_sharp(cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "train.py"]
    _, plenty = rehearse(cache, tmp_path, command=command)
    for share, code in ((1.01, 0), (0.97, 4)):
        memory = f"{int(plenty['needed'] * share / 2**20)}MiB"
        done, verdict = rehearse(cache, tmp_path, "--gpu-memory", memory, command=command)
        assert done.returncode == verdict["exit_code"] == code, done.stderr
        assert verdict["needed"] == plenty["needed"]
    assert "OutOfMemoryError" in verdict["reason"] and "train.py" in verdict["reason"]


def test_the_programs_own_exception_names_its_rank(cache: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, str(tmp_path / "train.py"), "fail"]
    done, verdict = rehearse(cache, tmp_path, "--gpus", "2", command=command)
    assert done.returncode == 8 and verdict["verdict"] == "failed"
    assert verdict["reason"].startswith("rank 1: ValueError: a bad batch")
    assert 'raise ValueError("a bad batch")' in verdict["reason"]


READS = """
import torch
print(torch.randn(4096, 4096, device="cuda").mul(2).gt(3).nonzero().shape)
"""
SLEEPS = """
import subprocess, sys, time, torch
torch.zeros(1, device="cuda")
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", __file__])
"""
NO_CUDA = """
print("on the CPU")
"""


@pytest.mark.parametrize(
    ("program", "options", "code", "words"),
    [
        (READS, [], 7, "values that were not computed"),
        (SLEEPS, ["--time-limit", "30"], 7, "the time limit of 30 s came"),
        (NO_CUDA, [], 2, "ended without using CUDA"),
    ],
    ids=["reads", "sleeps", "no-cuda"],
)
def test_what_cannot_be_judged_is_said(
    program: str, options: list[str], code: int, words: str, cache: Path, tmp_path: Path
) -> None:
    command = [sys.executable, str(tmp_path / "train.py")]
    done, verdict = rehearse(cache, tmp_path, *options, command=command, program=program)
    assert done.returncode == code, done.stderr
    assert words in (verdict["reason"] if verdict else done.stderr)
