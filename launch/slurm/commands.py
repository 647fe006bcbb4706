"""Run Slurm's commands; a refusal becomes an error in the user's terms."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

from ...errors import LaunchError


def require(program: str) -> None:
    """Check that one of Slurm's commands is installed.

    Raises:
        LaunchError: it is not installed.
    """
    if shutil.which(program) is None:
        raise LaunchError(
            f"Slurm is not installed on this machine: there is no {program}",
            "run this where jobs are submitted, or train here with `shardkit launch CONFIG --nproc-per-node N`",
        )


def call(program: str, *args: str) -> str:
    """Output of one of Slurm's commands.

    Raises:
        LaunchError: Slurm is not installed here, or the command refused (gives its reason).
    """
    require(program)
    done = subprocess.run([program, *args], capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip().removeprefix(f"{program}: error: ") for line in done.stderr.splitlines() if line.strip()]
        raise LaunchError(
            f"{program} refused: {'; '.join(lines) or f'exit code {done.returncode}'}", _advice(done.stderr)
        )
    return done.stdout


def ask(program: str, *args: str, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands inside a job, whose ranks continue whatever it says: never raises, never hangs.

    The return code is 124 if the controller does not answer, for example while it restarts. The command ignores
    SIGTERM, with which Slurm ends a requeued job: it may be the one that excludes a bad node.
    """
    argv = [program, *args]
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # a user may prefer relative times
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, env=environ, timeout=timeout_s,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 124, "", str(error))


def _advice(text: str) -> str:
    lower = text.lower()
    if "account" in lower or "qos" in lower:
        return "`sacctmgr show assoc user=$USER format=account,partition,qos` lists what you may use"
    if "partition" in lower:
        return "`sinfo -s` lists the partitions"
    if "time limit" in lower:
        return "`sinfo -o '%P %l'` shows the partitions' longest times"
    if any(word in lower for word in ("node configuration", "nodes", "gres", "processors", "memory")):
        return "`sinfo -o '%P %D %c %m %G'` shows what the partitions' nodes have"
    if "connect" in lower or "controller" in lower:
        return "`scontrol ping` shows whether the controller is up"
    return "correct the option and submit again"
