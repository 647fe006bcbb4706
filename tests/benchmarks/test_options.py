"""Options of a benchmark are of the kind of their defaults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.options import Option, options


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
