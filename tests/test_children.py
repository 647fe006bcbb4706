"""Commands in a folder that somebody else filled run none of its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.files import code_command, module_command, read_git
from shardkit.launch.batch import read_batch, step_argv
from shardkit.launch.local.launcher import build_argv
from shardkit.launch.slurm.commands import script_argv
from shardkit.launch.spec import JobSpec
from tests.commands import environment
from tests.data.chats import conversation, write_lines, write_tokenizer
from tests.ranks import REPO

PLANTED = ["typing", "shardkit", "torch", "sitecustomize", "usercustomize", "json", "numpy", "launch", "transformers",
           "accelerate"]  # fmt: skip
"""Modules that commands and their children import early."""
SHARDKIT = Path(sys.executable).with_name("shardkit")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules write their names into `ran` when they are imported."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    return folder


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def ran(folder: Path) -> str:
    file = folder.parent / "ran"
    return file.read_text() if file.exists() else ""


def test_a_child_imports_nothing_from_the_current_directory(hostile: Path) -> None:
    planted = run([sys.executable, "-c", "import typing, json"], hostile)
    assert planted.returncode == 0 and "json" in ran(hostile), "the planted files would be run"
    (hostile.parent / "ran").unlink()
    child = run([*code_command("import typing, json, sys; print(sys.argv[1:])"), "word"], hostile)
    assert (child.stdout, child.stderr) == ("['word']\n", "")
    assert run([*module_command("shardkit.cli"), "--version"], hostile).stdout.startswith("shardkit")
    assert not ran(hostile)


@pytest.mark.slow
def test_tokenising_workers_import_nothing_from_the_current_directory(hostile: Path) -> None:
    write_tokenizer(hostile / "tok")
    write_lines(hostile / "rows.jsonl", [{"messages": conversation(row)} for row in range(4)])
    done = run([str(SHARDKIT), "tokenize", "rows.jsonl", "out", "--tokenizer", "tok", "data.loss_on=all",
                "data.tokenize_workers=2"], hostile)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not ran(hostile)


@pytest.mark.slow
def test_ranks_that_start_by_a_file_import_nothing_from_the_current_directory(hostile: Path) -> None:
    """As `shardkit launch` starts them on Python 3.10, which knows no PYTHONSAFEPATH."""
    (hostile / "config.yaml").write_text("run: {dir: run, device: cpu}\ntask: {factory: 'no_such_module:Task'}\n")
    spec = JobSpec("config.yaml", "run", 1, python=sys.executable, starts_by_file=True)
    done = run(build_argv(spec), hostile)
    assert done.returncode == 1 and "no_such_module" in done.stderr, done.stderr
    assert not ran(hostile)


@pytest.mark.parametrize("template", ["train", "train_srun", "single_gpu_offload"])
def test_a_batch_script_imports_nothing_from_the_current_directory(template: str, hostile: Path) -> None:
    script = f"SHARDKIT_PYTHON={sys.executable}; . {REPO / 'slurm' / template}.sbatch"
    done = run(["bash", "-c", script, "sbatch", "config.yaml"], hostile)
    assert done.returncode == 2 and "this is not a Slurm job" in done.stderr, done.stderr
    assert not ran(hostile)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["torchrun", "srun"])
def test_a_slurm_step_imports_nothing_from_the_current_directory(style: str, hostile: Path) -> None:
    batch = read_batch([style, "-", f"run.dir={hostile / 'run'}"], {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"})
    argv = step_argv(batch, {})
    done = run([*argv[argv.index("shield") + 1 :], "task.factory=no_such_module:Task"], hostile)
    assert done.returncode == 2 and "no_such_module" in done.stderr, done.stderr
    check = run(script_argv("word", sys.executable, ["shardkit", "torch"], []), hostile)
    assert check.returncode == 0 and "versions" in check.stdout, check
    assert not ran(hostile)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan --from accelerate.yaml --gpu h100", "no file says which model it is"),
        ("launch config.yaml --nproc-per-node 1", "no_such_module"),
        ("plan - --gpus 2 parallel.strategy=fsdp", ""), ("doctor", ""), ("capability", ""), ("init copies", ""),
        ("report .", ""), ("checkpoint ls .", ""), ("convert . --to torch --out converted", ""), ("ladder --help", ""),
    ],
)  # fmt: skip
def test_no_command_imports_from_the_current_directory(hostile: Path, command: str, said: str) -> None:
    (hostile / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    (hostile / "config.yaml").write_text("run: {dir: run, device: cpu}\ntask: {factory: 'no_such_module:Task'}\n")
    done = run([str(SHARDKIT), *command.split()], hostile)
    assert said in done.stderr and (not said or done.returncode == 2), done.stderr
    assert not ran(hostile)


def test_the_users_own_task_is_found_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('this file was imported')\n")
    done = run([*module_command("shardkit.train"), "task.factory=mine:Task", f"run.dir={tmp_path / 'run'}"], tmp_path)
    assert done.returncode == 2 and "this file was imported" in done.stderr, done.stderr
    assert os.listdir(tmp_path) and not (tmp_path / "run" / "config.yaml").exists()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a commit, and beside it a program that leaves `ran`."""
    (tmp_path / "program").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\ncat\n")
    (tmp_path / "program").chmod(0o755)
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "file.txt").write_text("one\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", ["core.fsmonitor", "diff.external", "diff.own.textconv", "filter.own.clean"])
def test_git_runs_no_program_of_a_strangers_repository(name: str, repository: Path) -> None:
    (repository / ".gitattributes").write_text("*.txt diff=own filter=own\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    git(repository, "config", name, str(repository.parent / "program"))
    (repository / "file.txt").write_text("two\n")
    assert read_git("status", "--porcelain", cwd=repository) == "M file.txt"
    assert "+two" in (read_git("diff", "HEAD", "--binary", cwd=repository) or "")
    assert not (repository.parent / "ran").exists()
    git(repository, "--no-pager", "diff", "--ext-diff", "HEAD", "--output=/dev/null")
    git(repository, "status", "--porcelain")
    assert (repository.parent / "ran").exists(), "git itself would run the program"


def test_a_repository_whose_filter_cannot_be_switched_off_is_not_asked(repository: Path) -> None:
    (repository / ".gitattributes").write_text("*.txt filter=a=b\n")
    git(repository, "config", "filter.a=b.clean", str(repository.parent / "program"))
    (repository / "file.txt").write_text("two\n")
    assert read_git("diff", "HEAD", "--binary", cwd=repository) is None
    assert not (repository.parent / "ran").exists()
    git(repository, "diff", "HEAD")
    assert (repository.parent / "ran").exists(), "git itself would run the program"


def test_git_starts_nothing_in_a_submodule(repository: Path) -> None:
    """A submodule has settings of its own, and `.gitmodules` may ask git to look for changes in it."""
    outer = repository.parent / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "submodule", "add", "-q", str(repository), "sub")
    git(outer, "config", "-f", ".gitmodules", "submodule.sub.ignore", "none")
    git(outer, "add", ".")
    git(outer, "commit", "-qm", "first")
    git(outer, "config", "diff.submodule", "diff")
    git(outer / "sub", "config", "filter.own.clean", str(repository.parent / "program"))
    (outer / "sub" / ".gitattributes").write_text("*.txt filter=own\n")
    (outer / "sub" / "file.txt").write_text("two\n")
    for words in (["status", "--porcelain"], ["diff", "HEAD", "--binary"]):
        read_git(*words, cwd=outer)
        assert not (repository.parent / "ran").exists(), words
    git(outer, "status", "--porcelain")
    assert (repository.parent / "ran").exists(), "git itself would run the program"


def test_git_fetches_nothing_for_a_partial_clone(repository: Path) -> None:
    """For an object that is missing, git would start the program that fetches it."""
    blob = git(repository, "rev-parse", "HEAD:file.txt").strip()
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for name, text in (
        ("core.repositoryFormatVersion", "1"), ("extensions.partialClone", "origin"),
        ("remote.origin.promisor", "true"), ("remote.origin.url", str(repository)),
        ("remote.origin.uploadpack", str(repository.parent / "program")),
    ):  # fmt: skip
        git(repository, "config", name, text)
    (repository.parent / "program").write_text(f"#!/bin/sh\ntouch {repository.parent / 'ran'}\n")
    (repository / "file.txt").write_text("two\n")
    read_git("diff", "HEAD", "--binary", cwd=repository)
    assert not (repository.parent / "ran").exists()
    with pytest.raises(subprocess.CalledProcessError):
        git(repository, "diff", "HEAD")
    assert (repository.parent / "ran").exists(), "git itself would run the program"
