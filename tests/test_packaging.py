"""What is built holds exactly the source files, and works from every place it can be imported from."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

from tests.ranks import REPO
from tests.texts import copy_checkout

LINKED = ("launch", "configs", "slurm")

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@dataclass(frozen=True)
class Built:
    tree: Path
    sdist: Path
    wheel: Path
    wheel_from_tree: Path


def expected_in_wheel(tree: Path) -> set[str]:
    """By the rules that a user would state: code, type marker, a page's parts, C++ sources, what the links lead to."""
    page, native = "shardkit/report/html/**/*", "shardkit/rehearse/native/**/*"
    code = ("shardkit/**/*.py", f"{page}.html", f"{page}.css", f"{native}.cpp", f"{native}.h", "shardkit/py.typed")
    linked = ("launch/**/*.py", "configs/*.yaml", "configs/*.json", "slurm/[!.]*")
    names, of_links = (
        {str(path.relative_to(tree)) for pattern in patterns for path in tree.glob(pattern) if path.is_file()}
        for patterns in (code, linked)
    )
    return names | {f"shardkit/{name}" for name in of_links}


def build(tree: Path, out: Path, *options: str) -> list[Path]:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    base = tmp_path_factory.mktemp("packaging")
    tree = copy_checkout(base / "tree")
    wheel, sdist = build(tree, base / "both")  # the wheel is built from the sdist
    for left in ("build", "shardkit.egg-info"):
        shutil.rmtree(tree / left, ignore_errors=True)
    return Built(tree, sdist, wheel, build(tree, base / "wheel", "--wheel")[0])


@pytest.fixture(scope="module")
def unpacked(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(target)
    return target


def run(code: str, path: Path, cwd: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_holds_exactly_the_sources(built: Built) -> None:
    expected = expected_in_wheel(built.tree)
    assert "shardkit/launch/ranks/env.py" in expected
    assert any(name.startswith("shardkit/configs/") for name in expected)
    for path in (built.wheel, built.wheel_from_tree):
        with zipfile.ZipFile(path) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
            links = [info.filename for info in archive.infolist() if stat.S_ISLNK(info.external_attr >> 16)]
        assert names == expected
        assert not links


def test_sdist_holds_real_files_and_all_that_building_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert expected_in_wheel(built.tree) <= names
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"} <= names
    assert {
        "CONTRIBUTING.md", "SECURITY.md", "docs/index.md", "docs/images/report.png", "examples/own_loop.py",
    } <= names  # fmt: skip
    assert not [name for name in names if name.startswith(("tests/", "runs/", "benchmarks/"))]


def test_metadata_states_python_dependencies_and_command(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        texts = {
            name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name
        }
    metadata = Parser().parsestr(texts["METADATA"])
    required = {re.split(r"[^\w.-]", entry)[0] for entry in metadata.get_all("Requires-Dist", [])}
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"torch", "deepspeed", "accelerate", "pydantic", "typer", "transformers", "pytest", "ruff"} <= required
    assert set(metadata.get_all("Provides-Extra", [])) == {
        *("dev", "docs", "hf", "finetune", "prometheus", "quantize", "report", "test", "torchao", "vision", "wandb")
    }
    assert "shardkit = shardkit.cli.__main__:main" in texts["entry_points.txt"]


def test_wheel_works_away_from_the_checkout(built: Built, unpacked: Path, tmp_path: Path) -> None:
    code = "import shardkit.launch.ranks.env as env; print(env.__file__); from shardkit.cli.__main__ import main; "
    assert run(code + "main(['init', 'here'])", unpacked, tmp_path).startswith(f"{unpacked}/shardkit/launch/")
    written = {
        f"shardkit/{path.relative_to(tmp_path / 'here')}" for path in (tmp_path / "here").rglob("*") if path.is_file()
    }
    templates = ("shardkit/configs/", "shardkit/slurm/")
    assert written == {name for name in expected_in_wheel(built.tree) if name.startswith(templates)}


def test_editable_install_works(built: Built, tmp_path: Path) -> None:
    code = f"from setuptools.build_meta import build_editable; print(build_editable({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=built.tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as archive:
        archive.extractall(site)
    # -S keeps out another editable install of this project; a site directory's .pth files are what pip leaves.
    code = f"import site; site.addsitedir({str(site)!r}); import shardkit.launch.ranks.env as env; print(env.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == built.tree / "shardkit/launch/ranks/env.py"


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name: str) -> None:
    assert os.readlink(REPO / "shardkit" / name) == f"../{name}"
