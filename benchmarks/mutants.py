"""Mutation testing: whether the default tests notice small errors put into the modules that matter most.

`python -m benchmarks.mutants` takes 12 mutations of each module, drawn by a fixed seed from all that cosmic-ray's
operators make. It puts each into a copy of the checkout and runs there the tests that are chosen for the module, which
start real ranks from the same copy. `--tests-from COMMIT` does the same with the files of an earlier commit ("before"),
whose modules may differ from today's in the text of messages only.
A mutant that tests kill fails one of them, or takes more than four times as long as the original.
benchmarks/mutants_equivalent.json lists the mutants that behave as the original does, with the reason.

Outcomes are kept in --folder as they come: started again, the benchmark goes on. It writes the result once a run is
whole.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .common import REPO, add_line, output_of, publish, read_lines
from .options import LIMIT, Option, options
from .peers_env import installed

SEED = 1
COUNT = 12
COSMIC_RAY = "8.7.0"
LEFT_OUT = r"core/ReplaceBinaryOperator_BitOr_.*"
"""Operators that are not used: all but two `|` of these modules stand in annotations, which are not evaluated."""
SLOWER = 4
"""A mutant whose tests take so many times as long as the original's counts as killed."""
AT_LEAST_S = 60.0
"""No time limit is shorter than this: a busy machine must not kill a mutant."""
MOST_BYTES = 8 * 2**30
"""Of memory for each process of the tests."""
FOLDER = REPO / "build" / "mutants"
EQUIVALENT = REPO / "benchmarks" / "mutants_equivalent.json"
PARITY, FOREIGN = "tests/strategies/test_parity.py", "tests/strategies/test_foreign.py"
CHOSEN: dict[str, list[str]] = {
    "shardkit/memory/rows.py": ["tests/memory/test_rows.py", "tests/memory/test_table.py"],
    "shardkit/plan/model/allocator.py": ["tests/plan/test_allocator.py"],
    "launch/slurm/requeue.py": ["tests/launch/test_requeue.py"],
    "shardkit/checkpoint/native/reader.py": [
        "tests/checkpoint/test_reader.py",
        "tests/checkpoint/test_manage.py",
        "tests/checkpoint/test_checkpointer.py",
    ],
    "shardkit/checkpoint/native/planner.py": [
        "tests/checkpoint/test_planner.py",
        "tests/checkpoint/test_reader.py",
        "tests/checkpoint/test_checkpointer.py",
        "tests/checkpoint/test_matrix.py",
    ],
    "shardkit/strategies/step.py": [
        "tests/strategies/test_step.py",
        "tests/run/test_own_loop.py",
        f"{PARITY}::test_every_strategy_gives_the_losses_of_one_process[2-sgd_unclipped]",
        "tests/run/test_gradients.py::test_a_gradient_that_is_not_finite_never_reaches_a_checkpoint",
    ],
    "shardkit/strategies/fsdp.py": [
        "tests/strategies/test_fsdp.py",
        f"{PARITY}::test_every_strategy_gives_the_losses_of_one_process",
        f"{PARITY}::test_offload_gives_the_losses_of_one_process",
        f"{FOREIGN}::test_experts_chosen_by_the_data_train_as_in_one_process_or_are_refused_by_name",
        f"{FOREIGN}::test_parameters_that_are_one_number_train_everywhere_and_checkpoints_with_them_travel",
    ],
}
"""Module → the default tests that ought to notice its errors, the cheapest first; none that compares times."""
LABELS = ("before", "after")


class NoResult(RuntimeError):
    """The tests say nothing about mutants: they fail without one, or do not run the copy."""


@dataclass(frozen=True)
class Mutant:
    """A module's whole source with one mutation."""

    module: str
    operator: str
    occurrence: int
    source: str


@dataclass(frozen=True)
class Outcome:
    """How one run of the tests ended; `by` is the first test that failed."""

    result: str  # survived, killed, timeout
    seconds: float
    by: str = ""


def change(original: str, mutated: str) -> tuple[str, str]:
    """The lines that differ, in the original and in the mutant; indentation left out."""
    lines = list(difflib.ndiff(original.splitlines(), mutated.splitlines()))
    sides = ([line[2:].strip() for line in lines if line.startswith(sign)] for sign in ("- ", "+ "))
    was, becomes = (" ".join(side) for side in sides)
    return was, becomes


def sample(python: str, module: str, source: str, count: int = COUNT) -> tuple[int, list[Mutant]]:
    """How many mutations of the source cosmic-ray knows, and `count` of them."""
    script = Path(__file__).parent / "mutants_operators.py"
    command = [python, str(script), str(SEED), str(count), LEFT_OUT]
    drawn = json.loads(subprocess.run(command, input=source, text=True, stdout=subprocess.PIPE, check=True).stdout)
    return drawn["possible"], [Mutant(module, **mutant) for mutant in drawn["mutants"]]


def git(*command: str) -> bytes:
    return subprocess.run(["git", *command], cwd=REPO, check=True, stdout=subprocess.PIPE).stdout


@contextmanager
def a_copy(tests_from: str | None) -> Iterator[Path]:
    """A temporary copy of the files that git tracks, or of another commit's."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        if tests_from is not None:
            subprocess.run(["tar", "-x", "-C", folder], input=git("archive", tests_from), check=True)
            yield copy
            return
        for name in filter(None, git("ls-files", "-z").decode().split("\0")):
            if os.path.lexists(REPO / name):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, copy / name, follow_symlinks=False)
        yield copy


def code(source: str) -> str:
    """A module without its comments and docstrings, which have no mutants."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.unparse(tree)


def without_words(source: str) -> str:
    """A module without the text of its strings, which have no mutants either."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def digest(copy: Path, module: str, tests: Sequence[str]) -> str:
    """Of the module and everything that its tests are made of: an outcome counts as long as these are the same."""
    helpers = (path for path in (copy / "tests").rglob("*") if path.is_file() and not path.name.startswith("test_"))
    files = sorted(path for path in helpers if path.suffix != ".pyc")
    hashed = hashlib.sha256(code((copy / module).read_text()).encode())
    for path in (*(copy / test.partition("::")[0] for test in tests), *files):
        hashed.update(f"{path.relative_to(copy)}\0".encode() + path.read_bytes())
    return hashed.hexdigest()[:16]


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
    seconds = time.monotonic() - began
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


def original_run(copy: Path, module: str, tests: Sequence[str]) -> float:
    """Seconds that the tests take without a mutant.

    Raises:
        NoResult: they fail, or they pass although the copy's module cannot be imported.
    """
    source = (copy / module).read_text()
    whole = run_tests(copy, tests, 3600)
    if whole.result != "survived":
        raise NoResult(f"{module}: its tests fail without a mutant: {whole.by or whole.result}")
    put(copy, module, 'raise ImportError("the copy")\n')
    broken = run_tests(copy, tests, 3600)
    put(copy, module, source)
    if broken.result == "survived":
        raise NoResult(f"{module}: its tests pass although the copy cannot be imported, so they run something else")
    return whole.seconds


def run_module(
    copy: Path, module: str, tests: Sequence[str], mutants: Iterable[Mutant], records_file: Path, until: float
) -> list[dict[str, Any]]:
    """Outcomes of a module's mutants, those that are known included, until the time is up.

    Raises:
        NoResult: the tests say nothing about mutants.
    """
    original, version = (copy / module).read_text(), digest(copy, module, tests)
    recorded = [row for row in read_lines(records_file) if row["version"] == version]
    known = {(row["operator"], row["occurrence"]): row for row in recorded}
    outcomes = []
    for mutant in mutants:
        row = known.get((mutant.operator, mutant.occurrence))
        if row is None:
            if time.monotonic() > until:
                break
            if ("original", 0) not in known:
                seconds = original_run(copy, module, tests)
                known["original", 0] = {"seconds": round(seconds, 1)}
                start = {"module": module, "version": version, "operator": "original", "occurrence": 0}
                add_line(records_file, {**start, **known["original", 0]})
                print(f"{module}: {seconds:.1f} s without a mutant", flush=True)
            put(copy, module, mutant.source)
            outcome = run_tests(copy, tests, max(AT_LEAST_S, SLOWER * known["original", 0]["seconds"]))
            put(copy, module, original)
            was, becomes = change(original, mutant.source)
            row = {
                "module": module, "version": version, "operator": mutant.operator, "occurrence": mutant.occurrence,
                "was": was, "becomes": becomes, "result": outcome.result, "seconds": round(outcome.seconds, 1),
                "by": outcome.by,
            }  # fmt: skip
            add_line(records_file, row)
            print(f"{module}: {outcome.result} {outcome.seconds:.0f} s: {was} → {becomes}  {outcome.by}", flush=True)
        outcomes.append(row)
    return outcomes


def reasons() -> dict[tuple[str, str, str], str]:
    """(module, line, mutated line) → why no test can tell them apart."""
    equivalents = json.loads(EQUIVALENT.read_text())
    return {(mutant["module"], mutant["was"], mutant["becomes"]): mutant["reason"] for mutant in equivalents}


def summary(outcomes: Sequence[Mapping[str, Any]], equivalent: Mapping[tuple[str, str, str], str]) -> dict[str, Any]:
    """One module's counts, and the mutants that no test killed.

    Raises:
        NoResult: a test kills a mutant that is said to be equivalent.
    """
    survived, same = [], []
    for outcome in outcomes:
        change = {"was": outcome["was"], "becomes": outcome["becomes"]}
        reason = equivalent.get((outcome["module"], outcome["was"], outcome["becomes"]))
        if reason is not None and outcome["result"] != "survived":
            apart = f"{outcome['by']} tells it apart: {outcome['becomes']}"
            raise NoResult(f"{outcome['module']}: said to be equivalent, but {apart}")
        if reason is not None:
            same.append({**change, "reason": reason})
        elif outcome["result"] == "survived":
            survived.append(change)
    return {
        "asked": len(outcomes),
        "killed": sum(outcome["result"] in ("killed", "timeout") for outcome in outcomes),
        "timeouts": sum(outcome["result"] == "timeout" for outcome in outcomes),
        "equivalent": same,
        "survived": survived,
        "seconds": round(sum(outcome["seconds"] for outcome in outcomes)),
    }


def commit_of(name: str) -> str:
    """Raises: NoResult, if this repository has no such commit."""
    done = subprocess.run(
        ["git", "rev-parse", "--verify", "-q", f"{name}^{{commit}}"], cwd=REPO, text=True, stdout=subprocess.PIPE
    )
    if done.returncode:
        raise NoResult(f"--tests-from {name}: this repository has no such commit")
    return done.stdout.strip()


def write(runs: Mapping[str, Mapping[str, Any]]) -> None:
    publish("mutants", {
        "seed": SEED, "count": COUNT, "cosmic_ray": COSMIC_RAY, "left_out": LEFT_OUT, "slower": SLOWER,
        "tests": CHOSEN, **{label: runs[label] for label in LABELS if label in runs},
    })  # fmt: skip


def main() -> None:
    args = options(
        __doc__,
        modules=CHOSEN,
        tests_from=Option(None, "the files of this commit, as what was before"),
        folder=Option(FOLDER, "where outcomes are kept"),
        limit=LIMIT,
    )
    until = time.monotonic() + args.limit
    try:
        work(args, until)
    except NoResult as error:
        fix = "mend the tests that benchmarks/mutants.py chooses, or the list of equivalent mutants"
        print(f"error: {error}\n  fix: {fix}", file=sys.stderr)
        sys.exit(2)


def work(args: Any, until: float) -> None:
    label = "before" if args.tests_from else "after"
    source = commit_of(args.tests_from) if args.tests_from else None
    python = str(installed(args.folder / ".venv", COSMIC_RAY, [[f"cosmic-ray=={COSMIC_RAY}"]]))
    modules: dict[str, Any] = {}
    with a_copy(source) as copy:
        for module in args.modules:
            possible, mutants = sample(python, module, (copy / module).read_text())
            tests = [test for test in CHOSEN[module] if (copy / test.partition("::")[0]).exists()]
            outcomes = run_module(copy, module, tests, mutants, args.folder / f"{label}.jsonl", until)
            if len(outcomes) == len(mutants):
                same = hashlib.sha256(without_words(code((copy / module).read_text())).encode()).hexdigest()
                modules[module] = {"code": same, "possible": possible, **summary(outcomes, reasons())}
    done = args.folder / f"{label}.json"
    if set(modules) != set(CHOSEN):
        left = ", ".join(module for module in CHOSEN if module not in modules)
        print(f"not written, to go on with: {left}", flush=True)
        return
    done.write_text(json.dumps({"tests_commit": source, "modules": modules}))
    runs = {name: json.loads(path.read_text()) for name in LABELS if (path := args.folder / f"{name}.json").exists()}
    if len({tuple(counts["code"] for counts in run["modules"].values()) for run in runs.values()}) > 1:
        raise NoResult("before and after are of different code: run both again, with and without --tests-from")
    write(runs)


if __name__ == "__main__":
    main()
