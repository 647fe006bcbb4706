"""The emulated GPUs are built once for a torch, whoever asks, and a build that was killed is not believed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shardkit.errors import BuildError
from shardkit.rehearse import build
from shardkit.rehearse.environment import Torch

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
