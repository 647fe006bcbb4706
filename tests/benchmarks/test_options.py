"""Options of a benchmark are of the kind of their defaults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.options import Option, options, refuse


@pytest.mark.parametrize(
    ("default", "words", "value"),
    [
        ((2, 4), [], [2, 4]),
        ((2, 4), ["3", "9"], [3, 9]),
        (("ddp", "fsdp"), ["fsdp"], ["fsdp"]),
        (("ddp", "fsdp"), [], ["ddp", "fsdp"]),
        (Path("here"), ["there"], Path("there")),
        (Option(False, "half, 50 %"), [], False),
        (Option(None, among=("torchrun", "slurm")), ["slurm"], "slurm"),
        (1.5, ["2"], 2.0),
    ],
)
def test_a_value_is_read_as_its_default_is(
    default: object, words: list[str], value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *(["--name", *words] if words else [])])
    assert options("What it measures.", name=default).name == value


@pytest.mark.parametrize("words", [["--arms", "zero4"], ["--part", "zero4"], ["--arm", "ddp", "--other"]])
def test_another_word_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with pytest.raises(SystemExit, match="2"):
        options(None, arms=("ddp", "fsdp"), part=Option(None, among=("ddp",)))


def test_help_says_what_is_taken_without_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit, match="0"):
        options("What it measures.", rounds=Option(9, "of each arm, 6 at least, 50 % of them"))
    said = capsys.readouterr().out
    assert "What it measures." in said and "50 % of them (default 9)" in said


def test_options_that_do_not_go_together_end_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        refuse("--steps 3: an interval needs 6")
    assert capsys.readouterr().err == "error: --steps 3: an interval needs 6\n"
