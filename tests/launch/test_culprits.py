"""The rank that ended first is named, whatever ended it, or said to be unknown: drawn ranks, ways and moments.

    python -m tests.launch.test_culprits 0-300

plays the draws of these seeds.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from shardkit.launch.failures.failure import (
    TORCHRUN_LOG,
    Failure,
    exit_code_after,
    exit_code_of,
    explain,
    in_srun_log,
    in_torchrun_log,
    last_traceback,
    merged,
    of_launcher,
    read,
)
from shardkit.launch.local.launcher import Ended, _verdict, build_argv
from shardkit.launch.script import Script
from shardkit.launch.spec import JobSpec, Rendezvous
from tests.commands import environment, python_m
from tests.launch.jobs import settings
from tests.launch.test_failure import recorded
from tests.ranks import REPO

RANK = '''
import atexit, json, os, signal, socket, sys, threading, time
from pathlib import Path
folder, drawn = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = folder / "address"
if rank == 0:
    server = socket.create_server(("127.0.0.1", 0))
    (folder / "draft").write_text(str(server.getsockname()[1]))
    (folder / "draft").rename(address)
    peers = [server.accept()[0] for _ in range(size - 1)]
else:
    while not address.exists():
        time.sleep(0.02)
    peers = [socket.create_connection(("127.0.0.1", int(address.read_text())))]

def meet():
    """A collective: rank 0 hears of all ranks, then all hear of rank 0."""
    if rank:
        peers[0].sendall(b".")
    for peer in peers:
        try:
            lost = not peer.recv(1)
        except ConnectionError:
            lost = True
        if lost:
            time.sleep(drawn["reaction_s"])
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]")
    if not rank:
        for peer in peers:
            peer.sendall(b".")

def slowly():
    for peer in peers:
        peer.close()
    time.sleep(0.8)

def end(how):
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(30)
    elif how == "slow ValueError":
        atexit.register(slowly)
        raise ValueError("bad sample")
    elif how == "ExceptionGroup":
        raise ExceptionGroup("loaders", [ValueError("bad sample"), OSError("no disk")])
    elif how == "interrupt_main":
        import _thread
        threading.Thread(target=_thread.interrupt_main).start()
        time.sleep(30)
    elif how.startswith("_exit"):
        os._exit(int(how.split()[1]))
    elif how.startswith("exit"):
        sys.exit(int(how.split()[1]))
    raise ValueError("bad sample")

for step in range(6):
    if step == drawn["step"] and rank == drawn["culprit"]:
        time.sleep(drawn["late_s"])
        end(drawn["how"])
    if step == drawn["step"] and rank in drawn["sleepers"]:
        time.sleep(3)
    meet()
'''
CODES = {
    "ValueError": 1, "slow ValueError": 1, "ExceptionGroup": 1, "interrupt_main": 130, "exit 0": 1, "exit 3": 3,
    "_exit 0": 1, "_exit 7": 7, "SIGINT": 130, "SIGTERM": 143, "SIGKILL": 137, "SIGHUP": 129, "SIGUSR1": 138,
    "SIGSEGV": 139, "SIGABRT": 134, "SIGBUS": 135,
}  # fmt: skip
"""How a rank ends → the job's exit code."""
WITH_TRACEBACK = ("ValueError", "slow ValueError", "ExceptionGroup", "interrupt_main", "SIGINT")


@dataclass(frozen=True)
class Draw:
    """One end of a rank.

    Attributes:
        step: the collective before which it ends.
        late_s: seconds that its peers wait for it before.
        reaction_s: seconds that a peer takes to end once it has lost another one.
        sleepers: ranks that never notice.
    """

    seed: int
    how: str
    n_nodes: int
    ranks_per_node: int
    culprit: int
    step: int
    late_s: float
    reaction_s: float
    sleepers: tuple[int, ...]

    @property
    def program(self) -> str:
        names = ("how", "culprit", "step", "late_s", "reaction_s", "sleepers")
        return json.dumps({name: getattr(self, name) for name in names})


def draw(seed: int) -> Draw:
    """The draw of this seed."""
    chance = random.Random(seed)
    n_nodes = chance.choice((1, 1, 2))
    # One torchrun whose only rank exits with 0 has succeeded, and waits five minutes for the other one.
    ranks_per_node = chance.randint(2, 8) if n_nodes == 1 else chance.randint(2, 4)
    n_ranks = n_nodes * ranks_per_node
    culprit = chance.randrange(n_ranks)
    how = list(CODES)[seed % len(CODES)]
    peers = [rank for rank in range(1, n_ranks) if rank != culprit]
    # A job whose other ranks all sleep would not notice an exit with 0.
    sleepers = [rank for rank in peers if chance.random() < 0.3] if culprit != 0 or len(peers) > 1 else []
    sleepers = sleepers[: len(peers) - 1] if culprit == 0 else sleepers
    return Draw(
        seed, how, n_nodes, ranks_per_node, culprit, chance.randrange(1, 5), chance.choice((0.0, 0.0, 0.3, 1.5)),
        chance.choice((0.0, 0.0, 0.05, 0.3)), tuple(sleepers),
    )  # fmt: skip


UNKNOWN = ("the first error is on another node, or was not recorded", "which was the first is not known")


def judge(drawn: Draw, text: str, code: int, is_its_node: bool = True) -> str:
    """`named` or `not known`.

    Raises:
        AssertionError: another rank is named, or the exit code or the traceback is not the culprit's.
    """
    if not text:  # torchrun of a node whose ranks have all exited with 0
        assert CODES[drawn.how] == 1 and drawn.how.endswith("exit 0") and code == 0, f"{code}: {drawn}"
        return "not known"
    blamed = re.findall(r"^error: rank (\d+) failed", text, re.MULTILINE)
    if any(words in text for words in UNKNOWN):
        return "not known"
    assert blamed == [str(drawn.culprit)] if is_its_node or blamed else True, f"{blamed}: {drawn}\n{text}"
    if not blamed:
        return "not known"
    assert code == CODES[drawn.how], f"exit code {code}: {drawn}\n{text}"
    assert drawn.how not in WITH_TRACEBACK or "Traceback (most recent call last)" in text, f"{drawn}\n{text}"
    return "named"


def play(drawn: Draw, folder: Path) -> str:
    """Play a draw under torchrun, one for each node, as `shardkit launch` starts and judges it; see `judge`.

    torchrun runs in forks of this process, which spares it the import of torch.
    """
    import torch.distributed.run  # noqa: F401

    (folder / "rank.py").write_text(RANK)
    meeting = ""
    if drawn.n_nodes > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            meeting = f"127.0.0.1:{free.getsockname()[1]}"
    children = {}
    for node in range(drawn.n_nodes):
        logs = folder / f"node{node}"
        logs.mkdir()
        spec = JobSpec(
            config=None, run_dir=str(folder), nproc_per_node=drawn.ranks_per_node, nodes=(drawn.n_nodes, drawn.n_nodes),
            log_dir=str(logs), script=Script((str(folder / "rank.py"), str(folder), drawn.program)),
            rendezvous=Rendezvous(meeting, node) if meeting else Rendezvous(folder=str(folder)),
        )  # fmt: skip
        children[os.fork() or _torchrun(build_argv(spec)[3:], logs)] = logs
    verdicts = []
    for pid, logs in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        shown = io.StringIO()
        with contextlib.redirect_stderr(shown):
            code = _verdict(Ended(code, None, user_error=False), logs, folder, 0)
        is_its_node = logs.name == f"node{drawn.culprit // drawn.ranks_per_node}"
        verdicts.append((is_its_node, judge(drawn, shown.getvalue(), code, is_its_node)))
    return max(verdicts)[1]


def _torchrun(args: list[str], logs: Path) -> NoReturn:
    from torch.distributed.run import main

    log = os.open(logs / TORCHRUN_LOG, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        main(args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


ENTRY = """
[{rank}]:
  time      : 2026-01-01_10:00:0{second}
  host      : n1
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : …
"""


def torchrun_log(*ends: tuple[int, int, int], told: tuple[int, ...] = ()) -> str:
    """A log of torchrun with (rank, exit code, second) of its ranks, and the ranks that it told to end."""
    sent = "".join(f"W0101 1 api.py:1] Sending process 10{rank} closing signal SIGTERM\n" for rank in told)
    return sent + "".join(
        ENTRY.format(rank=rank, code=code, second=second, pid=100 + rank) for rank, code, second in ends
    )


@pytest.mark.parametrize("number", [2, 15])
def test_a_rank_that_a_signal_ended_is_named_and_not_one_that_torchrun_told_to_end(number: int) -> None:
    failures = merged([], in_torchrun_log(torchrun_log((0, -15, 0), (1, -number, 1), (2, -9, 2), told=(0, 2))))
    assert failures[0].rank == 1 and exit_code_of(failures) == 128 + number
    assert "2 other rank(s) ended because of it: 0, 2" in explain(failures, "L")


def test_of_ranks_that_the_same_signal_ended_none_is_said_to_be_the_first() -> None:
    shown = explain(merged([], in_torchrun_log(torchrun_log((0, -15, 0), (1, -15, 0), (2, -15, 0), told=(2,)))), "L")
    assert "which was the first is not known" in shown and "because of it: 2" in shown


def test_a_rank_that_exits_with_0_fails_the_job_and_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"none/attempt_0/{rank}").mkdir(parents=True)
        (tmp_path / f"none/attempt_0/{rank}/stderr.log").write_text("")
    lost = 'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: Connection closed by peer\n'
    (tmp_path / "none/attempt_0/0/stderr.log").write_text(lost)
    (tmp_path / "torchrun.log").write_text(torchrun_log((0, 1, 0), (2, -15, 1), told=(2,)))
    failures = of_launcher(tmp_path)
    assert failures[0].rank == 1 and exit_code_of(failures) == 1
    assert "rank 1 failed: it ended early, with exit code 0" in explain(failures, "L")


def test_a_rank_that_was_told_to_end_while_it_ended_of_its_own_exception_is_named(tmp_path: Path) -> None:
    raised = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{}: bad\n'
    texts = {0: raised.format("RuntimeError: Connection closed by peer"), 1: raised.format("ValueError"),
             2: raised.format("KeyError") + "tried again: step 7\n"}  # fmt: skip
    for rank, text in texts.items():
        (tmp_path / f"none/attempt_0/{rank}").mkdir(parents=True)
        (tmp_path / f"none/attempt_0/{rank}/stderr.log").write_text(text)
    (tmp_path / "torchrun.log").write_text(torchrun_log((0, 1, 0), (1, -15, 1), (2, -15, 1), told=(1, 2)))
    failures = of_launcher(tmp_path)
    assert (failures[0].rank, failures[0].message, exit_code_of(failures)) == (1, "ValueError: bad", 1)


def test_srun_reports_the_tasks_of_a_line_and_those_that_it_ended_itself() -> None:
    text = "srun: error: n1: tasks 1,3: Interrupt\nsrun: error: n1: tasks 0,2: Terminated\n"
    failures = in_srun_log(text)
    assert [(f.rank, f.exit_code, f.forced) for f in failures] == [
        (1, 130, False), (3, 130, False), (0, 143, True), (2, 143, True),
    ]  # fmt: skip


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 3, in <module>
  |     raise ExceptionGroup("loaders", [])
  | ExceptionGroup: loaders (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | RuntimeError: Connection closed by peer
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 2, in <module>
    | ValueError: bad sample
    +------------------------------------
[W1122 ProcessGroup.cpp] Warning: destroy_process_group() was not called
"""


def test_a_group_of_exceptions_is_read_with_the_members_that_are_causes() -> None:
    message, trace = last_traceback(GROUP)
    assert message == "ExceptionGroup: loaders (2 sub-exceptions): ValueError: bad sample"
    assert trace.startswith("  + Exception Group") and trace.endswith("-----") and "Warning" not in trace


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs exception groups")
def test_a_group_is_recorded_with_its_members_and_is_a_lost_peer_where_all_of_them_are(tmp_path: Path) -> None:
    group = vars(builtins)["ExceptionGroup"]
    lost, bad = RuntimeError("Connection closed by peer"), ValueError("bad sample")
    (mixed,) = read([recorded(tmp_path, 1, group("loaders", [lost, group("files", [bad])]))])
    assert mixed.message.endswith("ValueError: bad sample") and not mixed.lost_peer and "bad sample" in mixed.trace
    (only_lost,) = read([recorded(tmp_path, 2, group("loaders", [lost]))])
    assert only_lost.lost_peer


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(0), 1), (SystemExit(), 1), (SystemExit("no data"), 1), (SystemExit(7), 7),
        (KeyboardInterrupt(), 130), (ValueError(), 1),
    ],
)  # fmt: skip
def test_the_exit_code_after(error: BaseException, code: int) -> None:
    assert exit_code_after(error) == code


@pytest.mark.parametrize(("how", "code"), [("exit", 1), ("interrupt", 130)])
def test_a_rank_of_a_config_records_how_it_ended(how: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    done = python_m(
        "shardkit.train",
        *settings(tmp_path / "run", how, task__args__rank=0),
        env={"TORCHELASTIC_ERROR_FILE": str(path)},
    )
    assert done.returncode == code, done.stderr
    (failure,) = read([path])
    assert failure.exit_code == code and "tests/launch/tasks.py" in failure.trace
    assert json.loads(path.read_text())["message"]


def test_a_breakpoint_without_a_terminal_is_explained() -> None:
    assert "breakpoint() found no terminal" in explain([Failure(1, 1, message="bdb.BdbQuit")], "L")


def test_an_early_end_is_no_origin_beside_a_real_failure() -> None:
    failures = merged([], [Failure(0, 0, message="it ended early"), Failure(1, 7, message="exit code 7")])
    assert failures[0].rank == 1


@pytest.mark.slow
def test_drawn_endings_name_the_rank_or_say_that_it_is_not_known(tmp_path: Path) -> None:
    """A few seeds, one for each way to end; in a process that has few threads to fork."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.test_culprits", "0-16"], cwd=REPO,
        env=environment({"TMPDIR": os.fspath(tmp_path)}), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    first, last = map(int, sys.argv[1].split("-"))
    for seed in range(first, last):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            print(f"seed {seed}: {play(draw(seed), Path(folder))}: {draw(seed)}", flush=True)


if __name__ == "__main__":
    main()
