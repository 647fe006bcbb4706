"""A case in its own process: started, watched and ended by the command, which holds no GPU itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil

from shardkit.hardware.cards import GPUS, Gpu

from ..common import REPO
from .cases import Found, Where

Ended = Literal["done", "time is up", "host memory"]
HOST_RESERVE = 3 << 30
"""A case is ended when fewer bytes of host memory are left: before the kernel chooses a process to kill."""
_POLL_S = 0.25


def run_case(part: str, case: str, what: str, where: Where, limit_s: float) -> tuple[Found, Ended]:
    """Run `predict` or `measure` of a case in fresh processes; returns its result, also if it was ended early.

    A crash is an outcome. The processes end with this function, even if it raises.
    """
    request, exchange, log = (where.folder / name for name in ("asked.json", "case.json", "case.log"))
    exchange.unlink(missing_ok=True)
    asked = {
        "part": part, "case": case, "what": what, "dry": where.dry, "card": where.card, "exchange": str(exchange),
        "emulated": where.emulated, "host_memory": where.host_memory,
        "predicted": where.predicted, "earlier": where.earlier,
    }  # fmt: skip
    request.write_text(json.dumps(asked))
    deadline, found, seen = time.monotonic() + limit_s, dict(where.earlier), 0
    found.pop("ended", None)
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.child", str(request)], cwd=REPO,
            env=_environment(where, what), stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                if exchange.exists() and (at := exchange.stat().st_mtime_ns) != seen:
                    seen, found = at, json.loads(exchange.read_text())
                    where.keep(found)
                if psutil.virtual_memory().available < HOST_RESERVE:
                    return found, "host memory"
                if time.monotonic() > deadline:
                    return found, "time is up"
                time.sleep(_POLL_S)
        finally:
            _end(process)
    if exchange.exists():
        found = json.loads(exchange.read_text())
    if process.returncode:
        found = {**found, "outcome": "failed", "message": _last_line(log)}
    return found, "done"


def _environment(where: Where, what: str) -> dict[str, str]:
    """An environment that finds ninja and other tools beside this interpreter; a dry run leaves GPUs alone."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    device: dict[str, str] = {}
    if where.dry:
        device = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    elif where.emulated:
        device = {"OMP_NUM_THREADS": "1", **(emulated_card(GPUS[where.card]) if what == "measured" else {})}
    return {**os.environ, "PATH": path, "DEEPSPEED_LOG_LEVEL": "error", **device}


def emulated_card(card: Gpu, expandable: bool = True) -> dict[str, str]:
    """The variables by which torch finds such cards; kernels are launched and compute nothing.

    Args:
        expandable: as the launcher sets it where the driver has GPUs.
    """
    return {
        "EMUCUDA_SKIP_ABOVE": "512K",  # less than a chunk of initial values: shards are not touched
        "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}",
        "EMUCUDA": "1", "EMUCUDA_COMPUTE": "0", "EMUCUDA_DEVICES": "8", "EMUCUDA_NAME": card.device_name,
        "EMUCUDA_MEMORY": str(card.memory), "EMUCUDA_CONTEXT": str(card.context),
        "EMUCUDA_WORKSPACE": str(card.blas_workspace), "EMUCUDA_SM": ".".join(map(str, card.capability)),
    }  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the case's remaining processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them are gone
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _main(asked: dict[str, Any]) -> None:
    from . import EMULATED, PARTS, part_cases

    assert asked["part"] in (*PARTS, *EMULATED)
    exchange = Path(asked["exchange"])

    def write(found: Found) -> None:
        draft = exchange.with_suffix(".tmp")
        draft.write_text(json.dumps(found))
        draft.replace(exchange)

    case = part_cases(asked["part"], asked["dry"])[asked["case"]]
    with tempfile.TemporaryDirectory(dir=exchange.parent) as folder:
        where = Where(asked["dry"], asked["card"], asked["host_memory"], Path(folder), asked["emulated"])
        where = replace(where, predicted=asked["predicted"], earlier=asked["earlier"], keep=write)
        run = case.predict if asked["what"] == "predicted" else case.measure
        assert run is not None
        write(run(where))


if __name__ == "__main__":
    _main(json.loads(Path(sys.argv[1]).read_text()))
