"""The library can be read: names that say something, one class name for one thing, paths that exist.

The limits on names are the present counts or less. Lower one when you have made it true; never raise one. There is no
limit on the length of functions and modules: it rewards splitting what a reader wants to see in one place.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from shardkit import _FORMER
from tests.ranks import REPO

PRONOUNS = frozenset(
    [
        "found", "one", "ones", "own", "said", "kept", "held", "whole", "wanted", "asked", "given", "told", "theirs",
        "ours", "mine", "place", "what", "where", "why", "more", "left", "first", "last", "other", "others", "it",
        "its", "that", "those", "this", "these", "such", "rest", "both", "each", "done", "had", "meant", "known",
        "there", "here",
    ]
)  # fmt: skip
"""Names that say nothing of the thing they stand for."""
VAGUE = frozenset(
    [
        "result", "results", "value", "values", "item", "items", "data", "obj", "res", "ret", "info", "stuff", "thing",
        "things",
    ]
)  # fmt: skip
"""Names that are hardly better, and the next that come to mind."""

MAX_PRONOUNS, MAX_VAGUE = 86, 580
TWO_THINGS = frozenset({"ShardkitCallback"})
"""Class names that stand for two things: the callbacks of two trainers, each named as its users expect."""


@lru_cache(maxsize=1)
def modules() -> dict[str, ast.Module]:
    """The syntax tree of each module: 2.5 s of CPU time, which other workers of the suite do not need."""
    return {
        str(path.relative_to(REPO)): ast.parse(path.read_text())
        for folder in ("shardkit", "launch")
        for path in sorted((REPO / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    }


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Each name that the module binds, as often as it does: variables, parameters, attributes, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def counted(words: frozenset[str]) -> Counter[str]:
    """How often each module binds one of the words; with underscores around it, it is the same word."""
    return Counter(
        path for path, tree in modules().items() for name in bound_names(tree) if name.strip("_").lower() in words
    )


@pytest.mark.parametrize(("words", "limit"), [(PRONOUNS, MAX_PRONOUNS), (VAGUE, MAX_VAGUE)], ids=["pronouns", "vague"])
def test_names_say_what_they_stand_for(words: frozenset[str], limit: int) -> None:
    counts = counted(words)
    assert counts.total() <= limit, f"{counts.total()} names of more than {limit}; most in {counts.most_common(5)}"


def test_a_class_name_means_one_thing() -> None:
    paths: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paths[node.name].append(path)
    twice = {name: found for name, found in paths.items() if len(found) > 1 and name not in TWO_THINGS}
    assert not twice, f"one name for two classes: {twice}"


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    return [REPO / name for name in listed.stdout.split("\0") if name]


DOTTED = re.compile(r"\bshardkit(?:\.[a-z_][a-z0-9_]*)+(?:\.[A-Za-z_]\w*)*")
PATH = re.compile(
    r"(?<![\w./-])(?:shardkit|launch|tests|benchmarks|configs|slurm|examples)/[\w./-]*\w\.(?:py|yaml|sbatch|sh|md|json)\b"
)


@lru_cache(None)
def text_of(path: Path) -> str:
    return path.read_text()


@lru_cache(None)
def exists(dotted: str) -> bool:
    """Whether a module, or a name that a module binds, has this dotted name."""
    if dotted in _FORMER:  # a module that moved, and still answers by its former name
        return True
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        path = REPO.joinpath(*parts[:end])
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if end > 1 and not path.is_dir() and not file.is_file():
            continue
        if end == len(parts):
            return True
        return file.is_file() and re.search(rf"\b{parts[end]}\b", text_of(file)) is not None
    return False


NO_PATHS = {
    "configs/NAME.yaml", "shardkit/strategies/NAME.py", "benchmarks/results/NAME.json",
    "benchmarks/results/gpu_PART.json", "examples/nlp_example.py", "examples/pytorch/basics/transformer.py",
    "launch/test_launcher.py", "slurm/test_interruptions.py", "slurm/test_submit.py", "shardkit.own",
    "shardkit.script", "shardkit.lock", "tests/test_half.py", "configs/a.yaml", "slurm/a.sbatch",
    "shardkit.memory.__file__", "shardkit.errors.NoSuchError", "shardkit.nowhere", "shardkit/oom_other.py",
    "shardkit.__file__", "shardkit.egg",
}  # fmt: skip
"""Text that looks like a path or a module: placeholders, files of other projects, names that tests make up."""


def test_paths_and_dotted_names_in_texts_exist() -> None:
    patterns = ("*.py", "*.md", "*.toml", "*.cfg", "*.json", "*.yaml", "*.sh", "*.sbatch", "Makefile", ".ci/run")
    # Recorded results name the files of their time.
    paths = [path for path in tracked(*patterns) if not path.is_symlink() and "results" not in path.parts]
    texts = {path: path.read_text() for path in paths}
    missing = {
        f"{path.relative_to(REPO)}: {name}"
        for path, text in texts.items()
        for name in {*filter(lambda name: not exists(name), DOTTED.findall(text))}
        | {*filter(lambda name: not (REPO / name).exists(), PATH.findall(text))}
        if name not in NO_PATHS and path.name not in ("CHANGELOG.md", "log.md")
    }
    assert not missing, f"they lead nowhere: {sorted(missing)}"
