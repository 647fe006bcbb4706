"""Mutation testing: whether the tests notice small errors put into the modules that matter most.

`python -m tests.mutants [MODULE …]` takes 12 mutations of each module, drawn by a fixed seed from all that cosmic-ray's
operators make. It puts each into a copy of the checkout and runs there the tests chosen for the module, which start
real ranks from the same copy. A mutant is killed if they fail, or take more than four times as long as without it.
Outcomes are kept in build/mutants as they come: started again, the command goes on. It prints the share killed.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import REPO, output_of
from benchmarks.peers_env import installed
from tests.texts import copy_checkout

SEED, COUNT = 1, 12
COSMIC_RAY = "8.7.0"
SLOWER = 4
"""A mutant whose tests take so many times as long as the original's counts as killed."""
AT_LEAST_S = 60.0
"""No time limit is shorter than this: a busy machine must not kill a mutant."""
MOST_BYTES = 8 * 2**30
"""Memory of each process of the tests."""
FOLDER = REPO / "build" / "mutants"
CHOSEN: dict[str, list[str]] = {
    "shardkit/memory/rows.py": ["tests/memory/test_rows.py", "tests/memory/test_table.py"],
    "shardkit/plan/model/allocator.py": ["tests/plan/test_allocator.py"],
    "launch/slurm/requeue.py": [
        "tests/launch/test_requeue.py",
        "tests/launch/test_script.py::test_a_scripts_job_is_requeued_when_it_ended_as_told_or_slurm_took_it",
    ],
    "shardkit/checkpoint/native/reader.py": [
        "tests/checkpoint/test_reader.py",
        "tests/checkpoint/test_manage.py",
        "tests/checkpoint/test_checkpointer.py",
    ],
    "shardkit/checkpoint/native/writer.py": [
        "tests/checkpoint/test_planner.py",
        "tests/checkpoint/test_faults.py::TestAFullDisk",
        "tests/checkpoint/test_reader.py",
        "tests/checkpoint/test_checkpointer.py",
    ],
    "shardkit/strategies/step.py": ["tests/strategies/test_step.py", "tests/run/test_own_loop.py"],
    "shardkit/strategies/fsdp.py": [
        "tests/strategies/test_fsdp.py",
        "tests/strategies/test_graphs.py::test_random_graphs_train_as_in_one_process_or_are_refused",
        "tests/strategies/test_parity.py::test_every_engine_and_feature",
    ],
}
"""Module → the default tests that ought to notice its errors, the cheapest first; none that compares times."""
EQUIVALENT = {
    # A segment's number only has to be larger than those of the segments before it.
    "self._next += 2",
    # Reserved bytes are never negative.
    "reserved[phase] = max(reserved.get(phase, -1), allocator.reserved)",
    # Slurm's times begin with the four digits of the year.
    'preempted=fields.get("PreemptTime", "")[: 2].isdigit(),',
    # The ranks after the first hold no element of a parameter of one row, wherever they would begin.
    "row = param.numel() // max(param.shape[0], 2)",
    # CPython has one object for all literals of the same word.
    'if unit.kind is "tied" or is_chosen:',
    # Only "tied" is above "shared", and the next line leaves it out: the first of tied modules is held.
    'inner = [unit.modules[0] for unit in units if unit.kind >= "shared"]',
}
"""Lines of mutants that behave as the original does: no test can kill them."""


class NoResult(RuntimeError):
    """The tests say nothing about mutants: they fail without one, or do not run the copy."""


@dataclass(frozen=True)
class Outcome:
    """How one run of the tests ended; `by` is the first test that failed."""

    result: str  # survived, killed, timeout
    seconds: float
    by: str = ""


def sample(python: str, source: str) -> list[dict[str, Any]]:
    """`COUNT` mutants of the source: operator, occurrence, source."""
    command = [python, str(Path(__file__).with_name("operators.py")), str(SEED), str(COUNT)]
    drawn = subprocess.run(command, input=source, text=True, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(drawn)


def changed_line(original: str, mutated: str) -> str:
    """The mutant's lines that the original has not."""
    lines = difflib.ndiff(original.splitlines(), mutated.splitlines())
    return " ".join(line[2:].strip() for line in lines if line.startswith("+ "))


@contextmanager
def a_copy() -> Iterator[Path]:
    """A temporary copy of the checkout."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield copy_checkout(Path(folder))


def put(copy: Path, module: str, source: str) -> None:
    """Replace a module of the copy. Python compares times and sizes with its cache, which two mutants may share."""
    path = copy / module
    path.write_text(source)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(copy: Path, tests: Sequence[str], limit_s: float) -> Outcome:
    """Run tests of the copy until one fails; every process that they start imports the copy."""
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    env.pop("PYTHONPYCACHEPREFIX", None)
    began = time.monotonic()
    ended, text = output_of(argv, limit_s, cwd=copy, env=env, preexec_fn=limit_memory)
    seconds = round(time.monotonic() - began, 1)
    if ended is None:
        return Outcome("timeout", seconds)
    if ended in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):  # as if it cannot be imported
        return Outcome("killed", seconds, "pytest found no tests to run")
    if ended == pytest.ExitCode.OK:
        return Outcome("survived", seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - |$)", text, re.MULTILINE)
    return Outcome("killed", seconds, failed[1] if failed else f"exit code {ended}")


def limit_memory() -> None:
    """A mutant may ask for more memory than there is: the process that does gets a MemoryError."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))


def original_seconds(copy: Path, module: str, tests: Sequence[str]) -> float:
    """Seconds that the tests take without a mutant.

    Raises:
        NoResult: they fail, or they pass although the copy's module cannot be imported.
    """
    source = (copy / module).read_text()
    plain = run_tests(copy, tests, 3600)
    if plain.result != "survived":
        raise NoResult(f"{module}: its tests fail without a mutant: {plain.by or plain.result}")
    put(copy, module, 'raise ImportError("the copy")\n')
    broken = run_tests(copy, tests, 3600)
    put(copy, module, source)
    if broken.result == "survived":
        raise NoResult(f"{module}: its tests pass although the copy cannot be imported, so they run something else")
    return plain.seconds


def run_module(
    copy: Path, module: str, tests: Sequence[str], mutants: Sequence[dict[str, Any]], record: Path
) -> list[dict[str, Any]]:
    """The outcome of each mutant; those that `record` has of the same module and tests are not run again."""
    original = (copy / module).read_text()
    texts = [original, *((copy / test.partition("::")[0]).read_text() for test in tests)]
    version = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    lines = record.read_text().splitlines() if record.exists() else []
    known = {(row["version"], row["mutant"]): row for row in map(json.loads, lines)}
    rows, limit_s = [], 0.0
    for mutant in mutants:
        name = f"{mutant['operator']} {mutant['occurrence']}"
        row = known.get((version, name))
        if row is None:
            limit_s = limit_s or max(AT_LEAST_S, SLOWER * original_seconds(copy, module, tests))
            put(copy, module, mutant["source"])
            outcome = run_tests(copy, tests, limit_s)
            put(copy, module, original)
            row = {"version": version, "mutant": name, "becomes": changed_line(original, mutant["source"])}
            row |= vars(outcome)
            with record.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{module}: {outcome.result} {outcome.seconds:.0f} s: {row['becomes']}  {outcome.by}", flush=True)
        rows.append(row)
    return rows


def tally(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """How many mutants were killed, of those that are not equivalent.

    Raises:
        NoResult: a test kills a mutant that is said to be equivalent.
    """
    for row in rows:
        if row["becomes"] in EQUIVALENT and row["result"] != "survived":
            raise NoResult(f"said to be equivalent, but {row['by']} tells it apart: {row['becomes']}")
    counted = [row for row in rows if row["becomes"] not in EQUIVALENT]
    return sum(row["result"] != "survived" for row in counted), len(counted)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(CHOSEN), metavar="MODULE", help="default: all of them")
    modules = parser.parse_args().modules
    FOLDER.mkdir(parents=True, exist_ok=True)
    python = str(installed(FOLDER / ".venv", COSMIC_RAY, [[f"cosmic-ray=={COSMIC_RAY}"]]))
    killed = counted = 0
    try:
        with a_copy() as copy:
            for module in modules:
                mutants = sample(python, (copy / module).read_text())
                of_module = tally(run_module(copy, module, CHOSEN[module], mutants, FOLDER / "outcomes.jsonl"))
                print(f"{module}: {of_module[0]} of {of_module[1]} killed", flush=True)
                killed, counted = killed + of_module[0], counted + of_module[1]
    except NoResult as error:
        sys.exit(f"error: {error}\n  fix: mend CHOSEN or EQUIVALENT in tests/mutants/__main__.py")
    print(f"{killed} of {counted} mutants killed")


if __name__ == "__main__":
    main()
