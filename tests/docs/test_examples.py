"""The examples that no other test runs: each works as its page says. (Own task: tests/tasks, tests/run.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardkit.memory import read_jsonl
from tests.commands import python_m

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_model_of_transformers_learns_in_ones_own_loop(strategy: str) -> None:
    pytest.importorskip("transformers")
    done = python_m("examples/transformers_model.py", strategy, ranks=0 if strategy == "single" else 2, code=0)
    (loss,) = re.findall(r"^loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert float(loss) < 1.5, "starts near ln 26 = 3.26"


@pytest.mark.dist
def test_the_ledger_accounts_for_a_plain_loop(tmp_path: Path) -> None:
    done = python_m(str(EXAMPLES / "memory_ledger.py"), ranks=2, cwd=tmp_path, code=0)
    gathers = list(read_jsonl(tmp_path / "memory.jsonl"))
    assert [step for step, _ in gathers] == [1, 2, 10, 20]
    n_params = 16 * 256 + 256 + 256 * 4 + 4
    states = [row.state for row in gathers[-1][1]]
    assert len(states) == 2
    assert all(state is not None and state["params"].device == 4 * n_params for state in states)
    assert done.stdout.count("optimizer state of each rank") == 4
    assert "max / mean" in done.stdout


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in EXAMPLES.iterdir() if path.is_file()]
    assert [name for name in names if f"({name})" not in page] == ["README.md"]
