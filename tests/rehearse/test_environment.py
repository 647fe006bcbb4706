"""Which Python a command starts, what cannot be rehearsed, and the emulated GPUs, which are built once for a torch."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from shardkit.errors import BuildError, LaunchError
from shardkit.rehearse import build, environment
from shardkit.rehearse.environment import Torch
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


TORCH = Torch("/env/bin/python", Path("/env/lib"), "2.13.0+cu130", "13.0")


class Stub:
    """A build that only makes its folder; `started` has each."""

    started: list[Path]

    def __init__(self, torch: Torch, package: Path, objects: Path) -> None:
        self.package = package

    def run(self, computing: bool) -> None:
        type(self).started.append(self.package)
        self.package.mkdir(parents=True)
        (self.package / "sitecustomize.py").write_text("")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    monkeypatch.setattr(build, "Build", Stub)
    monkeypatch.setattr(Stub, "started", [], raising=False)
    return Stub


def test_each_torch_with_its_cuda_is_built_for_once_and_once_more_to_compute(stub: type[Stub], tmp_path: Path) -> None:
    folders = [build.built(TORCH, tmp_path, computing) for computing in (False, True, True, False)]
    for version, cuda in (("2.13.0+cu130", "13.1"), ("2.14.0+cu130", "13.0")):
        folders.append(build.built(Torch(TORCH.python, TORCH.site, version, cuda), tmp_path))
    assert len(set(folders)) == len(stub.started) == 4
    assert all((folder / "sitecustomize.py").exists() for folder in folders)


def test_a_build_that_was_killed_is_not_believed(
    stub: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = Stub.run

    def killed(self: Stub, computing: bool) -> None:
        complete(self, computing)
        (self.package / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(Stub, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        build.built(TORCH, tmp_path)
    monkeypatch.setattr(Stub, "run", complete)
    folder = build.built(TORCH, tmp_path)
    assert len(stub.started) == 2 and not (folder / "half").exists()
    assert [path.name for path in (tmp_path / "rehearse").iterdir() if path.is_dir()] == [folder.name]


def test_two_builds_at_once_are_one(stub: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete, second_waits = Stub.run, threading.Event()

    def slow(self: Stub, computing: bool) -> None:
        second_waits.wait(60)
        complete(self, computing)

    monkeypatch.setattr(Stub, "run", slow)
    asked = threading.Barrier(2, action=second_waits.set)
    folders: list[Path] = []

    def ask() -> None:
        asked.wait(60)
        folders.append(build.built(TORCH, tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2 and len(set(folders)) == len(stub.started) == 1


def test_what_is_missing_is_named(stub: type[Stub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot write") as refusal:
        build.built(TORCH, tmp_path / "file")
    assert "XDG_CACHE_HOME" in refusal.value.fix
    monkeypatch.undo()
    with pytest.raises(BuildError, match="does not use NVIDIA's wheels"):
        build.built(Torch(TORCH.python, tmp_path / "site", TORCH.version, TORCH.cuda), tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler was not found") as refusal:
        build.built(TORCH, tmp_path)
    assert "apt-get install g++" in refusal.value.fix


def test_headers_come_from_cuda_or_from_triton(tmp_path: Path) -> None:
    torch = Torch(TORCH.python, tmp_path, TORCH.version, TORCH.cuda)
    (tmp_path / "nvidia/cu13/include").mkdir(parents=True)
    with pytest.raises(BuildError, match="lacks a header"):
        build.include_folders(torch)
    triton = tmp_path / "triton/backends/nvidia/include"
    (triton / "crt").mkdir(parents=True)
    (triton / "crt/host_defines.h").write_text("")
    assert triton in build.include_folders(torch)
    (tmp_path / "nvidia/cu13/include/crt").mkdir()
    (tmp_path / "nvidia/cu13/include/crt/host_defines.h").write_text("")
    assert triton not in build.include_folders(torch)
