"""What a process's exit code says about why it ended."""

from __future__ import annotations

import signal
from pathlib import Path

OK, FAILED, USER_ERROR, OUT_OF_MEMORY, UNSAVED, SUPERSEDED, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 5, 6, 75, 130
FINAL = (USER_ERROR, OUT_OF_MEMORY, UNSAVED, SUPERSEDED)
"""Started again, the ranks would end the same way."""

_CAUSES = {
    signal.SIGKILL: (
        "the kernel killed it because the host or its cgroup ran out of memory, or somebody did",
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
        "shared memory that could not be backed: /dev/shm is full",
        "set data.workers=0, or start the container with a larger --shm-size",
    ),
    signal.SIGILL: (
        "an instruction that this CPU does not have: an op compiled on another machine",
        "delete ~/.cache/torch_extensions, so that it is compiled here",
    ),
    signal.SIGTERM: (
        "somebody asked it to end: the scheduler, a user, or torchrun after another rank failed",
        "look at the scheduler's log of the job and at the other ranks",
    ),
    signal.SIGINT: ("it was interrupted (Ctrl-C)", ""),
}


def signal_of(code: int) -> signal.Signals | None:
    """The signal that ended a process: −9 as Python reports it, 137 = 128 + 9 as shells do."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number) if number > 0 else None
    except ValueError:
        return None


def shell_code(code: int) -> int:
    """The code to exit with oneself: 128 + signal instead of a negative number."""
    return 128 - code if code < 0 else code


def describe(code: int) -> str:
    """`exit code 1`, or `killed by SIGKILL (exit code -9)`."""
    found = signal_of(code)
    return f"exit code {code}" if found is None else f"killed by {found.name} (exit code {code})"


def likely_cause(code: int, oom_kills: int = 0) -> tuple[str, str]:
    """(cause, fix) in words; empty for codes that say nothing. `oom_kills`: what the kernel counted during the job."""
    found = signal_of(code)
    if found is None:
        return "", ""
    cause, fix = _CAUSES.get(found, ("", ""))
    if found == signal.SIGKILL and oom_kills > 0:
        cause = f"out of host memory: the kernel killed {oom_kills} process(es) for it while the job ran"
    return cause, fix


def oom_kill_count(root: Path = Path("/")) -> int:
    """Processes that the kernel killed for want of memory: in this cgroup, else on this machine; 0: unknown."""
    for path in (*_cgroup_records(root), root / "proc/vmstat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        found = [int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")]
        if found:
            return found[0]
    return 0


def _cgroup_records(root: Path) -> list[Path]:
    """Where the kernel may count them for the cgroup, version 2 and 1; a container sees its own as the topmost."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    top, found = root / "sys/fs/cgroup", list[Path]()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [top / path.lstrip("/") / "memory.events", top / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [top / "memory" / path.lstrip("/") / "memory.oom_control", top / "memory/memory.oom_control"]
    return found
