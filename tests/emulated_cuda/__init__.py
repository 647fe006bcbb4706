"""The real CUDA build of torch on a machine without a GPU; README.md says how, and what its tests show."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.hardware.cards import Gpu

REPO = Path(__file__).resolve().parent.parent.parent
ACTIVE = os.environ.get("EMUCUDA", "0") not in ("", "0") and importlib.util.find_spec("emucuda") is not None
needs_emulation = pytest.mark.skipif(not ACTIVE, reason="needs the CUDA build of torch, emulated: make test-cuda")


def emulated_card(card: Gpu, expandable: bool = True) -> dict[str, str]:
    """The variables by which torch finds such cards; kernels are launched and compute nothing.

    Args:
        expandable: as the launcher sets it where the driver has GPUs.
    """
    return {
        "EMUCUDA_SKIP_ABOVE": "256K",  # less than a chunk of initial values, also in bf16: shards are not touched
        "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}",
        "EMUCUDA": "1", "EMUCUDA_COMPUTE": "0", "EMUCUDA_DEVICES": "8", "EMUCUDA_NAME": card.device_name,
        "EMUCUDA_MEMORY": str(card.memory), "EMUCUDA_CONTEXT": str(card.context),
        "EMUCUDA_WORKSPACE": str(card.blas_workspace), "EMUCUDA_SM": ".".join(map(str, card.capability)),
        "EMUCUDA_MULTIPROCESSORS": str(card.multiprocessors),
        "EMUCUDA_THREADS": str(card.threads_per_multiprocessor),
    }  # fmt: skip


def call(function: Callable[..., Any], *args: Any, **env: str) -> Any:
    """The JSON result of `function(*args)` in a fresh process, whose environment has `env` when Python starts."""
    done = start(function, *args, **env)
    out, err = done.communicate(timeout=200)
    assert done.returncode == 0, f"exit code {done.returncode}\n{out}\n{err}"
    return json.loads(out.splitlines()[-1])


def start(function: Callable[..., Any], *args: Any, **env: str) -> subprocess.Popen[str]:
    """The process that `call` waits for; its last line on stdout is the result."""
    # Python's own end is left out: it ends a thread of autograd's that still wants its lock, and C++ aborts then
    # (pytorch/pytorch#38228).
    code = (
        f"import json, os; from {function.__module__} import {function.__name__} as f; "
        f"print(json.dumps(f(*{args!r})), flush=True); os._exit(0)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
