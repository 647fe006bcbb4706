"""One case in a fresh process: the command that starts it holds no GPU itself."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ..common import REPO, environ, output_of
from . import part_cases
from .cases import Figures, Where


def run_case(part: str, case: str, what: str, where: Where, limit_s: float) -> Figures | None:
    """Run `predict` or `measure` of a case; returns its result, or None if it took too long. A crash is an outcome."""
    request, result = (where.folder / name for name in ("request.json", "result.json"))
    request.write_text(json.dumps({"part": part, "case": case, "what": what, "where": asdict(where)}, default=str))
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.child", str(request)]
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} if where.dry else {}
    code, output = output_of(command, limit_s, cwd=REPO, env=environ(DEEPSPEED_LOG_LEVEL="error", **on_cpu))
    if result.exists():
        figures: Figures = json.loads(result.read_text())
        return figures
    if code is None:
        return None
    lines = [line for line in output.splitlines() if line.strip()]
    return {"outcome": "failed", "message": lines[-1] if lines else f"exit code {code}"}


def main(request: Path) -> None:
    asked = json.loads(request.read_text())
    where = Where(**{**asked["where"], "folder": request.parent})
    case = part_cases(asked["part"], where.dry)[asked["case"]]
    run = case.predict if asked["what"] == "predicted" else case.measure
    assert run is not None
    draft = request.with_name("draft.json")
    draft.write_text(json.dumps(run(where)))
    draft.replace(request.with_name("result.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
