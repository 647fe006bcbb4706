"""`shardkit rehearse` refuses, with a cause and a fix, what it cannot rehearse, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import python_m


@pytest.mark.parametrize(
    ("words", "cause", "fix"),
    [
        ([], "no command stands behind `--`", "-- torchrun --nproc-per-node 8 train.py"),
        (["--gpu", "h1000", "--", "python", "x.py"], "not in the table of GPUs", "did you mean h100"),
        (["--gpu-memory", "much", "--", "python", "x.py"], "is not an amount of memory", "80GB"),
        (["--", "/bin/ls"], "/bin/ls is not a Python program", "name the Python program itself"),
        (["--", "no-such-program"], "there is no program no-such-program", "its environment is active"),
        (["--", "python3", "-I", "x.py"], "lets Python ignore its environment", "leave -I out"),
        (["--ranks", "8", "--", "torchrun", "x.py"], "torchrun starts ranks by itself", "that each rank runs"),
        (["--ranks", "8", "--live", "8", "--", "x.py"], "of 8 ranks, 0 to 7", "--live 0"),
        (["--live", "0", "--", "python", "x.py"], "--live names ranks of --ranks", "--ranks 128 --live 0,64"),
        (
            ["--compute", "--ranks", "8", "--steps", "2", "--", "x.py"],
            "--ranks and --steps: with --compute",
            "leave out",
        ),
        (["--poison", "--", "python", "x.py"], "show in what is computed", "give --compute"),
        (["--until", "friday", "--", "python", "x.py"], "--until friday is no event", "--until save"),
    ],
)
def test_a_wrong_command_takes_two_lines(words: list[str], cause: str, fix: str) -> None:
    done = python_m("shardkit.cli", "rehearse", *words)
    assert done.returncode == 2 and not done.stdout
    error, advice = done.stderr.splitlines()
    assert error.startswith("error: ") and cause in error
    assert advice.startswith("  fix: ") and fix in advice


def test_a_cpu_build_of_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n")
    done = python_m("shardkit.cli", "rehearse", "--", "python3", "x.py", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "torch 2.13.0+cpu" in done.stderr and "is a CPU build" in done.stderr
    assert "fix: pip install torch==2.13.0" in done.stderr
