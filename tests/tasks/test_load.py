from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkit.config.schema import RunConfig
from shardkit.errors import ConfigError, DataError
from shardkit.tasks.load import load_task

GOOD = """
from shardkit.errors import DataError

class MyTask:
    def __init__(self, config, width=4):
        if width < 0:
            raise ZeroDivisionError("width is negative")
        if width == 0:
            raise DataError("no width", "give one")
        self.width = width
    def build_model(self): ...
    def dataset(self, split): ...
    def n_targets(self, batch): ...
    def loss(self, model, batch): ...

class NoLoss:
    def __init__(self, config): ...
    def build_model(self): ...
    def dataset(self, split): ...

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module and a package, whose names are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "user_good.py").write_text(GOOD)
    (tmp_path / "user_pkg").mkdir()
    (tmp_path / "user_pkg" / "tasks.py").write_text(GOOD)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("user_"):
            del sys.modules[name]


def load(factory: str, **args: Any) -> Any:
    return load_task(RunConfig.model_validate({"task": {"factory": factory, "args": args}}))


def refused(factory: str, **args: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(factory, **args)
    assert "\n" not in caught.value.cause + caught.value.fix
    assert factory in caught.value.cause
    return caught.value


def test_loads_from_a_module_or_a_package_here_with_args() -> None:
    assert load("user_good:MyTask").width == 4
    assert load("user_good:MyTask", width=9).width == 9
    assert load("user_pkg.tasks:MyTask", width=2).width == 2


@pytest.mark.parametrize(
    ("factory", "args", "cause", "fix"),
    [
        ("user_good:MyTsk", {}, "has no MyTsk", "did you mean MyTask"),
        ("user_good:Qqqqqq", {}, "has no Qqqqqq", "MyTask, NoLoss"),
        ("user_good:NUMBER", {}, "cannot be called", ""),
        ("user_good:NoLoss", {}, "without n_targets, loss", ""),
        ("user_good:MyTask", {"widht": 3}, "widht", "(config, width=4)"),
        ("user_good:MyTask", {"width": -1}, "user_good.py:7: ZeroDivisionError: width is negative", ""),
        ("user_absent:MyTask", {}, "no module user_absent", "PYTHONPATH"),
        ("user_pkg.absent:MyTask", {}, "no module user_pkg.absent", "PYTHONPATH"),
        ("user_good.absent:MyTask", {}, "no module user_good.absent", "PYTHONPATH"),
    ],
)
def test_what_is_no_task_is_named(factory: str, args: dict[str, Any], cause: str, fix: str, here: Path) -> None:
    error = refused(factory, **args)
    assert cause in error.cause and fix in error.fix
    assert fix != "PYTHONPATH" or str(here) in error.fix


def test_shardkit_errors_of_the_constructor_pass() -> None:
    with pytest.raises(DataError, match="no width"):
        load("user_good:MyTask", width=0)


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("x = 1\ny = x / 0\n", "user_bad.py:2: ZeroDivisionError"),
        ("import user_not_installed\n", "user_bad.py:1: ModuleNotFoundError: No module named 'user_not_installed'"),
        ("def f(:\n", "user_bad.py:1: SyntaxError"),
        ("import sys\n\nsys.exit(3)\n", "user_bad.py:3: SystemExit: 3"),
        ("from json import nothing\n", "user_bad.py:1: ImportError"),
    ],
)
def test_error_inside_the_module_names_its_line(here: Path, source: str, place: str) -> None:
    (here / "user_bad.py").write_text(source)
    error = refused("user_bad:MyTask")
    assert place in error.cause and error.__cause__ is not None
