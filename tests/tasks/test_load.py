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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, with modules and the search path as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
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


def test_loads_from_the_current_directory_with_args(here: Path) -> None:
    (here / "user_good.py").write_text(GOOD)
    assert load("user_good:MyTask").width == 4
    assert load("user_good:MyTask", width=9).width == 9


def test_loads_from_a_package(here: Path) -> None:
    (here / "user_pkg").mkdir()
    (here / "user_pkg" / "tasks.py").write_text(GOOD)
    assert load("user_pkg.tasks:MyTask", width=2).width == 2


@pytest.mark.parametrize("module", ["user_absent", "user_pkg.absent", "user_good.absent"])
def test_missing_module_is_named_with_where_to_put_it(here: Path, module: str) -> None:
    (here / "user_pkg").mkdir()
    (here / "user_good.py").write_text(GOOD)
    error = refused(f"{module}:MyTask")
    assert f"no module {module}" in error.cause
    assert "PYTHONPATH" in error.fix
    assert str(here) in error.fix


def test_missing_class_names_similar_ones(here: Path) -> None:
    (here / "user_good.py").write_text(GOOD)
    error = refused("user_good:MyTsk")
    assert "has no MyTsk" in error.cause
    assert "did you mean MyTask" in error.fix
    assert "MyTask, NoLoss" in refused("user_good:Qqqqqq").fix
    assert "cannot be called" in refused("user_good:NUMBER").cause


def test_missing_methods_are_named(here: Path) -> None:
    (here / "user_good.py").write_text(GOOD)
    assert "without n_targets, loss" in refused("user_good:NoLoss").cause


def test_wrong_args_show_the_signature(here: Path) -> None:
    (here / "user_good.py").write_text(GOOD)
    error = refused("user_good:MyTask", widht=3)
    assert "widht" in error.cause
    assert "(config, width=4)" in error.fix


def test_error_in_the_constructor_names_its_line(here: Path) -> None:
    (here / "user_good.py").write_text(GOOD)
    error = refused("user_good:MyTask", width=-1)
    assert "user_good.py:7: ZeroDivisionError: width is negative" in error.cause


def test_shardkit_errors_of_the_constructor_pass(here: Path) -> None:
    (here / "user_good.py").write_text(GOOD)
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
    assert place in error.cause
    assert error.__cause__ is not None
