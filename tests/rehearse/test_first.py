"""`launch --rehearse` and `submit --rehearse` start a job only if it fitted emulated cards."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardkit.hardware.cards import GPUS, Gpu
from shardkit.launch.local import launcher
from shardkit.launch.ranks import env as gpus_here
from shardkit.rehearse import rehearsal
from shardkit.rehearse.ranks import RehearsedWorld
from shardkit.rehearse.verdict import DOES_NOT_FIT, FITS, Verdict
from tests.cli.test_main import shardkit

LAUNCH = ["launch", "--rehearse"]
SUBMIT = ["submit", "--dry-run", "--nodes", 2, "--gpus-per-node", 4, "--rehearse", "--gpu", "h100"]
CONFIG, TRAIN = ["config.yaml", "optim.lr=0.001"], [sys.executable, "train.py"]
HERE, QUEUED = RehearsedWorld(2, 2), RehearsedWorld(8, 4)
STARTS: dict[str, tuple[list[Any], list[str], tuple[str, int], RehearsedWorld]] = {
    "launch a script": (
        [*LAUNCH, "--", "train.py", "--lr", "1"], [*TRAIN, "--lr", "1"], ("a100", GPUS["a100"].memory), HERE),
    "launch a config on a card that is named": (
        [*LAUNCH, "--gpu", "l4", "--gpu-memory", "20GiB", *CONFIG], ["shardkit.train", "--config", *CONFIG],
        ("l4", 20 * 2**30), HERE),
    "submit a script's whole world": (
        [*SUBMIT, "--array", "3-5", "--", "train.py", "--seed", "%a"], [*TRAIN, "--seed", "3"],
        ("h100", GPUS["h100"].memory), QUEUED),
    "submit a config and not its snapshot": (
        [*SUBMIT, *CONFIG], ["shardkit.train", "--config", *CONFIG], ("h100", GPUS["h100"].memory), QUEUED),
}  # fmt: skip
"""Words of a command → the end of what is rehearsed, on which card, of which ranks; this machine has two A100."""


@pytest.mark.parametrize(("kind", "code"), [(FITS, 0), (DOES_NOT_FIT, 4)])
@pytest.mark.parametrize(("words", "program", "card", "ranks"), STARTS.values(), ids=STARTS)
def test_a_job_that_fits_starts(
    words: list[Any], program: list[str], card: tuple[str, int], ranks: RehearsedWorld, kind: str, code: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    calls, launched = list[Any](), list[Any]()

    def rehearse(command: Sequence[str], on: Gpu, gpus: int, limits: Any, world: RehearsedWorld) -> Verdict:
        calls.append((list(command)[-len(program) :], (on.name, on.memory), gpus, world))
        return Verdict(kind, "of a test", on)

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    monkeypatch.setattr(gpus_here, "visible_gpus", lambda *_: 2)
    monkeypatch.setattr(gpus_here, "model_names", lambda *_: [GPUS["a100"].device_name])
    monkeypatch.setattr(launcher, "launch", lambda spec, **_: launched.append(spec) or 0)
    monkeypatch.setattr("shardkit.cli.submit.plan_first", lambda *_, **__: None)  # it takes 10 s
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trains')\n")
    (tmp_path / "config.yaml").write_text("run: {dir: run}\n")
    assert shardkit(*words) == code
    assert calls == [(program, card, ranks.per_node, ranks)]
    out, err = capsys.readouterr()
    assert "verdict   " in err and "of a test" in err
    assert len(launched) + out.startswith("#!/bin/bash") == (code == 0)
