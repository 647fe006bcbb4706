"""`launch --rehearse` and `submit --rehearse` start a job only if it fitted emulated cards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardkit.hardware.cards import Gpu
from shardkit.launch.local import launcher
from shardkit.launch.ranks import env as gpus_here
from shardkit.rehearse import rehearsal
from shardkit.rehearse.ranks import RehearsedWorld
from shardkit.rehearse.verdict import DOES_NOT_FIT, FITS, Verdict
from tests.cli.test_main import shardkit

CARD = "NVIDIA A100-SXM4-80GB"
Rehearsals = list[dict[str, Any]]


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Rehearsals]:
    """Let rehearsals end with a verdict; returns the list that takes their arguments."""

    def end_with(kind: str) -> Rehearsals:
        calls: Rehearsals = []

        def rehearse(command: Sequence[str], card: Gpu, gpus: int, limits: Any, ranks: RehearsedWorld) -> Verdict:
            calls.append({"command": list(command), "card": card, "gpus": gpus, "ranks": ranks})
            return Verdict(kind, "of a test", card)

        monkeypatch.setattr(rehearsal, "rehearse", rehearse)
        return calls

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trains')\n")
    (tmp_path / "config.yaml").write_text("run: {dir: run}\n")
    return end_with


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that `shardkit launch` would start on a machine with two cards."""
    specs: list[Any] = []
    monkeypatch.setattr(gpus_here, "visible_gpus", lambda *_: 2)
    monkeypatch.setattr(gpus_here, "model_names", lambda *_: [CARD])
    monkeypatch.setattr(launcher, "launch", lambda spec, **_: specs.append(spec) or 0)
    return specs


@pytest.mark.parametrize(("kind", "code"), [(FITS, 0), (DOES_NOT_FIT, 4)])
def test_launch_starts_a_script_that_fits(
    kind: str, code: int, rehearsals: Callable[[str], Rehearsals], launches: list[Any]
) -> None:
    calls = rehearsals(kind)
    assert shardkit("launch", "--rehearse", "--", "train.py", "--lr", "1") == code
    assert [call["command"] for call in calls] == [[sys.executable, "train.py", "--lr", "1"]]
    assert (calls[0]["card"].device_name, calls[0]["gpus"]) == (CARD, 2)
    assert calls[0]["ranks"] == RehearsedWorld(2, 2)
    assert len(launches) == (code == 0)


def test_launch_rehearses_a_config_on_the_card_that_is_named(
    rehearsals: Callable[[str], Rehearsals], launches: list[Any]
) -> None:
    calls = rehearsals(FITS)
    words = ["--rehearse", "--gpu", "l4", "--gpu-memory", "20GiB", "config.yaml", "optim.lr=0.001"]
    assert shardkit("launch", *words) == 0
    assert calls[0]["command"][-4:] == ["shardkit.train", "--config", "config.yaml", "optim.lr=0.001"]
    assert (calls[0]["card"].name, calls[0]["card"].memory) == ("l4", 20 * 2**30)
    assert len(launches) == 1


SUBMIT = ["submit", "--dry-run", "--nodes", 2, "--gpus-per-node", 4, "--rehearse", "--gpu", "h100"]


@pytest.mark.parametrize(("kind", "code"), [(FITS, 0), (DOES_NOT_FIT, 4)])
def test_submit_rehearses_a_scripts_whole_world(
    kind: str, code: int, rehearsals: Callable[[str], Rehearsals], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = rehearsals(kind)
    assert shardkit(*SUBMIT, "--array", "3-5", "--", "train.py", "--seed", "%a") == code
    assert calls[0]["command"] == [sys.executable, "train.py", "--seed", "3"]
    assert (calls[0]["ranks"], calls[0]["gpus"]) == (RehearsedWorld(8, 4), 4)
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash") if code == 0 else not out
    assert "verdict   " in err and "of a test" in err


def test_submit_rehearses_the_config_and_not_its_snapshot(
    rehearsals: Callable[[str], Rehearsals], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.cli.submit.plan_first", lambda *_, **__: None)  # it takes 10 s
    calls = rehearsals(DOES_NOT_FIT)
    assert shardkit(*SUBMIT, "config.yaml", "optim.lr=0.001") == 4
    assert calls[0]["command"][-4:] == ["shardkit.train", "--config", "config.yaml", "optim.lr=0.001"]
