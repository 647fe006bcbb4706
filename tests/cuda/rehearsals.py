"""Rehearsals of this environment's programs, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from shardkit.rehearse import build
from shardkit.rehearse.environment import ask, check
from tests.emulated_cuda.build import WORK

DIES_S = 10.0
"""For killed processes, which need the processor to end and to give their memory back; programs go on for minutes."""


def linked_cache(folder: Path, mode: str = "") -> Path:
    """A cache with the emulation in it, linked from the object files of this environment's; `-computing` is a mode."""
    torch = check(ask([sys.executable], os.environ))
    name = f"torch-{torch.version}-cuda{torch.cuda_major}-{build.digest(torch)}{mode}"
    build.Build(torch, folder / "shardkit" / "rehearse" / name, WORK).run()
    return folder


def rehearsed(
    cache: Path, folder: Path, *options: str, command: list[str], code: int | None = 0
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command, which ends with this exit code, and its verdict; every process that it started is gone."""
    words = [sys.executable, "-m", "shardkit.cli", "rehearse", "--json", *options, "--", *command]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    deadline = time.monotonic() + DIES_S
    while (running := named(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running, running
    assert code in (None, done.returncode), done.stderr
    return done, json.loads(done.stdout) if done.stdout else {}


def named(text: str) -> list[list[str]]:
    """Command lines of the processes that have a text in it."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [words for words in lines if text in " ".join(words)]
