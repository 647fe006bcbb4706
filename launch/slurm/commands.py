"""Run Slurm's commands, and check a job's nodes by them; a refusal becomes an error in the user's terms."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

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


# Check a job's nodes before its ranks start: interpreter, packages, and whether all see the same run directory.

_PATIENCE_S = 60  # for the whole check; a controller that is busy must not end the job
_MARK = ".shardkit-nodes"
# Each task prints lines of HOST, KIND and DETAIL. Plain bash: the interpreter may be what is missing.
_SCRIPT = r"""
trap '' USR2
word=$1 python=$2 code=$3; shift 3
say() { printf '%s\x1f%s\x1f%s\n' "$SLURMD_NODENAME" "$1" "$(printf %s "$2" | tr '\n' ' ')"; }
for folder; do
  seen=
  for _ in $(seq 50); do
    if [ -e "$folder/MARK.$word" ]; then seen=1; break; fi
    ls "$folder" >/dev/null 2>&1; sleep 0.2 # listing refreshes the cache of a network file system
  done
  if [ -z "$seen" ]; then say unseen "$folder"; break; fi # one is enough, and each takes 10 s
  if ! (: >"$folder/MARK.$word.$SLURMD_NODENAME") 2>/dev/null; then say unwritable "$folder"; fi
  rm -f "$folder/MARK.$word.$SLURMD_NODENAME" 2>/dev/null
done
if [ -z "$python" ]; then say versions ""
elif ! command -v "$python" >/dev/null; then say interpreter "$python"
elif said=$("$python" -c "$code" 2>&1); then say versions "$said"
else say packages "$(printf %s "$said" | tail -n 1)"; fi
""".replace("MARK", _MARK)
# None of the packages is imported: torch takes seconds. The current directory is searched as by the batch script.
_VERSIONS = """
import sys
searched = "" in sys.path
sys.path[:] = filter(None, sys.path)
import importlib.util as find
if searched and find.find_spec("shardkit") is None:
    sys.path.append("")
from importlib import metadata
for name in NAMES:
    if find.find_spec(name) is None:
        sys.exit(f"no module {name}")
torch = ["torch " + metadata.version("torch")] if "torch" in NAMES else []
print("Python {}.{}".format(*sys.version_info), *torch)
"""


@dataclass(frozen=True)
class NodeReport:
    """A task's report about its node."""

    host: str
    kind: str  # `unseen`, `unwritable`, `interpreter`, `packages`, or `versions`, which is no fault
    detail: str  # the folder, the interpreter, what it lacks, or its versions


def check(
    options: Sequence[str],
    python: str | None,
    packages: Sequence[str],
    folders: Sequence[Path],
    environ: Mapping[str, str],
) -> str | None:
    """Run the check on every node of the job; returns a warning if the nodes could not be asked.

    `options`: srun and its options, which start one task on each node. `python`: the ranks' interpreter; None in a
    container, whose image is the same on every node. Raises OSError if this node cannot write to a folder.
    """
    word = secrets.token_hex(8)
    with ExitStack() as written:
        # A file for the other nodes to find. Another job may check the same folder at that moment: it has its own.
        for folder in folders:
            mark = folder / f"{_MARK}.{word}"
            mark.write_text(word)
            written.callback(mark.unlink, missing_ok=True)
        argv = [*options, *script_argv(word, python, packages, folders)]
        try:
            process = subprocess.run(argv, env=dict(environ), capture_output=True, text=True, timeout=_PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the nodes could not be checked: {error}"
    findings = parse(process.stdout)
    if not findings:
        return f"the nodes could not be checked: {' '.join(process.stderr.split())[-300:] or 'srun printed nothing'}"
    if problem := judge(findings, str(python)):
        raise problem
    return None


def script_argv(word: str, python: str | None, packages: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The command of one task."""
    code = _VERSIONS.replace("NAMES", repr(list(packages)))
    return ["bash", "-c", _SCRIPT, "nodes", word, python or "", code, *map(str, folders)]


def parse(text: str) -> list[NodeReport]:
    """The reports in the tasks' output."""
    lines = (line.split("\x1f") for line in text.splitlines())
    return [NodeReport(*words) for words in lines if len(words) == 3]


def judge(findings: Sequence[NodeReport], python: str) -> LaunchError | None:
    """Returns the error for nodes that differ or lack something; None if all are alike."""
    this_node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    leave_out = "leave the node out (--exclude)"
    share = f"set run.dir to a directory that all nodes share and may write to, or {leave_out}"
    install = "install the environment there or on a shared file system and set SHARDKIT_PYTHON, or --exclude the node"
    for kind, words, fix in (
        ("unseen", f" does not see what {this_node} wrote to ", share),
        ("unwritable", " cannot write to ", share),
        ("interpreter", " has no interpreter ", install),
        ("packages", f": {python}: ", f"install the same packages on every node, or {leave_out}"),
    ):
        if reports := [finding for finding in findings if finding.kind == kind]:
            hosts = ", ".join(dict.fromkeys(report.host for report in reports))
            return LaunchError(f"node {hosts}{words}{reports[0].detail}", fix)
    versions = {finding.detail: finding for finding in findings if finding.kind == "versions"}
    if len(versions) > 1:
        differences = "; ".join(f"{finding.host} has {detail}" for detail, finding in sorted(versions.items()))
        fix = f"install the same versions on every node, or {leave_out}"
        return LaunchError(f"the nodes differ: {differences}", fix)
    return None
