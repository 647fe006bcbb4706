"""Mutants are put where the tests see them, counted as what they are, and not asked about twice."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mutants
from benchmarks.common import REPO
from benchmarks.mutants import CHOSEN, Mutant, NoResult, change, put, reasons, run_module, run_tests, summary
from tests.texts import write_files

MODULE, TEST = "toy/half.py", "tests/test_half.py"
HALF = "def half(n):\n    if n < 0:\n        return 0\n    return n // 2\n"
WHOLE, ENDLESS, SAME = "return n // 1", "while True: pass", "if n <= -1:"


def toy(
    root: Path, test: str = "from toy.half import half\ndef test_half() -> None:\n    assert half(7) == 3\n"
) -> Path:
    return write_files(root, {MODULE: HALF, TEST: test})


def mutant(number: int, was: str, becomes: str) -> Mutant:
    return Mutant(MODULE, "Toy", number, HALF.replace(was, becomes))


ALL = [mutant(0, "return n // 2", WHOLE), mutant(1, "return n // 2", ENDLESS), mutant(2, "if n < 0:", SAME)]


@pytest.mark.release
@pytest.mark.covers("benchmarks/mutants.py", "benchmarks/mutants_operators.py")
def test_a_toy_module_is_mutated_and_its_outcomes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, kept, forever = toy(tmp_path), tmp_path / "kept.jsonl", time.monotonic() + 3600
    two = [ALL[0], ALL[2]]
    found = run_module(copy, MODULE, [TEST], two, kept, forever)
    assert [one["result"] for one in found] == ["killed", "survived"]
    assert found[0]["by"] == f"{TEST}::test_half"
    assert (found[0]["was"], found[0]["becomes"]) == ("return n // 2", WHOLE)
    assert (copy / MODULE).read_text() == HALF
    monkeypatch.setattr(mutants, "run_tests", None)  # known: nothing runs
    assert run_module(copy, MODULE, [TEST], two, kept, forever) == found


def test_a_mutant_that_cannot_be_imported_is_killed_also_where_one_test_is_named(tmp_path: Path) -> None:
    copy = toy(tmp_path)
    put(copy, MODULE, "raise ImportError\n")
    assert run_tests(copy, [f"{TEST}::test_half"], 60).result == "killed"


def test_tests_that_do_not_end_are_ended(tmp_path: Path) -> None:
    copy = toy(tmp_path)
    put(copy, MODULE, ALL[1].source)
    assert run_tests(copy, [TEST], 1.0).result == "timeout"


@pytest.mark.release
@pytest.mark.covers("benchmarks/mutants.py", "benchmarks/mutants_operators.py")
@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("def test_half() -> None:\n    assert False\n", "fail without a mutant"),
        ("def test_half() -> None:\n    pass\n", "pass although the copy cannot be imported"),
    ],
)
def test_tests_that_say_nothing_are_an_error(test: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(NoResult, match=problem):
        run_module(toy(tmp_path, test), MODULE, [TEST], ALL, tmp_path / "kept.jsonl", time.monotonic() + 3600)


def outcome(one: Mutant, result: str) -> dict[str, Any]:
    was, becomes = change(HALF, one.source)
    return {"module": MODULE, "was": was, "becomes": becomes, "result": result, "seconds": 1.0, "by": "a test"}


def test_equivalent_mutants_count_neither_as_killed_nor_as_survivors() -> None:
    reason = {(MODULE, "if n < 0:", SAME): "the integers below 0 are those up to -1"}
    found = [outcome(one, result) for one, result in zip(ALL, ("survived", "timeout", "survived"), strict=True)]
    told = summary(found, reason)
    assert (told["asked"], told["killed"], told["timeouts"], len(told["equivalent"])) == (3, 1, 1, 1)
    assert told["survived"] == [{"was": "return n // 2", "becomes": WHOLE}]
    found[2]["result"] = "killed"
    with pytest.raises(NoResult, match="said to be equivalent, but a test"):
        summary(found, reason)


def test_what_is_chosen_and_what_is_equivalent_is_about_this_code() -> None:
    for module, tests in CHOSEN.items():
        assert (REPO / module).is_file()
        for test in tests:
            path, _, name = test.partition("::")
            defined = [node.name for node in ast.parse((REPO / path).read_text()).body if hasattr(node, "name")]
            assert not name or name.partition("[")[0] in defined, test
    for (module, was, _), reason in reasons().items():
        lines = [line.strip() for line in (REPO / module).read_text().splitlines()]
        assert was in lines, f"{module} has no line {was!r} any more: sample anew"
        assert reason
