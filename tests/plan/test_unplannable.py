"""Whose code it is that reads a value: a user's line is refused, a library's is not, wherever it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from shardkit.errors import ConfigError
from shardkit.plan.simulate.unplannable import refuse_value


def frame_of(path: Path) -> FrameType:
    """A call that stands in line 2 of a file there."""
    found: dict[str, FrameType] = {}
    exec(compile("import sys\nframe = sys._getframe()", str(path), "exec"), found)
    return found["frame"]


def test_a_users_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs the value of a tensor at .*/mine.py:2"):
        refuse_value(frame_of(tmp_path / "mine.py"))


def test_a_package_in_a_folder_of_pythonpath_is_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("deepspeed")
    package.__file__ = str(tmp_path / "deepspeed" / "__init__.py")
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    refuse_value(frame_of(tmp_path / "deepspeed" / "runtime" / "engine.py"))


@pytest.mark.slow
def test_an_environment_behind_a_link_is_a_library(tmp_path: Path) -> None:
    link = tmp_path / "env"
    link.symlink_to(sys.prefix)
    code = (
        "import sys, sysconfig; from tests.plan.test_unplannable import frame_of; from pathlib import Path\n"
        "from shardkit.plan.simulate.unplannable import refuse_value\n"
        "assert Path(sys.prefix) == Path(sys.argv[1]), sys.prefix\n"
        "refuse_value(frame_of(Path(sysconfig.get_path('purelib')) / 'somebodys.py'))"
    )
    repo = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [str(link / "bin" / "python"), "-c", code, str(link)], cwd=repo, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
