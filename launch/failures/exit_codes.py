"""Exit codes: what they mean, and why a process ended with one."""

from __future__ import annotations

import signal
from pathlib import Path

from ...files import cgroup_folders, text_of

OK, FAILED, USER_ERROR, OUT_OF_MEMORY, UNSAVED, SUPERSEDED, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 5, 6, 75, 130
FINAL = (USER_ERROR, OUT_OF_MEMORY, UNSAVED, SUPERSEDED)
"""Codes after which a restart would end the same way."""

_CAUSES = {
    signal.SIGKILL: (
        "the kernel killed it because the host or its cgroup ran out of memory, or a user killed it",
        "look for 'oom' in dmesg, lower data.workers or offload less to the host, or ask for more memory",
    ),
    signal.SIGSEGV: (
        "a crash in native code: an extension built for another torch or CUDA, or a broken library",
        "run `shardkit doctor`, rebuild extensions (rm -r ~/.cache/torch_extensions), see the stack in the rank's log",
    ),
    signal.SIGABRT: (
        "native code gave up: a failed assertion, or NCCL's watchdog after a collective that timed out",
        "see the last lines of the rank's log; for a timeout look at the rank that did not arrive",
    ),
    signal.SIGBUS: (
        "no room for shared memory: /dev/shm is full",
        "set data.workers=0, or start the container with a larger --shm-size",
    ),
    signal.SIGILL: (
        "an instruction that this CPU does not have: an op compiled on another machine",
        "delete ~/.cache/torch_extensions: the op is then compiled here",
    ),
    signal.SIGTERM: (
        "it was asked to end: by the scheduler, a user, or torchrun after another rank failed",
        "look at the scheduler's log of the job and at the other ranks",
    ),
    signal.SIGPROF: (
        "an operation of the chat template took longer than a conversation may, while data.streaming read it",
        "correct the template, or set data.chat_template to a file with another one",
    ),
    signal.SIGINT: ("it was interrupted (Ctrl-C)", ""),
}


def signal_of(code: int) -> signal.Signals | None:
    """The signal that ended a process, from Python's code (−9) or a shell's (137 = 128 + 9); None if none did."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number) if number > 0 else None
    except ValueError:
        return None


def shell_code(code: int) -> int:
    """The code for exiting the same way: 128 + signal instead of a negative number."""
    return 128 - code if code < 0 else code


def describe(code: int) -> str:
    """`exit code 1`, or `killed by SIGKILL (exit code -9)`."""
    signum = signal_of(code)
    return f"exit code {code}" if signum is None else f"killed by {signum.name} (exit code {code})"


def likely_cause(code: int, oom_kills: int = 0) -> tuple[str, str]:
    """Cause and fix for an exit code, both empty where none is known; `oom_kills` are the kernel's during the job."""
    signum = signal_of(code)
    if signum is None:
        return "", ""
    cause, fix = _CAUSES.get(signum, ("", ""))
    if signum == signal.SIGKILL and oom_kills > 0:
        cause = f"out of host memory: the kernel killed {oom_kills} process(es) for it while the job ran"
    return cause, fix


def oom_kill_count(root: Path = Path("/")) -> int:
    """Number of the kernel's OOM kills in the nearest cgroup that counts them, else on this machine; 0 if unknown."""
    groups = (
        folder / ("memory.events" if v2 else "memory.oom_control") for folder, v2 in cgroup_folders("memory", root)
    )
    for path in (*groups, root / "proc/vmstat"):
        counts = [int(line.split()[1]) for line in text_of(path).splitlines() if line.startswith("oom_kill ")]
        if counts:
            return counts[0]
    return 0
