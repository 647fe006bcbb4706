"""Jobs in which a drawn rank ends in a drawn way at a drawn moment: the launcher names it, or says it is unknown.

    python -m tests.launch.culprits 0-300

plays the draws of these seeds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardkit.launch.failures.failure import TORCHRUN_LOG
from shardkit.launch.local.launcher import Ended, _verdict, build_argv
from shardkit.launch.script import Script
from shardkit.launch.spec import JobSpec, Rendezvous

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


def main() -> None:
    first, last = map(int, sys.argv[1].split("-"))
    for seed in range(first, last):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            print(f"seed {seed}: {play(draw(seed), Path(folder))}: {draw(seed)}", flush=True)


if __name__ == "__main__":
    main()
