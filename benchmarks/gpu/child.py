"""Cases in processes of their own: started, watched and ended by the command, which holds no GPU itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil

from shardkit.hardware.cards import GPUS, Gpu

from ..common import REPO, environ
from .cases import Figures, Where
from .nursery import Helpers

Ended = Literal["done", "time is up", "host memory"]
HOST_RESERVE = 3 << 30
"""A case is ended when fewer bytes of host memory are left: before the kernel chooses a process to kill."""
_POLL_S = 0.25


class Worker:
    """The process that runs cases: started for the first one, and for the next one if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker

    def hand(self, request: Path, environment: Mapping[str, str]) -> None:
        """Let it run the case of a request."""
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.child"], cwd=REPO, env=dict(environment),
                stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n".encode())
        self._process.stdin.flush()

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def last_line(self) -> str:
        self._output.seek(0)
        lines = [line for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def end(self) -> None:
        """Kill it and every process that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of them are gone
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def run_case(
    part: str, case: str, what: str, where: Where, limit_s: float, worker: Worker | None = None
) -> tuple[Figures, Ended]:
    """Run `predict` or `measure` of a case; returns its result, also if it was ended early.

    A crash is an outcome. The processes end with this function, even if it raises, except for a `worker` whose case
    succeeded.

    Args:
        worker: runs several cases, on emulated cards; without one the case has fresh processes.
    """
    request, exchange, done = (where.folder / name for name in ("request.json", "case.json", "done"))
    for path in (exchange, done):
        path.unlink(missing_ok=True)
    content = {
        "part": part, "case": case, "what": what, "dry": where.dry, "card": where.card, "exchange": str(exchange),
        "emulated": where.emulated, "host_memory": where.host_memory, "done": str(done),
        "predicted": where.predicted, "earlier": where.earlier,
    }  # fmt: skip
    request.write_text(json.dumps(content))
    deadline, figures, seen = time.monotonic() + limit_s, dict(where.earlier), 0
    figures.pop("ended", None)
    process = worker or Worker()
    try:
        process.hand(request, _environment(where, "predicted" if worker else what))
        while not (gone := process.ended()) and not done.exists():
            if exchange.exists() and (at := exchange.stat().st_mtime_ns) != seen:
                seen, figures = at, json.loads(exchange.read_text())
                where.keep(figures)
            if psutil.virtual_memory().available < HOST_RESERVE:
                return figures, "host memory"
            if time.monotonic() > deadline:
                return figures, "time is up"
            time.sleep(_POLL_S)
        if exchange.exists():
            figures = json.loads(exchange.read_text())
        if gone and not done.exists():
            figures = {**figures, "outcome": "failed", "message": process.last_line()}
        return figures, "done"
    finally:
        if worker is None or not done.exists():
            process.end()


def _environment(where: Where, what: str) -> dict[str, str]:
    """An environment that finds ninja and other tools beside this interpreter; a case on the CPU leaves GPUs alone."""
    device: dict[str, str] = {}
    if where.on_cpu:
        device = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    elif where.emulated:
        device = {"OMP_NUM_THREADS": "1", **(emulated_card(GPUS[where.card]) if what == "measured" else {})}
    return environ(DEEPSPEED_LOG_LEVEL="error", **device)


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


def _main(request: dict[str, Any], helpers: Helpers) -> None:
    from . import EMULATED, PARTS, part_cases

    assert request["part"] in (*PARTS, *EMULATED)
    exchange = Path(request["exchange"])

    def write(figures: Figures) -> None:
        draft = exchange.with_suffix(".tmp")
        draft.write_text(json.dumps(figures))
        draft.replace(exchange)

    case = part_cases(request["part"], request["dry"])[request["case"]]
    with tempfile.TemporaryDirectory(dir=exchange.parent) as folder:
        where = Where(request["dry"], request["card"], request["host_memory"], Path(folder), request["emulated"])
        where = replace(where, predicted=request["predicted"], earlier=request["earlier"], keep=write, helpers=helpers)
        run = case.predict if request["what"] == "predicted" else case.measure
        assert run is not None
        write(run(where))
    Path(request["done"]).touch()


if __name__ == "__main__":
    with Helpers() as helpers:
        for line in sys.stdin:
            _main(json.loads(Path(line.strip()).read_text()), helpers)
