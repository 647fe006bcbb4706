"""`shardkit launch`: run torchrun, show rank 0, keep every rank's log, and report failures in one place."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, LaunchError, printable_lines, system_errors
from ...files import read_regular
from .. import kubernetes
from ..failures import exit_codes, failure, job_starts
from ..ranks import affinity
from ..ranks.affinity import default_omp_threads
from ..ranks.env import integer
from ..spec import JobSpec, Rendezvous, check_world, split_endpoint
from . import processes, rendezvous
from .guard import Guard
from .processes import RankOutput
from .restart import ELASTIC, GRACE, grace_s, how_to_continue

if TYPE_CHECKING:
    from ...config.schema import RunConfig


_POLL_S = 0.05
_STOP_S = 7.0  # Ctrl-C: time for ranks to end by themselves before they are killed
_END_S = 25.0  # SIGTERM, SIGHUP: time for torchrun to end after its ranks had theirs
_NO_LIMIT_S = 7 * 24 * 3600
_NO_MEETING = re.compile(r"Rendezvous\w*Error|DistNetworkError|DistStoreError", re.IGNORECASE)
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Ended:
    """The end of torchrun."""

    code: int  # its exit code
    signum: int | None  # the signal that this process was sent, if any
    user_error: bool  # whether it was stopped early because a rank reported an error that no restart can fix
    unmet: bool = False  # whether it was stopped early because the nodes did not meet
    shown: bool = False  # whether the terminal has rank 0's last traceback
    attempt: Path | None = None  # the attempt whose ranks say why it was stopped early; None = the last one


def launch(spec: JobSpec, environ: Mapping[str, str] = os.environ, rendezvous_timeout_s: float = 600) -> int:
    """Run the job's ranks on this node; returns the exit code for the shell (docs/launch.md)."""
    environ = dict(environ)
    with ExitStack() as cleanup:
        spec = replace(spec, starts_by_file=sys.version_info < (3, 11) and spec.script is None)  # no PYTHONSAFEPATH
        spec, reserved = _with_meeting(spec, environ, rendezvous_timeout_s)
        if reserved is not None:
            cleanup.callback(reserved.close)
        build_argv(spec)  # refuses contradictory options before anything is written
        if not spec.log_dir:
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-node{spec.rendezvous.node_rank or 0}-{os.getpid()}"
            # In a batch job the logs of all nodes share a folder.
            path = Path(environ.get("SHARDKIT_LOG_ROOT") or Path(spec.run_dir).absolute() / "logs") / name
            option = "run.dir" if spec.script is None else "--run-dir"
            with system_errors(LaunchError, f"cannot make {path}", f"set {option} to a directory you can write"):
                path.mkdir(parents=True)
            spec = replace(spec, log_dir=str(path))
        in_use = job_starts.InUse(Path(spec.log_dir))
        cleanup.callback(in_use.close)
        is_bound = spec.bind_cpus and not environ.get(affinity.VARIABLE)
        cpus = affinity.shares(spec.nproc_per_node, spec.on_gpus, environ) if is_bound else []
        argv, added = build_argv(spec), added_environment(spec, environ, cpus)
        guard = None
        if spec.script is not None:
            guard = Guard(spec.script, spec.nproc_per_node, Path(spec.log_dir), environ)
            added |= guard.variables(environ)
        ranks = f"{spec.nproc_per_node} rank{'s' * (spec.nproc_per_node > 1)}"
        print(f"starting {ranks} on this machine, as this command does in a shell:", flush=True)
        print(f"$ {command_line(argv, added)}", flush=True)
        if cpus:
            print(affinity.describe(cpus), flush=True)
        if spec.rendezvous.endpoint is None:
            folder = cleanup.enter_context(rendezvous.private_folder())
            argv = build_argv(replace(spec, rendezvous=replace(spec.rendezvous, folder=folder)))
            added |= rendezvous.one_node_environment(folder, spec.on_gpus, environ)
        oom_before = exit_codes.oom_kill_count()
        endpoint = spec.rendezvous.endpoint if spec.nodes[1] > 1 else None
        patience = math.inf if endpoint is None else rendezvous_timeout_s
        log_dir, run_dir, shows_rank_0 = Path(spec.log_dir), Path(spec.run_dir), spec.rendezvous.node_rank in (None, 0)
        # In an elastic job torchrun itself tells the ranks, which end with a failure for it to see.
        save_s = 0.0 if spec.is_elastic else grace_s({**environ, **added})
        if not spec.is_elastic and _has_no_grace(spec, environ):
            save_s = math.inf
        ended = _run(argv, {**environ, **added}, log_dir, run_dir, shows_rank_0, patience, save_s, in_use, guard)
        # torchrun ended before any rank began, because nodes were missing.
        never_met = ended.signum is None and not failure.attempts(log_dir)
        if never_met and not ended.unmet:
            torchrun_log = _last_lines(log_dir / failure.TORCHRUN_LOG)
            never_met = ended.code != 0 and _NO_MEETING.search(torchrun_log) is not None
        if endpoint is not None and never_met:
            raise LaunchError(
                f"no rank started: the nodes did not meet at {endpoint}: {rendezvous.trouble(endpoint)}",
                "name a host that every node reaches and a free port on it (`ss -ltnp` lists those in use); start all "
                f"within {'' if spec.script else 'run.init_timeout_s='}{rendezvous_timeout_s:g} s; torchrun's log: "
                f"{spec.log_dir}",
            )
        return _verdict(ended, log_dir, run_dir, exit_codes.oom_kill_count() - oom_before, guard)


def added_environment(spec: JobSpec, environ: Mapping[str, str], cpus: Sequence[Sequence[int]] = ()) -> dict[str, str]:
    """Variables for the ranks that the user did not set."""
    threads = min([default_omp_threads(spec.nproc_per_node, environ), *map(len, cpus)])
    added = {} if environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(threads)}
    if spec.script is None and "PYTHONSAFEPATH" not in environ:
        added["PYTHONSAFEPATH"] = "1"  # `python -m` would import a torch.py of the current directory (Python >= 3.11)
    added |= {affinity.VARIABLE: ":".join(map(affinity.render, cpus))} if cpus else {}
    added |= {name: value for name, value in elastic_variables(spec).items() if name not in environ}
    if not environ.get("PYTHONUNBUFFERED"):
        added["PYTHONUNBUFFERED"] = "1"  # output goes to files, which Python would buffer
    added |= {GRACE: f"{spec.grace_s:g}"} if spec.grace_s is not None else {}
    if _has_no_grace(spec, environ) and not environ.get(_SHUTDOWN_TIMEOUT):
        added[_SHUTDOWN_TIMEOUT] = str(_NO_LIMIT_S)  # torchrun kills ranks 30 s after SIGTERM, whatever KillWait is
    keep = [path for path in (environ.get("SHARDKIT_KEEP"), spec.log_dir) if path]
    return {**added, "SHARDKIT_KEEP": os.pathsep.join(keep)}


def _has_no_grace(spec: JobSpec, environ: Mapping[str, str]) -> bool:
    """Whether a save has all the time until Slurm ends the step: nobody named a shorter one."""
    return "SLURM_STEP_ID" in environ and spec.script is None and spec.grace_s is None and not environ.get(GRACE)


def _with_meeting(
    spec: JobSpec, environ: Mapping[str, str], timeout_s: float
) -> tuple[JobSpec, rendezvous.ReservedPort | None]:
    """Fill in where nodes meet, for one launcher per pod of a Kubernetes job, or per node of an srun step."""
    if spec.nodes[1] == 1 or spec.rendezvous.endpoint is not None:
        return spec, None
    in_pod = kubernetes.meeting(environ, spec.rendezvous.run_id)
    if in_pod is not None:
        return replace(spec, rendezvous=replace(in_pod, conf=spec.rendezvous.conf)), None
    if "SLURM_STEP_ID" not in environ or "SLURM_NODEID" not in environ:
        return spec, None  # build_argv reports the missing endpoint
    node_rank = integer(environ, "SLURM_NODEID")
    parts = [environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "RESTART_COUNT", "STEP_ID")]
    run_id = "slurm-" + re.sub(r"[^0-9A-Za-z.-]", "_", ".".join(parts))
    path = Path(spec.run_dir) / rendezvous.FOLDER / f"{run_id}.torchrun"
    reserved = None
    if node_rank == 0:
        reserved = rendezvous.ReservedPort(path)
        endpoint = f"{rendezvous.reachable_name(environ)}:{reserved.port}"
        rendezvous.publish(path, endpoint)
    else:
        endpoint = rendezvous.wait_for(path, timeout_s)
    return replace(spec, rendezvous=Rendezvous(endpoint, node_rank, node_rank == 0, run_id)), reserved


def _run(
    argv: list[str],
    environ: Mapping[str, str],
    log_dir: Path,
    run_dir: Path,
    shows_rank_0: bool,
    patience_s: float,
    save_s: float,
    in_use: job_starts.InUse,
    guard: Guard | None = None,
) -> Ended:
    processes.adopt_orphans()
    out, err = sys.stdout.buffer, sys.stderr.buffer
    rank_0 = RankOutput(log_dir, out, err, patient=guard is not None) if shows_rank_0 else None
    # Slurm's warning goes to every process of a step and would end the agents; ranks catch it.
    warned = processes.handling([signal.SIGUSR2], signal.SIG_IGN) if guard is None else guard.listening()
    signals: list[int] = []  # those that came are recorded; this process does not die of them
    # Under nohup SIGHUP is ignored, and stays so.
    caught = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    recording = processes.handling(caught, lambda number, _: signals.append(number))
    with (log_dir / failure.TORCHRUN_LOG).open("wb") as log, recording, warned:
        with system_errors(LaunchError, f"cannot start {argv[0]}", "check the Python interpreter"):
            process = processes.start(argv, environ, log)
        try:
            restarts = Restarts(log_dir, run_dir)
            unmet, deadline = False, time.monotonic() + patience_s  # for the nodes to meet, and ranks to begin
            while not unmet and process.poll() is None and not signals and not failure.attempts(log_dir):
                unmet = time.monotonic() > deadline
                in_use.beat()
                time.sleep(_POLL_S)
            user_error = not unmet and _watch(process, rank_0, restarts, signals, in_use, guard)
            if signals and signals[0] != signal.SIGINT:
                if guard is not None:
                    guard.wind_down(process)
                else:
                    _let_ranks_save(process, signals[0], log_dir, save_s)
            if process.poll() is None:
                signum = signals[0] if signals else signal.SIGTERM
                in_a_hurry = signum == signal.SIGINT or user_error or unmet
                processes.stop(process, signum, _STOP_S if in_a_hurry else _END_S)
        finally:
            processes.sweep()
            process.wait()
    shown = rank_0 is not None and rank_0.finish(failed=process.returncode != 0 and not signals)
    attempt = restarts.final if user_error else None
    return Ended(process.returncode, signals[0] if signals else None, user_error, unmet, shown, attempt)


def _watch(
    process: subprocess.Popen[bytes],
    rank_0: RankOutput | None,
    restarts: Restarts,
    signals: list[int],
    in_use: job_starts.InUse,
    guard: Guard | None,
) -> bool:
    """Wait for the end, or a reason to end it; True if another start of the ranks would be in vain."""
    next_look = 0.0
    while process.poll() is None and not signals:
        in_use.beat()
        if rank_0 is not None:
            rank_0.pump()
        if time.monotonic() >= next_look:  # a restart would only repeat such an error
            next_look = time.monotonic() + 10 * _POLL_S
            if restarts.look():
                return True
        if guard is not None and guard.look(process):
            return True
        time.sleep(_POLL_S)
    restarts.look()
    return False


def _let_ranks_save(process: subprocess.Popen[bytes], signum: int, log_dir: Path, save_s: float) -> None:
    """Pass a signal on to the ranks, and wait up to `save_s` until they have saved and ended, and torchrun with them.

    torchrun itself kills its ranks 30 s after it has passed a signal on, however long their save takes. A torchrun that
    gets SIGTERM repeatedly, as from Slurm at a time limit, ends before its ranks: this process has adopted them then.
    """
    attempts, deadline = failure.attempts(log_dir), time.monotonic() + save_s
    ranks = processes.rank_processes(process.pid) if save_s > 0 else set()
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
    while ranks and time.monotonic() < deadline:
        has_ended = process.poll() is not None and ranks.isdisjoint(processes.descendants())
        if has_ended or len(failure.attempts(log_dir)) > len(attempts):  # torchrun restarts ranks that failed
            return
        time.sleep(_POLL_S)


def _verdict(ended: Ended, log_dir: Path, run_dir: Path, oom_kills: int, guard: Guard | None = None) -> int:
    if ended.signum == signal.SIGINT:
        print("interrupted: all ranks have ended", file=sys.stderr)
        return exit_codes.INTERRUPTED
    last_attempt = failure.attempts(log_dir)[-1:] if ended.attempt is None else [ended.attempt]
    recorded = [rank_failure for folder in last_attempt for rank_failure in failure.in_attempt(folder)]
    if guard is not None and guard.preempted:
        number = guard.ended_as_told(failure.of_launcher(log_dir, recorded))
        if ended.code == 0 or ended.user_error:  # the latter: torchrun was about to restart the ranks
            print("preempted: the script was told, and ended", file=sys.stderr, flush=True)
            return exit_codes.PREEMPTED
        if number is not None:
            print(f"preempted: {signal.Signals(number).name} ended the script", file=sys.stderr, flush=True)
            return 128 + number
    has_stopped = any(rank_failure.exit_code == exit_codes.PREEMPTED for rank_failure in recorded)
    if has_stopped and (ended.code == 0 or ended.signum):
        from ...config.load import load_config

        overwrites = False
        with suppress(ConfigError):  # the run's settings were deleted meanwhile
            overwrites = load_config(run_dir / "config.yaml").config.run.overwrite
        text = how_to_continue(sys.argv, overwrites)
        if all(rank_failure.rank != 0 for rank_failure in recorded):  # rank 0 itself says why it stopped, on its node
            text = f"{recorded[0].message}; {text}"
        print(printable_lines(text), flush=True)
        return exit_codes.PREEMPTED
    if ended.code == 0:
        return exit_codes.OK
    unsaved = any(rank_failure.exit_code == exit_codes.UNSAVED for rank_failure in recorded)
    if ended.signum is not None and not unsaved:
        print(f"stopped by {signal.Signals(ended.signum).name}: all ranks have ended", file=sys.stderr)
        return 128 + ended.signum
    failures = failure.of_launcher(log_dir, recorded)
    if failures:
        if ended.shown and failures[0].rank == 0:
            failures[0] = replace(failures[0], trace="")
        # When the folders of its ranks were created.
        began = max((folder.stat().st_mtime for folder in last_attempt if folder.exists()), default=0.0)
        memory = failure.memory_words(failures, failure.read_post_mortems(run_dir, began))
        print(failure.explain(failures, str(log_dir), oom_kills, memory), file=sys.stderr, flush=True)
        return failure.exit_code_of(failures)
    cause = f"error: torchrun ended with {exit_codes.describe(ended.code)}, no rank reported an error"
    text = f"{_last_lines(log_dir / failure.TORCHRUN_LOG)}\n{cause}\n  logs: {log_dir}"
    print(printable_lines(text), file=sys.stderr, flush=True)
    return exit_codes.shell_code(ended.code)


def _last_lines(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:])
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"


def build_argv(spec: JobSpec) -> list[str]:
    """The torchrun command of one node.

    Every rank's output goes to a file below `log_dir`. A single node uses a file as its store: torchrun's own store
    listens on every interface and unpickles data from anyone. Nodes with given numbers keep them (static rendezvous)
    unless workers may restart, which needs c10d.
    """
    if spec.nproc_per_node < 1:
        raise LaunchError(f"--nproc-per-node {spec.nproc_per_node}", "start at least one rank per node")
    if spec.max_restarts < 0:
        raise LaunchError(f"--max-restarts {spec.max_restarts} is negative", "pass 0 or more")
    argv = [spec.python, *spec.module("torch.distributed.run")]
    argv += ["--nnodes", _nnodes(spec), "--nproc-per-node", str(spec.nproc_per_node)]
    argv += ["--max-restarts", str(spec.max_restarts), *_rendezvous(spec)]
    if spec.log_dir:
        argv += ["--log-dir", spec.log_dir, "--redirects", "3"]
    return [*argv, *spec.program]


def command_line(argv: list[str], environ: Mapping[str, str]) -> str:
    """The shell command for the same process; `environ` holds the added variables."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in environ.items()]
    return " ".join([*settings, shlex.join(argv)])


def _nnodes(spec: JobSpec) -> str:
    low, high = spec.nodes
    return str(low) if low == high else f"{low}:{high}"


def _rendezvous(spec: JobSpec) -> list[str]:
    meet = spec.rendezvous
    if meet.endpoint is None:
        if spec.nodes != (1, 1):
            raise LaunchError(
                f"--nnodes {_nnodes(spec)} without --rdzv-endpoint: nodes cannot find each other",
                "pass --rdzv-endpoint HOST:PORT, the same on every node, or use slurm/train.sbatch",
            )
        file = ["--rdzv-endpoint", f"{meet.folder}/agent"] if meet.folder else []
        stored = ",".join(["store_type=file", *([meet.conf] if meet.conf else [])])
        return ["--rdzv-backend", "c10d", *file, "--rdzv-id", meet.run_id, "--rdzv-conf", stored]
    host, port = split_endpoint(meet.endpoint)
    if meet.node_rank is not None and spec.max_restarts == 0 and not spec.is_elastic:
        return [
            "--rdzv-id", meet.run_id, "--node-rank", str(meet.node_rank),
            "--master-addr", host, "--master-port", str(port),
        ]  # fmt: skip
    settings = [] if meet.is_host is None else [f"is_host={str(meet.is_host).lower()}"]
    settings += [meet.conf] if meet.conf else []
    conf = ["--rdzv-conf", ",".join(settings)] if settings else []
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", meet.endpoint, "--rdzv-id", meet.run_id, *conf]


def check_elastic(spec: JobSpec, config: RunConfig | None) -> None:
    """Refuse an elastic job that would go wrong when the number of nodes changes; a script has no config to look at."""
    if not spec.is_elastic:
        return
    nodes = f"--nnodes {spec.nodes[0]}:{spec.nodes[1]}"
    if spec.max_restarts < 1:
        raise LaunchError(
            f"{nodes} with --max-restarts {spec.max_restarts}: a lost node would end the job", "pass --max-restarts 3"
        )
    if config is None:
        return
    if config.run.overwrite:
        raise LaunchError(
            f"{nodes} with run.overwrite=true would delete the run whenever a node joins",
            "delete run.dir yourself, or set another one: an elastic job continues the run that is there",
        )
    if config.train.global_batch_size is None:
        most = spec.nodes[1] * spec.nproc_per_node
        batch = config.train.micro_batch_size * (config.train.grad_accum_steps or 1) * most
        raise ConfigError(
            f"{nodes}: the samples per step would change with the nodes, train.global_batch_size is not set",
            f"set train.global_batch_size={batch} ({most} ranks' share now), and leave train.grad_accum_steps unset",
        )
    for count in range(spec.nodes[0], spec.nodes[1] + 1):
        world_size = count * spec.nproc_per_node
        try:
            check_world(config, "cuda" if spec.on_gpus else "cpu", world_size, spec.nproc_per_node)
        except ConfigError as error:
            raise ConfigError(f"with {count} node(s) of {nodes}: {error.cause}", error.fix) from error


def check_ranks(spec: JobSpec, config: RunConfig | None) -> None:
    """Refuse a job of a fixed size that its ranks would refuse, before anything is written or started."""
    if spec.is_elastic or config is None:
        return
    device = "cpu" if config.run.device == "cpu" else "cuda"  # the ranks say that there is no GPU
    check_world(config, device, spec.nodes[1] * spec.nproc_per_node, spec.nproc_per_node)


def elastic_variables(spec: JobSpec) -> dict[str, str]:
    """Variables for torchrun and its ranks if nodes meet through c10d and workers may restart.

    By default torchrun shares its own store with the ranks. A node that joins later never learns its address, and keys
    of earlier rounds stay in it (https://github.com/pytorch/pytorch/issues/135712, open in torch 2.13): with this
    variable the first rank makes a new store in each round.
    """
    if spec.nodes[1] == 1 or spec.max_restarts == 0:
        return {}
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **({ELASTIC: "1"} if spec.is_elastic else {})}


class Restarts:
    """Follows a launcher's attempts and records why ranks were restarted."""

    def __init__(self, log_dir: Path, run_dir: Path) -> None:
        self._log_dir, self._run_dir = log_dir, run_dir
        self._n_noted = 1
        self.final: Path | None = None  # the attempt in which a rank reported an error that no restart can fix

    def look(self) -> bool:
        """Record new restarts; returns whether a rank reported an error that no restart can fix. torchrun may have
        restarted the ranks since the last look, before their error was seen."""
        attempts = failure.attempts(self._log_dir)
        for attempt in attempts[self._n_noted - 1 :]:
            errors = [end for end in failure.in_attempt(attempt) if end.exit_code in exit_codes.FINAL]
            if any(not end.lost_peer for end in errors):
                self.final = attempt
                return True
        while self._n_noted < len(attempts):
            self._note(attempts[self._n_noted - 1], self._n_noted)
            self._n_noted += 1
        return False

    def _note(self, attempt: Path, number: int) -> None:
        try:
            text = read_regular(self._log_dir / failure.TORCHRUN_LOG).decode(errors="replace")
        except OSError:
            text = ""
        blamed = failure.ended_in_torchrun_log(text)[number - 1 : number]
        origin = next(iter(failure.in_attempt(attempt)), None)
        silent = failure.silent_in(attempt)
        # A killed rank cannot record its error; one that recorded a lost peer was ended by torchrun.
        is_killed = any("killed by" in end and not failure.has_record(attempt, rank) for rank, end in blamed)
        if origin is None or (origin.lost_peer and is_killed):
            reason = next((f"local rank {rank}: {end}" for rank, end in blamed), "a rank ended without a word")
            job_starts.note_restart(self._run_dir, reason)
        elif origin.lost_peer and silent:  # torchrun blames the peer
            ranks = ", ".join(map(str, silent))
            job_starts.note_restart(self._run_dir, f"local rank {ranks}: ended without a word, most likely killed")
        else:
            message = origin.message.partition("\n")[0]
            job_starts.note_restart(self._run_dir, f"rank {origin.rank}: {message}", origin.lost_peer)
