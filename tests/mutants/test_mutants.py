"""Mutants are put where the tests see them, and counted as what they are."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import REPO
from tests.mutants import __main__ as mutants
from tests.mutants.__main__ import CHOSEN, EQUIVALENT, NoResult, put, run_module, run_tests, tally
from tests.texts import write_files

MODULE, TEST = "toy/half.py", "tests/test_half.py"
HALF = "def half(n):\n    if n < 0:\n        return 0\n    return n // 2\n"
CHECKED = "from toy.half import half\ndef test_half() -> None:\n    assert half(7) == 3\n"


def toy(root: Path, test: str = CHECKED) -> Path:
    return write_files(root, {MODULE: HALF, TEST: test})


def mutant(number: int, was: str, becomes: str) -> dict[str, Any]:
    return {"operator": "Toy", "occurrence": number, "source": HALF.replace(was, becomes)}


KILLED, SAME = mutant(0, "return n // 2", "return n // 1"), mutant(1, "if n < 0:", "if n <= -1:")


@pytest.mark.release
@pytest.mark.covers("tests/mutants/__main__.py", "tests/mutants/operators.py")
def test_a_toy_module_is_mutated_and_its_outcomes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, record = toy(tmp_path), tmp_path / "outcomes.jsonl"
    rows = run_module(copy, MODULE, [TEST], [KILLED, SAME], record)
    assert [row["result"] for row in rows] == ["killed", "survived"]
    assert rows[0]["by"] == f"{TEST}::test_half" and rows[0]["becomes"] == "return n // 1"
    assert (copy / MODULE).read_text() == HALF
    monkeypatch.setattr(mutants, "run_tests", None)  # outcomes are known: nothing runs
    assert run_module(copy, MODULE, [TEST], [KILLED, SAME], record) == rows


def test_a_mutant_that_cannot_be_imported_or_does_not_end_is_killed(tmp_path: Path) -> None:
    copy = toy(tmp_path)
    put(copy, MODULE, "raise ImportError\n")
    assert run_tests(copy, [f"{TEST}::test_half"], 60).result == "killed"
    put(copy, MODULE, HALF.replace("return n // 2", "while True: pass"))
    assert run_tests(copy, [TEST], 1.0).result == "timeout"


@pytest.mark.release
@pytest.mark.covers("tests/mutants/__main__.py", "tests/mutants/operators.py")
@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("def test_half() -> None:\n    assert False\n", "fail without a mutant"),
        ("def test_half() -> None:\n    pass\n", "pass although the copy cannot be imported"),
    ],
)
def test_tests_that_say_nothing_are_an_error(test: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(NoResult, match=problem):
        run_module(toy(tmp_path, test), MODULE, [TEST], [KILLED], tmp_path / "outcomes.jsonl")


def test_equivalent_mutants_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "EQUIVALENT", {"if n <= -1:"})
    rows: list[dict[str, Any]] = [
        {"becomes": "a", "result": "killed", "by": ""},
        {"becomes": "b", "result": "timeout", "by": ""},
        {"becomes": "c", "result": "survived", "by": ""},
        {"becomes": "if n <= -1:", "result": "survived", "by": "a test"},
    ]
    assert tally(rows) == (2, 3)
    rows[-1]["result"] = "killed"
    with pytest.raises(NoResult, match="said to be equivalent"):
        tally(rows)


def test_the_chosen_tests_and_modules_exist() -> None:
    assert len(EQUIVALENT) < len(CHOSEN)
    for module, tests in CHOSEN.items():
        assert (REPO / module).is_file()
        for test in tests:
            path, _, name = test.partition("::")
            defined = [node.name for node in ast.parse((REPO / path).read_text()).body if hasattr(node, "name")]
            assert not name or name.partition("[")[0] in defined, test
