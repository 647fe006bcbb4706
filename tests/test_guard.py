"""The guard finds each kind of thing that a test can leave behind, and takes it away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import guard
from tests.order import LONG

ENDED = threading.Event()
ORPHAN = """
import pathlib, subprocess, time
environ = pathlib.Path(f"/proc/{subprocess.Popen(['sleep', '60']).pid}/environ")
while not environ.read_bytes():  # in the middle of its start
    time.sleep(0.01)
"""


def variable() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def lost_variable() -> None:
    del os.environ["PATH"]


def handler() -> None:
    signal.signal(signal.SIGUSR2, lambda *_: None)


def mask() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def thread() -> None:
    threading.Thread(target=ENDED.wait, name="left behind", daemon=True).start()


def child() -> None:
    subprocess.Popen(["sleep", "60"])


def orphan() -> None:
    subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.DEVNULL, check=True)


def group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def autocast() -> None:
    import torch

    torch.set_autocast_enabled("cpu", True)


def folder() -> None:
    os.chdir("/")


def file() -> None:
    Path("left_behind").touch()


KINDS: dict[Callable[[], None], str] = {
    variable: "environment variables: LEFT_BEHIND", lost_variable: "environment variables: PATH",
    handler: "a handler of SIGUSR2", mask: "blocked signals: SIGUSR1", thread: "a thread: left behind",
    child: r"process \d+: sleep 60", orphan: r"process \d+: sleep 60", group: "an initialized process group",
    autocast: r"torch's modes .* instead of \(torch.float32, True, False\)",
    folder: "the working directory /$", file: "files in .*: left_behind$",
}  # fmt: skip


@pytest.mark.parametrize("leave", KINDS, ids=lambda leave: leave.__name__)
def test_what_a_test_leaves_is_named_and_taken_away(
    leave: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guard, "GRACE_S", 0.2)
    path = os.environ["PATH"]
    ENDED.clear()
    with pytest.raises(AssertionError, match=f"this test leaves behind {KINDS[leave]}"), guard.nothing_left():
        leave()
    ENDED.set()
    assert os.environ["PATH"] == path


def test_the_repository_is_watched_wherever_a_test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guard, "REPO", tmp_path / "repository")
    guard.REPO.mkdir()
    with pytest.raises(AssertionError, match=r"files in .*/repository: left_behind$"), guard.nothing_left():
        (guard.REPO / "left_behind").touch()


def test_what_ends_in_time_is_not_left() -> None:
    with guard.nothing_left():
        threading.Thread(target=time.sleep, args=(0.1,)).start()
        process = subprocess.Popen(["sleep", "0.1"])
    process.wait()


def test_files_that_are_started_early_are_there() -> None:
    assert [name for name in LONG if not (guard.REPO / name).exists()] == []
