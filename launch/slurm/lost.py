"""Processes that die without a report, on a node that Slurm never declares lost.

A node may come back before SlurmdTimeout, or only the daemon of the step and its tasks die there: then srun waits for
ever, or ends with the survivors' messages about a lost peer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from ..failures import exit_codes
from ..failures.failure import Failure
from . import commands, requeue

_ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): ", re.MULTILINE)
_NO_STEP = re.compile(
    r"missing step on node|Cannot communicate with node|io error with slurmstepd"
    r"|Timed out waiting for job step to complete"
)
_SLACK_S = 30.0  # beyond Slurm's KillWait, after which no task of an ended step is left
_DEFAULT_KILL_WAIT_S = 30
_LOOK_S = 2.0


class Bound:
    """Bounds how long srun may wait for tasks once the first of them has failed.

    Args:
        srun_log: returns what srun has written.
    """

    def __init__(self, srun_log: Callable[[], str]) -> None:
        self._srun_log = srun_log
        self._next_look = 0.0
        self._deadline: float | None = None

    def is_passed(self) -> bool:
        """Whether tasks that should have ended long ago are missing; call it often."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        if self._deadline is None and ended_tasks(self._srun_log()):
            kill_wait_s = requeue.kill_wait_s()
            self._deadline = now + _SLACK_S + (_DEFAULT_KILL_WAIT_S if kill_wait_s is None else kill_wait_s)
        return self._deadline is not None and now > self._deadline


def ended_tasks(srun_log: str) -> set[int]:
    """The tasks whose failed end srun reports."""
    ended: set[int] = set()
    for tasks in _ENDED.findall(srun_log):
        for part in tasks.split(","):
            low, _, high = part.partition("-")
            ended |= set(range(int(low), int(high or low) + 1))
    return ended


def reason(
    srun_log: str, was_bounded: bool, failures: Iterable[Failure], nodes: str, n_nodes: int, ranks_per_node: int,
    tasks_per_node: int,
) -> str | None:  # fmt: skip
    """Names the nodes and ranks whose processes died without a word; None if the job ended for another reason.

    Args:
        was_bounded: whether srun was ended because it waited for tasks in vain.
        failures: of the other ranks; each has to be a consequence of a lost peer.
        nodes: the job's nodes, in Slurm's list format.
    """
    if not was_bounded and not _NO_STEP.search(srun_log):
        return None
    if not all(failure.lost_peer or exit_codes.signal_of(failure.exit_code) for failure in failures):
        return None
    silent = set(range(n_nodes * tasks_per_node)) - ended_tasks(srun_log)
    if not silent:
        return None
    lost = sorted({task // tasks_per_node for task in silent})
    hosts = commands.ask("scontrol", "show", "hostnames", nodes).stdout.split()
    names = [hosts[node] if node < len(hosts) else f"node {node}" for node in lost]
    ranks = [
        str(rank)
        for node in lost
        for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node)
        if tasks_per_node == 1 or rank in silent
    ]
    return f"processes on {', '.join(names)} died without a word (rank {', '.join(ranks)})"
