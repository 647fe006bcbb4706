"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME [OPTION …]` runs one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .common import REPO

# The benchmarks that `all` runs, in this order, with their options. A name is a module or package of benchmarks/.
ON_CPU: dict[str, list[str]] = {
    "overhead": [],
    "peers": [],
    "sft": [],
    "checkpoint": [],
    "folder": [],
    "plan": [],
    "plan_accuracy": [],
    "auto": [],
    "long": [],
    "speed": [],
    "context": [],
    "context_peers": [],
    "wide": [],
    "wide_peers": [],
    "wide_plans": [],
}
ON_GPU = ("gpu", "longest", "card_axes")
PAGE = "report"


def summary(name: str) -> str:
    """The first line of the benchmark's docstring, read without importing it."""
    module = Path(__file__).parent / f"{name}.py"
    source = module if module.exists() else module.with_suffix("") / "__init__.py"
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return text.partition("\n")[0]


def listing() -> str:
    width = max(map(len, [*ON_CPU, *ON_GPU, "all"]))
    rows = [f"  {name:{width}}  {summary(name)}" for name in ON_CPU]
    rows += [f"  {'all':{width}}  All of these, one after the other, and the page; takes hours."]
    rows += [f"  {PAGE:{width}}  {summary(PAGE)}", "", "with a GPU (longest, card_axes: emulated ones):"]
    rows += [f"  {name:{width}}  {summary(name)}" for name in ON_GPU]
    return "\n".join(["usage: python -m benchmarks NAME [OPTION …]   (--help after a name: its options)", "", *rows])


def command(name: str, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", *options]


def run_all() -> list[str]:
    """Run everything that needs no GPU and render the page; returns the names that failed."""
    failed = []
    for name, options in {**ON_CPU, PAGE: []}.items():
        print(f"== {name}", flush=True)
        if subprocess.run(command(name, options), cwd=REPO).returncode:
            failed.append(name)
    return failed


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *options = argv
    if name == "all" and not options:
        failed = run_all()
        if failed:
            print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
        return 1 if failed else 0
    if name not in (*ON_CPU, *ON_GPU, PAGE):
        problem = "all takes no options" if name == "all" else f"there is no benchmark {name}"
        print(f"error: {problem}\n  fix: python -m benchmarks lists what there is", file=sys.stderr)
        return 2
    os.chdir(REPO)
    return os.execv(sys.executable, command(name, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
