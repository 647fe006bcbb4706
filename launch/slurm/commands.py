"""Run Slurm's commands; a refusal becomes an error in the user's terms."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess

from ...errors import LaunchError

LAUNCH = "shardkit launch CONFIG --nproc-per-node N"
"""The command that trains without Slurm, where nothing names the user's own."""
_NO_ANSWER = re.compile(
    r"unable to contact slurm controller|could not establish a configuration source|failed to fetch config"
    r"|connection refused|communication connection failure|connect failure|socket timed out"
    r"|zero bytes were transmitted",
    re.IGNORECASE,
)
"""Messages of Slurm's commands on a machine from which no controller answers."""


def require(program: str, launch: str = LAUNCH) -> None:
    """Check that one of Slurm's commands is installed. `launch`: the command that trains here, for the error's fix."""
    if shutil.which(program) is None:
        raise LaunchError(
            f"Slurm is not installed on this machine: there is no {program}",
            f"run this where jobs are submitted, or train here with `{launch}`",
        )


def call(program: str, *args: str, launch: str = LAUNCH) -> str:
    """Output of one of Slurm's commands. `launch`: the command that trains here, for the error's fix."""
    require(program, launch)
    process = subprocess.run([program, *args], capture_output=True, text=True)
    if process.returncode:
        prefix = re.compile(rf"^{re.escape(program)}: (error|fatal): ")
        lines = [prefix.sub("", line.strip()) for line in process.stderr.splitlines() if line.strip()]
        if lines and _NO_ANSWER.search(process.stderr):
            raise LaunchError(
                f"no Slurm cluster answers this machine's {program}: {lines[-1]}",
                "run this where jobs are submitted (`scontrol ping` shows whether the controller is up), or train "
                f"here with `{launch}`",
            )
        raise LaunchError(
            f"{program} refused: {'; '.join(lines) or f'exit code {process.returncode}'}",
            _advice(program, process.stderr),
        )
    return process.stdout


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


def _advice(program: str, text: str) -> str:
    lower = text.lower()
    if "account" in lower or "qos" in lower:
        return "`sacctmgr show assoc user=$USER format=account,partition,qos` lists what you may use"
    if "partition" in lower:
        return "`sinfo -s` lists the partitions"
    if "time limit" in lower:
        return "`sinfo -o '%P %l'` shows the partitions' longest times"
    if any(word in lower for word in ("node configuration", "nodes", "gres", "processors", "memory")):
        return "`sinfo -o '%P %D %c %m %G'` shows what the partitions' nodes have"
    if "option" in lower or "usage" in lower or "invalid" in lower:
        return f"correct the option; `{program} --help` lists them"
    return f"Slurm's administrators can say more; `{program} --help` lists the options"
