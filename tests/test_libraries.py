"""What other libraries keep private is used in four places, is there, and where it is gone costs a part and no run."""

from __future__ import annotations

import ast
import builtins
import configparser
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.config import libraries
from shardkit.config.libraries import NO_ISSUE, PLACES, TESTED, Feature, NameGone, Private

REPO = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "deepspeed", "transformers")
ALLOWED = tuple(
    ("shardkit/strategies/zero/" if place.endswith(".state") else place.replace(".", "/") + ".py") for place in PLACES
)
# `nn.Module.register_parameter` is replaced where models are built on meta; the package counts as one place.
# A rehearsal learns inside of the program when its backward begins.
ALLOWED += ("shardkit/parallel/weights.py", "shardkit/rehearse/inject/")


def features() -> list[Feature]:
    """The tables, once every module that adds to one is imported: the last place's are those of its whole package."""
    package = importlib.import_module(PLACES[-1].rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    found = {
        id(thing): thing
        for place in PLACES
        for thing in vars(importlib.import_module(place)).values()
        if isinstance(thing, Feature)
    }
    return list(found.values())


def names() -> list[Private]:
    return [name for feature in features() for name in feature.names]


def table() -> str:
    """The names as a table in Markdown: what is lost without each, and what would make it unnecessary."""
    rows = ["| Name | Lost without it | Upstream |", "|---|---|---|"]
    for name in sorted({*names()}, key=lambda name: (name.path, name.feature)):
        _, _, address = name.upstream.partition("https://github.com/")
        short = re.sub(r"/(issues|pull)/", "#", address)
        upstream = f"[{short}]({name.upstream})" if address else "none known"
        until = (
            f", not needed from {name.until}" if name.until else f", seen from {name.since} on" if name.since else ""
        )
        rows.append(f"| `{name.path}` | {name.feature} | {upstream}{until} |")
    return "\n".join(rows)


def is_private(dotted: str) -> bool:
    """Named tuples' `_fields` is public."""
    return any(re.match(r"_(?!_|fields$)", part) for part in dotted.split("."))


class Finder(ast.NodeVisitor):
    """Private names of libraries in one file, and assignments to what belongs to a library.

    An attribute with an underscore counts wherever it is read from, unless the file itself defines it or it is one of
    the standard library's.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self._libraries: set[str] = set()
        self._standard: set[str] = set()
        self._own = set(self._defined(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
        self.visit(tree)

    @staticmethod
    def _defined(tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    yield node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            module = alias.name if isinstance(node, ast.Import) else node.module or ""
            dotted = module if isinstance(node, ast.Import) else f"{module}.{alias.name}"
            local = alias.asname or (dotted.split(".")[0] if isinstance(node, ast.Import) else alias.name)
            if isinstance(node, ast.ImportFrom) and node.level:
                continue
            if module.split(".")[0] in LIBRARIES:
                self._libraries.add(local)
                if is_private(dotted):
                    self.found.append((node.lineno, dotted))
            elif module.split(".")[0] in sys.stdlib_module_names:
                self._standard.add(local)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        root = ast.unparse(node).split(".")[0]
        known = node.attr in self._own or root in self._standard or (root in ("self", "cls") and node.attr in self._own)
        if is_private(node.attr) and not known:
            self.found.append((node.lineno, ast.unparse(node)))
        if isinstance(node.ctx, ast.Store) and root in self._libraries and not self._is_setting(node):
            self.found.append((node.lineno, f"{ast.unparse(node)} = …"))
        self.generic_visit(node)

    @staticmethod
    def _is_setting(node: ast.Attribute) -> bool:
        return ast.unparse(node).startswith("torch.backends.")

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called.rpartition(".")[2] in ("patch", "object", "setattr", "getattr", "hasattr", "delattr") and node.args:
            owner, *rest = node.args
            words = [a.value for a in (owner, *rest) if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if any(is_private(word) for word in words if word not in self._own):
                self.found.append((node.lineno, ast.unparse(node)))
            changes = called in ("setattr", "delattr") or called.startswith("patch")
            belongs = ast.unparse(owner).split(".")[0] in self._libraries or any(
                w.split(".")[0] in LIBRARIES for w in words
            )
            if changes and belongs:
                self.found.append((node.lineno, ast.unparse(node)))
        self.generic_visit(node)


def sources() -> list[Path]:
    return sorted(path for folder in ("shardkit", "launch") for path in (REPO / folder).rglob("*.py"))


def test_private_names_and_patches_stand_in_four_places_only() -> None:
    offences = [
        f"{path.relative_to(REPO)}:{line}: {what}"
        for path in sources()
        if not str(path.relative_to(REPO)).startswith(ALLOWED)
        for line, what in Finder(ast.parse(path.read_text())).found
    ]
    assert not offences, "move it to one of the modules in shardkit.config.libraries.PLACES:\n" + "\n".join(offences)


def test_every_name_is_there() -> None:
    """Run on the oldest and the newest supported versions, too (test_versions.py)."""
    gone = [name for name in names() if name.needed() and not name.exists()]
    assert not gone, "\n".join(f"{name.description()}: {name.feature} is lost" for name in gone)


def test_the_table_names_what_is_used() -> None:
    """A name that a place imports or reads, but that its table lacks, would be missed by the test above."""
    told = {part for name in names() for part in name.path.split(".") if part.startswith("_")}
    for place in PLACES[:4]:
        path = REPO / (place.replace(".", "/") + ".py")
        own = Finder(ast.parse(path.read_text()))
        used = {part for _, what in own.found for part in re.findall(r"\b_[A-Za-z]\w*", what)}
        assert not used - told - {"_C", "_distributed_c10d"}, f"{place} uses {sorted(used - told)}"


def test_each_name_says_its_upstream_issue_or_that_there_is_none() -> None:
    for name in names():
        assert name.upstream == NO_ISSUE or re.fullmatch(r"https://github\.com/\S+/(issues|pull)/\d+", name.upstream)
        assert name.library in LIBRARIES and name.feature


def test_the_documentation_has_the_table() -> None:
    page = (REPO / "docs" / "adr" / "009-private-names.md").read_text()
    assert table() in page, "run python -m tests.test_libraries"


def test_the_oldest_tested_version_is_the_one_that_setup_cfg_allows() -> None:
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg")
    lines = parser["options"]["install_requires"] + parser["options.extras_require"]["hf"]
    for library, (oldest, newest) in TESTED.items():
        bound = re.search(rf"^{library}>=([\d.]+)", lines, re.MULTILINE)
        assert bound is not None, library
        assert oldest.startswith(bound[1]), library
        assert [int(n) for n in oldest.split(".")] < [int(n) for n in newest.split(".")]


def test_a_name_that_is_gone_stands_for_itself_until_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    feature = Feature("counting stars")
    gone = feature.take("torch.utils._sky.Star", NO_ISSUE)

    class Sun(gone):  # type: ignore[misc, valid-type]
        pass

    assert not isinstance(builtins.object(), gone)
    with pytest.raises(NameGone, match=r"torch \S+ has no torch.utils._sky.Star, which counting stars needs"):
        Sun(1)
    assert not feature.works()
    assert not feature.works()
    assert [m for m in caplog.messages if "counting stars is off: torch" in m] == caplog.messages[-1:]
    assert len(caplog.messages) == 1


GONE = {
    "tracker": "torch.distributed.tensor._sharding_prop:ShardingPropagator:_propagate_tensor_meta_non_cached",
    "planner": "torch.testing._internal.distributed.fake_pg::FakeStore",
}
# Python runs this file before anything else, in ranks and in the planner's process alike.
SITE = """
import importlib, os, sys
if sys.argv[:1] and os.environ.get("GONE"):
    module, owner, name = os.environ["GONE"].split(":")
    module = importlib.import_module(module)
    delattr(getattr(module, owner) if owner else module, name)
"""
TINY = [
    "model.preset=debug", "train.max_steps=3", "train.micro_batch_size=1", "train.seq_len=16", "run.device=cpu",
    "memory.trace_step=2", "memory.cap=4GiB", "memory.plan=true", "checkpoint.at_end=false",
]  # fmt: skip


def run_without(tmp_path: Path, gone: str, ranks: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}", "GONE": GONE[gone], "OMP_NUM_THREADS": "1"}
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *start, "-m", "tests.run.patient", *TINY, f"run.dir={tmp_path / 'run'}"]
    if ranks > 1:
        command.append("parallel.strategy=ddp")
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_without_what_tracing_needs(tmp_path: Path, ranks: int) -> None:
    done = run_without(tmp_path, "tracker", ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "_propagate_tensor_meta_non_cached" in line]
    version = libraries.installed("torch")
    for what in ("memory.trace_step is off", "memory.cap is off", "this run is not planned"):
        assert sum(what in line and f"torch {version} has no " in line for line in lines) == 1, (what, done.stderr)
    assert len(lines) == 3
    assert not (tmp_path / "run" / "trace").exists()
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.slow
@pytest.mark.dist
def test_training_goes_on_without_what_planning_needs(tmp_path: Path) -> None:
    done = run_without(tmp_path, "planner", 1)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "FakeStore" in line]
    assert len(lines) == 1 and "this run is not planned: torch" in lines[0], done.stderr
    assert (tmp_path / "run" / "trace" / "rank0.json").exists(), "tracing does not need it"


if __name__ == "__main__":
    page = REPO / "docs" / "adr" / "009-private-names.md"
    head = page.read_text().partition("| Name |")[0]
    page.write_text(head + table() + "\n")


@pytest.mark.slow
def test_what_libraries_say_to_each_other_is_not_shown() -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    code = "from shardkit.config import libraries; libraries.quiet(); import torch, torchao, torchao.quantization"
    clean = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=clean, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
