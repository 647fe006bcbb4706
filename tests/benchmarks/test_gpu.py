"""The GPU benchmark without a GPU: it goes on where it stopped, within its budget; a dry run is no measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import REPO, RESULTS
from benchmarks.gpu import PARTS, command, part_cases, store, tables
from benchmarks.gpu.cases import Case, Cases, Figures, Where
from benchmarks.gpu.command import Options, run_part
from benchmarks.gpu.store import Store
from shardkit.errors import ConfigError

Ran = list[tuple[str, str]]
EVERYTHING = [("a", "predicted"), ("a", "measured"), ("b", "measured"), ("c", "measured")]


def unused(where: Where) -> Figures:
    raise AssertionError("cases run in processes of their own")


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(True, False, "h200", 1 << 34, tmp_path / "out", 100.0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The runs of a part of three cases, the first with a prediction."""
    cases: Cases = {"a": Case(unused, unused), "b": Case(unused, predicted_as="a"), "c": Case(unused)}
    done: Ran = []

    def run(part: str, case: str, what: str, where: Where, limit_s: float) -> Figures:
        done.append((case, what))
        return {"outcome": "ok", "saw": where.predicted.get("outcome")}

    monkeypatch.setattr(command, "part_cases", lambda part, dry: cases)
    monkeypatch.setattr(command, "run_case", run)
    return done


def results(options: Options) -> dict[str, Any]:
    return json.loads((options.out / "gpu_mfu.json").read_text())


def test_only_new_code_is_run_again(ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_part("mfu", options)
    assert ran == EVERYTHING
    assert results(options)["cases"]["b"]["measured"]["saw"] == "ok", "b sees the prediction of a"
    assert run_part("mfu", options)
    assert ran == EVERYTHING
    monkeypatch.setattr(store, "code_digest", lambda: "other")
    assert run_part("mfu", options)
    assert ran == [*EVERYTHING, *EVERYTHING]


def test_a_dry_run_is_never_among_the_measurements(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--dry-run", "--out", str(RESULTS)])
    assert "is for measurements" in capsys.readouterr().err
    assert command.parse(["--dry-run"])[1].out != RESULTS
    Store("mfu", options.out, dry=True, card="h200").put("a", "measured", {"outcome": "ok"})
    with pytest.raises(ConfigError, match="a dry run"):
        Store("mfu", options.out, dry=False, card="h200")
    with pytest.raises(ValueError, match="a dry run"):
        tables.on_a_gpu(options.out)


@pytest.mark.release
@pytest.mark.parametrize("part", PARTS)
def test_a_dry_run_goes_through_every_kind_of_case(part: str, tmp_path: Path) -> None:
    if part == "rehearsed" and not torch.cuda.is_available():
        pytest.skip("its programs know nothing of dry runs, and need a GPU")
    options = ["--dry-run", "--part", part, "--out", str(tmp_path), "--budget-s", "280"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", *options], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"{part}: complete" in done.stdout, done.stdout
    held = json.loads((tmp_path / f"gpu_{part}.json").read_text())
    assert held["dry_run"] is True
    assert set(held["cases"]) == set(part_cases(part, dry=True))
    for name, case in held["cases"].items():
        expected = "out of memory" if name.endswith(": too little") else "ok"
        assert case["measured"]["outcome"] == expected, (name, case["measured"])
