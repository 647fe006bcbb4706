"""The helper that every multi-process test leans on: results in order, the first failure named, nothing left behind."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests import ranks
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.dist


def add_ranks(offset: int) -> tuple[int, int, str, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def fail_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the culprit")
    dist.barrier()


def crash_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def hang_on_rank_0(hangs: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(hangs).touch()
        threading.Event().wait()


def fork_a_straggler(pid_file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))


def test_results_come_in_rank_order_with_one_thread_each() -> None:
    assert run_ranks(3, "tests.test_ranks:add_ranks", offset=10) == [(rank, 33, "1", 1) for rank in range(3)]


def test_first_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:[\s\S]*fail_on_rank_1[\s\S]*the culprit") as caught:
        run_ranks(2, "tests.test_ranks:fail_on_rank_1")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_crashed_rank_is_blamed_rather_than_its_peers() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 died without a result, exit code 7"):
        run_ranks(2, "tests.test_ranks:crash_on_rank_1")


def test_a_hanging_rank_is_killed_and_its_stack_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over once it hangs and the other one has ended, however long they take to come so far."""
    hangs, wait = tmp_path / "hangs", ranks._wait

    def wait_until_it_hangs(processes: list[BaseProcess], deadline: float) -> None:
        processes[1].join()
        while not hangs.exists():
            time.sleep(0.01)
        wait(processes, time.monotonic() + 0.1)

    monkeypatch.setattr(ranks, "_wait", wait_until_it_hangs)
    with pytest.raises(RankError, match=r"ranks \[0\] of 2 did not end[\s\S]*hang_on_rank_0"):
        run_ranks(2, "tests.test_ranks:hang_on_rank_0", hangs=str(hangs))


def test_no_process_is_left(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    run_ranks(1, "tests.test_ranks:fork_a_straggler", pid_file=str(pid_file))
    assert _ends(int(pid_file.read_text()))


def _ends(pid: int) -> bool:
    """Whether the process is gone, or goes within a minute: a kill is asynchronous, and the machine may be busy."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle):
        return bool(select.select([handle], [], [], 60)[0])
