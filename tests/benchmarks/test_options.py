"""Options of a benchmark are of the kind of their defaults."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.options import Option, chosen, options, refuse, samples


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


def test_too_few_samples_for_an_interval_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--final-steps", "5"])
    with pytest.raises(SystemExit, match="2"):
        options(None, final_steps=samples(24, "of each arm"))
    assert capsys.readouterr().err == "error: --final-steps 5: at least 6\n"


def test_cases_are_chosen_by_a_part_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["ddp@2 fp32", "fsdp@2 fp32", "fsdp@2+offload bf16"]
    assert chosen(names, "") == names
    assert chosen(names, "2+off") == names[2:]
    with pytest.raises(SystemExit, match="2"):
        chosen(names, "fsdp.2")
    assert capsys.readouterr().err == "error: --only fsdp.2: no case has such a name\n"


SHARED = {"resume", "only", "again", "predict"}


def test_an_option_of_one_name_is_the_same_in_every_benchmark() -> None:
    for path in sorted(Path(benchmarks.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "options"):
                continue
            for keyword in node.keywords:
                if keyword.arg in SHARED:
                    assert keyword.arg.upper() in ast.unparse(keyword.value), f"{path.name}: --{keyword.arg}"


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
