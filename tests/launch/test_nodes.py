"""What the check of a job's nodes says of each fault; the tasks' own script, run here as Slurm's tasks would."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardkit.errors import LaunchError
from shardkit.launch.slurm import commands
from tests.launch.jobs import REPO, environment
from tests.texts import write_program


def ask(
    tmp_path: Path, host: str = "n2", python: str = sys.executable, word: str = "right"
) -> list[commands.NodeReport]:
    """The findings of one task, where another node has written `word`."""
    folder = tmp_path / "run dir"
    folder.mkdir(exist_ok=True)
    (folder / ".shardkit-nodes.right").touch()
    argv = commands.script_argv(word, python, ["shardkit", "torch"], [folder])
    process = subprocess.run(argv, cwd=REPO, env=environment(SLURMD_NODENAME=host), capture_output=True, text=True)
    assert process.returncode == 0 and process.stderr == "", process
    assert os.listdir(folder) == [".shardkit-nodes.right"], "a task leaves nothing"
    return commands.parse(process.stdout)


def test_a_node_that_is_as_it_should_be_tells_its_versions(tmp_path: Path) -> None:
    (finding,) = ask(tmp_path)
    assert (finding.host, finding.kind) == ("n2", "versions") and finding.detail.startswith("Python 3.")
    assert " torch 2." in finding.detail and commands.judge([finding], "python") is None


def test_a_directory_that_is_another_one_there_is_named(tmp_path: Path) -> None:
    unseen, versions = ask(tmp_path, word="another node's")
    problem = commands.judge([unseen, versions], "python")
    assert problem is not None and problem.cause.startswith("node n2 does not see what ")
    assert problem.cause.endswith("run dir") and "run.dir" in problem.fix


def test_two_jobs_check_one_directory_at_once(tmp_path: Path) -> None:
    """Each took the other's mark for a file system that is not shared, and blamed its own node as well."""
    folder = tmp_path / "run"
    folder.mkdir()
    both = f'cd {tmp_path}; touch $0; until [ -e a ] && [ -e b ]; do sleep 0.02; done; cd {REPO}; exec "$@"'

    def check(name: str) -> str | None:
        srun = ["env", "SLURMD_NODENAME=n1", "bash", "-c", both, name]
        return commands.check(srun, sys.executable, ["shardkit"], [folder], environment())

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(check, "ab")] == [None, None]
    assert not os.listdir(folder)


def test_an_interpreter_that_is_missing_or_lacks_packages_is_named(tmp_path: Path) -> None:
    problem = commands.judge(ask(tmp_path, python="/nowhere/python"), "/nowhere/python")
    assert problem is not None and problem.cause == "node n2 has no interpreter /nowhere/python"
    bare = write_program(tmp_path / "bare", f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    problem = commands.judge(ask(tmp_path, python=bare), bare)
    assert problem is not None and problem.cause == f"node n2: {bare}: no module shardkit"


def test_nodes_with_other_versions_are_refused_by_name() -> None:
    findings = [
        commands.NodeReport("n1", "versions", "torch 2.13.0"),
        commands.NodeReport("n2", "versions", "torch 2.12.0"),
    ]
    problem = commands.judge(findings, "python")
    assert problem is not None and problem.cause == "the nodes differ: n2 has torch 2.12.0; n1 has torch 2.13.0"


def test_a_check_that_cannot_run_is_a_warning_and_ends_no_job(tmp_path: Path) -> None:
    assert "could not be checked" in (commands.check(["/nowhere/srun"], None, [], [tmp_path], {}) or "")
    assert "no such partition" in (commands.check(["bash", "-c", "echo no such partition >&2"], None, [], [], {}) or "")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LaunchError, match="node n9 has no interpreter"):
        commands.check(["env", "SLURMD_NODENAME=n9"], "/nowhere/python", [], [tmp_path], os.environ)
