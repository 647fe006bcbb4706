"""Which Python a command starts, found by asking it; commands and builds of torch that cannot be rehearsed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from shardkit.errors import LaunchError
from shardkit.rehearse import environment
from tests.texts import write_program


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose path is known, as that of a virtual environment."""
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin" / "python3"
    link.symlink_to(sys.executable)
    return str(link)


def test_a_command_is_a_python_or_a_script_that_names_one(tmp_path: Path, python: str) -> None:
    environ = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    commands = [
        ["python3", "train.py"],
        [python, "-m", "torch.distributed.run", "-E"],
        [python, "-W", "error", "-c", "0"],
        [write_program(tmp_path / "torchrun", f"#!{python}\n"), "train.py"],
        [write_program(tmp_path / "accelerate", "#!/usr/bin/env -S python3 -u\n")],
        [write_program(tmp_path / "long", f"#!/bin/sh\n'''exec' '{python}' \"$0\" \"$@\"\n' '''\n")],
    ]
    for command in commands:
        (found,) = environment.interpreter(command, environ)
        assert os.path.samefile(found, python), command


@pytest.mark.parametrize("options", [["-I"], ["-uE"], ["-W", "ignore", "-E"], ["-Wignore", "-S"], ["-X", "dev", "-I"]])
def test_a_python_that_ignores_its_environment_is_refused(python: str, options: list[str], tmp_path: Path) -> None:
    tool = write_program(tmp_path / "tool", f"#!{python} {' '.join(options)}\n")
    for command in ([python, *options, "train.py"], [tool]):
        with pytest.raises(LaunchError, match="ignore its environment") as refusal:
            environment.interpreter(command, os.environ)
        assert "out for the rehearsal" in refusal.value.fix


def test_a_command_that_is_no_python_program_is_refused(tmp_path: Path) -> None:
    for command in (["/bin/ls"], [write_program(tmp_path / "run.sh", "#!/bin/bash\npython train.py\n")]):
        with pytest.raises(LaunchError, match="not a Python program") as refusal:
            environment.interpreter(command, os.environ)
        assert "name the Python program itself" in refusal.value.fix
    with pytest.raises(LaunchError, match="there is no program"):
        environment.interpreter(["no-such-program"], os.environ)
    with pytest.raises(LaunchError, match="-m is an option") as refusal:
        environment.interpreter(["-m", "my.training", "--lr", "1"], os.environ)
    assert refusal.value.fix.endswith("-- python -m my.training --lr 1")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(LaunchError) as refusal:
        environment.interpreter([str(tmp_path / "train.py")], os.environ)
    assert refusal.value.fix.endswith(f"-- python {tmp_path / 'train.py'}")


def test_an_interpreter_tells_of_its_torch_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = '13.0'\nhip = None\n")
    answers = environment.ask([sys.executable], {**os.environ, "PYTHONPATH": str(tmp_path)})
    torch = environment.check(answers)
    assert (torch.site, torch.version, torch.cuda, torch.cuda_major) == (tmp_path, "2.13.0+cu130", "13.0", "13")


def test_what_does_not_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="does not answer as Python does"):
        environment.ask([write_program(tmp_path / "python3", "#!/bin/sh\nexit 1\n")], os.environ)


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ({"folder": None, "version": None}, "has no torch"),
        ({"cuda": None, "version": "2.13.0+cpu"}, "is a CPU build"),
        ({"cuda": None, "hip": "6.4"}, "is a ROCm build"),
        ({"version": "2.4.1+cu124"}, "is older than 2.5"),
    ],
)
def test_a_torch_that_is_not_emulated_is_refused(answers: dict[str, str | None], cause: str) -> None:
    present = {"executable": "/env/bin/python", "folder": "/env/torch", "version": "2.13.0+cu130", "cuda": "13.0"}
    with pytest.raises(LaunchError, match=cause) as refusal:
        environment.check({**present, **answers})
    assert refusal.value.fix and refusal.value.exit_code == 2


def test_the_current_directory_answers_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("code", "json", "torch", "runpy"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('this is the user\\'s')\n")
    monkeypatch.chdir(tmp_path)
    assert environment.ask([sys.executable], os.environ)["version"] == torch.__version__
