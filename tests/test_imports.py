"""Imports flow downward, and the light entry points stay light."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.ranks import REPO

PACKAGE = REPO / "shardkit"

# Bottom first. A module imports from its own package or from a lower layer; a package counts as one module here.
LAYERS: list[set[str]] = [
    {"errors"},
    {"files", "config"},
    {"launch", "memory", "data"},
    {"parallel"},
    {"activation", "hardware", "models", "oom"},
    {"strategies", "tasks"},
    {"checkpoint", "plan", "telemetry"},
    {"report", "foreign", "rehearse"},
    {"run", "prove"},
    {"train", "cli", "integrations"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def sources() -> dict[str, Path]:
    """Module name below shardkit (`launch.env`) → file; follows the links to launch/."""
    found: dict[str, Path] = {}
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder) / name
                found[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    return found


SOURCES = sources()


def statements(node: ast.AST, all_of_it: bool) -> Iterator[ast.AST]:
    """Every node below, or only what runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        never = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        if all_of_it or not (later or never):
            yield child
            yield from statements(child, all_of_it)


def imported(module: str, path: Path, all_of_it: bool = True) -> Iterator[str]:
    """Absolute names of what the file imports: wherever the statement stands, or only when it is imported itself."""
    parts = ["shardkit", *module.split(".")]
    for node in statements(ast.parse(path.read_text(), str(path)), all_of_it):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else []
            target = [*base, *(node.module.split(".") if node.module else [])]
            if node.module:
                yield ".".join(target)
            yield from (".".join([*target, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def shardkit_imports(module: str, all_of_it: bool = True) -> set[str]:
    """The modules of this package that `module` imports, as keys of SOURCES."""
    absolute = imported(module, SOURCES[module], all_of_it)
    names = {name.removeprefix("shardkit.") for name in absolute if name.startswith("shardkit.")}
    keys = {key for name in names for key in (name, f"{name}.__init__") if key in SOURCES}
    return keys - {module, "__init__"}


def test_imports_flow_downward() -> None:
    wrong = []
    for module in sorted(set(SOURCES) - {"__init__"}):
        own = module.split(".")[0]
        assert own in LEVEL, f"shardkit/{own} has no layer yet: add it to LAYERS"
        others = {name for name in shardkit_imports(module) if name.split(".")[0] not in (own, "__init__")}
        upward = {name for name in others if LEVEL.get(name.split(".")[0], len(LAYERS)) >= LEVEL[own]}
        if upward:
            wrong.append(f"shardkit.{module} imports {sorted(upward)} from its own layer or one above")
    assert not wrong, "\n".join(wrong)


def rooms() -> dict[str, set[str]]:
    """Top-level file or package of shardkit, launch among them, → the others that it imports."""
    found: dict[str, set[str]] = {}
    for module in SOURCES:
        own = module.split(".")[0]
        found.setdefault(own, set()).update(name.split(".")[0] for name in shardkit_imports(module))
        found[own].discard(own)
    return found


def test_the_map_stays_small_enough_to_know() -> None:
    found = rooms()
    files = {name for name in found if f"{name}.__init__" not in SOURCES}
    assert len(files) <= 6, f"shardkit/ has more than six files: {sorted(files)}"
    assert len(found) <= 25, f"more than 25 files and packages: {sorted(found)}"
    edges = sorted(f"{own} → {other}" for own, others in found.items() for other in others)
    assert len(edges) <= 119, f"{len(edges)} imports between them: {edges}"


def test_no_import_cycles() -> None:
    graph = {module: shardkit_imports(module, all_of_it=False) for module in SOURCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


def test_only_the_zero_strategy_imports_deepspeed() -> None:
    for module, path in SOURCES.items():
        names = [name for name in imported(module, path) if name.split(".")[0] == "deepspeed"]
        assert not names or module.startswith("strategies.zero.") or module == "prove.inject.shardkit_zero", module
        body = ast.parse(path.read_text()).body
        at_the_top = "\n".join(ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom))
        assert "import deepspeed" not in at_the_top, f"{module}: import it where it is used"


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport json, sys; print(json.dumps(sorted(n.split('.')[0] for n in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


LAUNCH = [f"shardkit.{m.removesuffix('.__init__')}" for m in SOURCES if m.startswith("launch.")]


@pytest.mark.parametrize(
    ("modules", "heavy"), [(["shardkit"], "typer"), (["shardkit.cli"], "rich"), (LAUNCH, "torch")], ids=str
)
def test_light_entry_points_import_no_torch(modules: list[str], heavy: str) -> None:
    loaded = loaded_after(f"import {', '.join(modules)}")
    assert "shardkit" in loaded and "shardkit.launch.ranks.env" in LAUNCH
    assert not loaded & {"torch", "deepspeed", "numpy", "pydantic", heavy}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("shardkit", "start"),
        ("shardkit", "load_config"),
        ("shardkit.config_io", "load_config"),
        ("shardkit.run.watching", "Watching"),
        ("shardkit.integrations.accelerate", "watch"),
        ("shardkit.integrations.deepspeed", "watch"),
        ("shardkit.plan.client", "plan"),
        ("shardkit.plan.target", "choose_target"),
        ("shardkit.memory", "MemoryLedger"),
        ("shardkit.memory", "TensorTracker"),
        ("shardkit.memory", "read_jsonl"),
        ("shardkit.activation", "checkpoint_activations"),
        ("shardkit.config.foreign.translate", "read_job"),
        ("shardkit.foreign.translate", "read_job"),
        ("shardkit.launch.batch", "main"),  # batch scripts that users copied call it
    ],
)
def test_names_that_the_docs_promise_stay_where_they_are(module: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(module), name))
