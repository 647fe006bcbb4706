"""Run a batch job: one srun step, warned in time to save, and requeued after a preemption.

    python -m shardkit.launch.batch torchrun|srun CONFIG [section.key=value ...]

`torchrun` starts `shardkit launch` once per node, `srun` one task per rank. CONFIG `-` means defaults. In the place of
CONFIG, `--script RUN_DIR/submit/N/script.json` is a script that `shardkit submit` described.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..errors import LaunchError, ShardkitError, report, system_errors
from ..files import module_command, write_whole
from . import spec
from .failures import exit_codes, failure, job_starts
from .local.processes import Follower
from .local.restart import has_run, refuse_without_run
from .ranks.affinity import default_omp_threads
from .ranks.env import integer
from .script import PREEMPT_FILE, Script, from_json, newest_change
from .slurm import commands, preemption_warning, requeue, submit
from .slurm.preemption_warning import PreemptionWarning, say
from .slurm.submit import output_pattern

_POLL_S = 0.1
# Slurm's warning goes to every process of a step: until a process listens, it must be ignored, or it kills.
_SHIELD = ["bash", "-c", "trap '' USR2; exec \"$@\"", "shield"]


@dataclass(frozen=True)
class Batch:
    """One start of a batch job."""

    style: str
    job_id: str
    restart: int  # how often Slurm has requeued this job
    config: str | None  # CONFIG, with its overrides; None = defaults
    overrides: tuple[str, ...]
    run_dir: Path
    n_nodes: int
    n_ranks_per_node: int  # ranks on each node
    snapshot: str = ""  # the resolved config, as YAML
    is_periodic: bool = False  # whether the run makes periodic checkpoints
    script: Script | None = None  # the program that runs instead of a config

    def pin(self) -> Batch:
        """Keep the config with the run: every later start of the job uses the config of the first."""
        if self.script is not None:  # described by a file of its own submission
            return self
        path = _pinned(self.run_dir, self.job_id)
        if self.restart == 0 or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, self.snapshot)
        return replace(self, config=str(path), overrides=())  # restarts of ranks within this start read it too

    @property
    def log_dir(self) -> Path:
        """This start's folder below RUN_DIR/logs, absolute."""
        return self.run_dir.absolute() / "logs" / f"slurm-{self.job_id}.{self.restart}"

    @property
    def error_dir(self) -> Path:
        return self.log_dir / "errors"

    def progress(self) -> int:
        """How far the job is: the run's optimizer step; for a script the time of its newest checkpoint, in ns."""
        return job_starts.last_step(self.run_dir) if self.script is None else newest_change(self.script.checkpoints)

    def newest_checkpoint(self) -> tuple[int, int] | None:
        """Step and time of the newest checkpoint, which tell it from any other; None if there is none."""
        if self.script is None:
            return job_starts.newest_checkpoint(self.run_dir)
        return (0, stamp) if (stamp := self.progress()) else None

    def note_end(self, reason: str) -> None:
        """Record why this start ended."""
        job_starts.note_end(self.run_dir, self.job_id, self.restart, reason, self.progress())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the batch script's exit code (docs/launch.md)."""
    warning = PreemptionWarning()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(read_batch(args, os.environ), os.environ, warning)
    except ShardkitError as error:
        return report(error)


def read_batch(args: Sequence[str], environ: Mapping[str, str]) -> Batch:
    """The job from its command line and Slurm's variables."""
    if len(args) < 2 or args[0] not in ("torchrun", "srun"):
        raise LaunchError("no config was given", "sbatch slurm/train.sbatch CONFIG [section.key=value ...]")
    if "SLURM_JOB_ID" not in environ:
        raise LaunchError("this is not a Slurm job: SLURM_JOB_ID is not set", "sbatch slurm/train.sbatch CONFIG")
    if "SLURM_GPUS_PER_TASK" in environ and "SLURM_GPUS_PER_NODE" in environ:  # its tasks would not see their node's
        raise LaunchError(
            f"--gpus-per-task={environ['SLURM_GPUS_PER_TASK']} beside the template's --gpus-per-node="
            f"{environ['SLURM_GPUS_PER_NODE']}: each rank takes the GPU of its number on the node",
            "sbatch --gpus-per-node N without --gpus-per-task",
        )
    restart = integer(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0
    job_id, task, style = environ["SLURM_JOB_ID"], environ.get("SLURM_ARRAY_TASK_ID"), args[0]
    n_nodes, n_ranks = integer(environ, "SLURM_JOB_NUM_NODES"), _ranks_per_node(style, environ)
    if args[1] == "--script" and len(args) == 3:
        path = Path(args[2])
        with system_errors(LaunchError, f"cannot read {path}", "submit the job again"):
            program = from_json(path.read_text(), str(path))
        run_dir = path.absolute().parents[2]
        if task is not None:
            run_dir, program = run_dir / f"array_{task}", program.numbered(task)
        return Batch(style, job_id, restart, None, (), run_dir, n_nodes, n_ranks, is_periodic=True, script=program)
    from ..config.load import load_config  # a script needs no config

    config, overrides = None if args[1] == "-" else args[1], list(args[2:])
    if task is not None:
        overrides = [override.replace("%a", task) for override in overrides]
    loaded = load_config(config, overrides)
    run_dir = Path(loaded.config.run.dir)
    if task is not None:
        run_dir = run_dir / f"array_{task}"
        overrides.append(f"run.dir={run_dir}")
        loaded = load_config(config, overrides)
    pinned = _pinned(run_dir, job_id)
    if restart and pinned.exists():  # the submitted file may have changed since
        config, overrides = str(pinned), []
        loaded = load_config(config, overrides)
    n_gpus = integer(environ, "SLURM_GPUS_ON_NODE") if environ.get("SLURM_GPUS_ON_NODE") else 0
    spec.check_fits(loaded.config, n_nodes, n_ranks, n_gpus)
    is_periodic = loaded.config.checkpoint.is_periodic
    text = loaded.render()
    return Batch(style, job_id, restart, config, tuple(overrides), run_dir, n_nodes, n_ranks, text, is_periodic)


def _pinned(run_dir: Path, job_id: str) -> Path:
    return run_dir.absolute() / submit.FOLDER / f"job-{job_id}.yaml"


def _ranks_per_node(style: str, environ: Mapping[str, str]) -> int:
    names = ["NPROC_PER_NODE", "SLURM_GPUS_ON_NODE"]
    if style == "srun":
        names.insert(1, "SLURM_NTASKS_PER_NODE")
    n_ranks = next((integer(environ, name) for name in names if environ.get(name)), 1)
    if n_ranks < 1:
        raise LaunchError("no rank per node was asked for", "set NPROC_PER_NODE, or ask for GPUs")
    return n_ranks


def step_argv(batch: Batch, environ: Mapping[str, str]) -> list[str]:
    """The srun command."""
    tasks = 1 if batch.style == "torchrun" else batch.n_ranks_per_node
    argv = ["srun", "--kill-on-bad-exit=1", f"--nodes={batch.n_nodes}", f"--ntasks={batch.n_nodes * tasks}"]
    argv.append(f"--ntasks-per-node={tasks}")
    # srun ignores sbatch's --cpus-per-task since Slurm 22.05. torchrun's ranks share a node's CPUs.
    per_node = re.fullmatch(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    cpus = int(per_node[1]) if per_node else None
    if batch.style == "srun":
        cpus = integer(environ, "SLURM_CPUS_PER_TASK") if "SLURM_CPUS_PER_TASK" in environ else None
    argv += [f"--cpus-per-task={cpus}"] if cpus else []
    image = environ.get("SHARDKIT_CONTAINER")
    argv += submit.srun_options(image, [os.getcwd(), str(batch.run_dir.absolute())], environ) if image else []
    python = submit.CONTAINER_PYTHON if image else sys.executable
    if batch.style == "srun":
        argv += [f"--output={output_pattern(str(batch.log_dir))}/rank-%t.log", "--open-mode=append"]
        if batch.script is not None:  # unshielded: Lightning takes an ignored signal for one that the user handles
            return [*argv, python, *batch.script.argv]
        config = ["--config", batch.config] if batch.config else []
        return [*argv, *_SHIELD, *module_command("shardkit.train", python), *config, *batch.overrides]
    launch = [*module_command("shardkit.cli", python), "launch"]
    sizes = ["--nnodes", str(batch.n_nodes), "--nproc-per-node", str(batch.n_ranks_per_node)]
    sizes += ["--max-restarts", environ.get("SHARDKIT_MAX_RESTARTS", "0")]
    if batch.script is not None:
        options = ["--run-dir", str(batch.run_dir), *batch.script.launch_options()]
        return [*argv, *_SHIELD, *launch, *sizes, *options, "--", *batch.script.argv]
    return [*argv, *_SHIELD, *launch, batch.config or "-", *sizes, *batch.overrides]


def step_environment(batch: Batch, environ: Mapping[str, str]) -> dict[str, str]:
    """The job's environment, plus the variables of the step's processes."""
    keep = os.pathsep.join([str(batch.log_dir), str(job_starts.path(batch.run_dir).absolute())])
    job_output = batch.run_dir.absolute() / "logs"
    kept_outputs = [str(path) for path in job_output.glob("slurm-*.out")]
    added = {"SHARDKIT_KEEP": os.pathsep.join([keep, *kept_outputs]), "PYTHONUNBUFFERED": "1"}
    if batch.style == "torchrun":
        added["SHARDKIT_LOG_ROOT"] = str(batch.log_dir)
    else:
        added["SHARDKIT_ERROR_DIR"] = str(batch.error_dir)
        if not environ.get("OMP_NUM_THREADS"):
            cpus = environ.get("SLURM_CPUS_PER_TASK")
            added["OMP_NUM_THREADS"] = cpus or str(default_omp_threads(batch.n_ranks_per_node, environ))
    if batch.script is not None:
        added[PREEMPT_FILE] = str(_preempt_file(batch))
        added |= {} if environ.get("PYTHONFAULTHANDLER") else {"PYTHONFAULTHANDLER": "1"}
    return {**environ, **added}


def _preempt_file(batch: Batch) -> Path:
    """The file that tells a script's ranks of a preemption, or the launchers of all nodes that tell the ranks."""
    return batch.log_dir / "preempted"


def _announce(batch: Batch, on_preempt: str) -> None:
    """Tell the ranks of a script that their job is preempted."""
    if batch.style == "torchrun" or on_preempt == "file":
        try:
            _preempt_file(batch).touch()
        except OSError as error:  # a full disk: the script could not save there either
            say(f"cannot write {_preempt_file(batch)}: {error.strerror}; the script is not told of the preemption")
    else:
        preemption_warning.signal_steps(on_preempt.upper(), batch.job_id)


def run(batch: Batch, environ: Mapping[str, str], warning: PreemptionWarning) -> int:
    """Run the step to its end, then requeue or end the job; returns the exit code."""
    if batch.script is None and not has_run(batch.run_dir):
        refuse_without_run(batch.run_dir, False, environ)
    with system_errors(LaunchError, f"cannot write {batch.log_dir}", "set run.dir to one you can write"):
        batch.error_dir.mkdir(parents=True, exist_ok=True)
        batch = batch.pin()
    for start in job_starts.starts(batch.run_dir):  # Slurm's reason for those that could not record their own end
        if start.job == batch.job_id and start.restart < batch.restart and start.reason is None:
            reason = requeue.end_by_slurm(batch.job_id, start.restart, start.began)
            if reason is not None:
                job_starts.note_end(batch.run_dir, batch.job_id, start.restart, reason)
    refuse(batch, environ)
    hosts = environ.get("SLURM_JOB_NODELIST", "")
    job_starts.note_start(batch.run_dir, batch.job_id, batch.restart, hosts, batch.progress())
    ends_at = requeue.outlook(batch.job_id).ends_at
    if ends_at is not None:
        lead_s = integer(environ, "SHARDKIT_SIGNAL_S") if environ.get("SHARDKIT_SIGNAL_S") else None
        for doubt in preemption_warning.doubts(ends_at - time.time(), lead_s, batch.run_dir, batch.is_periodic):
            say(f"warning: {doubt}")
    _check_nodes(batch, environ)
    before = batch.newest_checkpoint()
    if batch.script is not None:
        warning.announce = partial(_announce, batch, batch.script.on_preempt)
    say(f"job {batch.job_id}, start {batch.restart + 1}, {batch.n_nodes} x {batch.n_ranks_per_node} ranks")
    with (batch.log_dir / SRUN_LOG).open("wb") as log:
        process = subprocess.Popen(step_argv(batch, environ), env=step_environment(batch, environ), stderr=log)
    srun = Follower(batch.log_dir / SRUN_LOG, sys.stderr.buffer)
    in_use = job_starts.InUse(batch.log_dir)
    bound = requeue.Bound(partial(srun_log, batch))
    noted = queued = was_bounded = False
    newest_then = before
    rank_0 = Follower(batch.log_dir / "rank-0.log", sys.stdout.buffer) if batch.style == "srun" else None

    def pump() -> None:
        srun.pump()
        if rank_0 is not None:
            rank_0.pump(stop_at_error=(batch.error_dir / "rank-0.json").exists())

    while process.poll() is None:
        warning.watch(batch.job_id, batch.run_dir, batch.restart)
        if warning.ending is not None and not noted:  # Slurm may leave this script no time for it at the end
            noted, newest_then = True, batch.newest_checkpoint()
            how = warning.ending.how
            if how == requeue.TIME_LIMIT:
                how = _late_save(batch, warning.told_at)
                say(how)
            elif how == requeue.CANCELLED:
                say("cancelled: the ranks are told to save; the job will not be queued again")
            batch.note_end(how)
        may_queue = noted and not queued and warning.is_late and batch.script is None
        # After the time limit the job is queued again as soon as its save is complete, maybe at the last moment.
        if may_queue and batch.newest_checkpoint() not in (None, newest_then):
            queued = True
            batch.note_end("saved after USR2")
            refuse(batch, os.environ)
            say(f"saved within the time after the limit: {requeue.queue_again(batch.job_id, (), batch.restart)}")
        if not was_bounded and bound.is_passed():
            was_bounded = True
            process.kill()  # it waits for tasks whose processes are gone
        in_use.beat()
        pump()
        time.sleep(_POLL_S)
    pump()
    saved = batch.newest_checkpoint()
    code = after(batch, process.returncode, warning, environ, saved if saved != before else None, was_bounded)
    in_use.close()
    return code


def _check_nodes(batch: Batch, environ: Mapping[str, str]) -> None:
    """Refuse nodes that differ before ranks start there: they would wait for each other, or fail far from the cause."""
    if batch.n_nodes == 1:
        return
    options = ["srun", f"--nodes={batch.n_nodes}", f"--ntasks={batch.n_nodes}", "--ntasks-per-node=1"]
    checkpoints = batch.run_dir.absolute() / "checkpoints"
    folders = [batch.run_dir.absolute(), batch.log_dir, *([checkpoints] if checkpoints.is_dir() else [])]
    packages = ["shardkit", "torch"] if batch.script is None or batch.style == "torchrun" else []
    python = None if environ.get("SHARDKIT_CONTAINER") else sys.executable
    try:
        warning = commands.check(options, python, packages, folders, environ)
    except LaunchError as error:
        batch.note_end(f"failed: {error.cause}")
        raise
    except OSError as error:
        cause = f"cannot write {error.filename}: {error.strerror}"
        raise LaunchError(cause, "free space, or repair the disk") from error
    if warning is not None:
        say(f"warning: {warning}")


SRUN_LOG = "srun.log"
"""srun's own output, in the start's folder."""
_BEGAN = time.time()  # this process is one start of the job


def _late_save(batch: Batch, told_at: float | None) -> str:
    """A line about a save that meets the time limit: the time that it had and needs, and the newest checkpoint."""
    warning_time = "the ranks were not told to save before it"
    if told_at is not None:
        warning_time = f"the ranks were told to save {time.time() - told_at:.0f} s before it"
    kill_wait_s = requeue.kill_wait_s()
    warning_time += "" if kill_wait_s is None else f" and have {kill_wait_s} s after it (Slurm's KillWait)"
    longest_s = None if batch.script is not None else preemption_warning.longest_save_s(batch.run_dir)
    needed = "no earlier save was timed" if longest_s is None else f"the longest save so far took {longest_s:.1f} s"
    return f"{requeue.TIME_LIMIT}: {warning_time}; {needed}; {_newest_words(batch)}"


def _newest_words(batch: Batch) -> str:
    newest = batch.newest_checkpoint()
    if newest is None:
        return "nothing is saved"
    return f"saved last: step {newest[0]}" if batch.script is None else "the script has earlier checkpoints"


def refuse(batch: Batch, environ: Mapping[str, str]) -> None:
    """Raise the error of a job that should not run again: too many starts, or no progress."""
    most = integer(environ, "SHARDKIT_MAX_REQUEUES") if environ.get("SHARDKIT_MAX_REQUEUES") else 100
    words = None
    if batch.script is not None:
        words = f"wrote no file below {batch.script.checkpoints}"
        words = words if batch.script.checkpoints else "showed no progress (it was submitted without --checkpoints)"
    problem = requeue.refusal(batch.run_dir, batch.job_id, most, batch.progress(), words)
    if problem is not None:
        raise problem


def after(
    batch: Batch, code: int, warning: PreemptionWarning, environ: Mapping[str, str], saved: tuple[int, int] | None,
    was_bounded: bool = False,
) -> int:  # fmt: skip
    """Note why the step ended; requeue the job, or end it with the returned code.

    `saved`: the newest checkpoint, if this start made it. `was_bounded`: whether srun was ended because it waited for
    tasks in vain.
    """
    failures = _failures(batch)
    stopped = any(rank_failure.exit_code == exit_codes.PREEMPTED for rank_failure in failures)
    may_be_done = code == 0 and not stopped
    ending = None
    if not may_be_done or (batch.script is not None and warning.came):
        ending = requeue.ending(batch.job_id, batch.restart)
    if ending is not None and ending.how == requeue.CANCELLED:
        if ending.comes_back:  # Slurm had begun to queue it again
            commands.ask("scancel", batch.job_id)
        return _cancelled(batch, code, failures, saved is not None)
    if may_be_done and (batch.script is None or signal.SIGUSR2 not in warning.came):
        batch.note_end("done")
        return exit_codes.OK
    tasks_per_node = 1 if batch.style == "torchrun" else batch.n_ranks_per_node
    gone = requeue.lost_processes(
        srun_log(batch), was_bounded, failures, environ.get("SLURM_JOB_NODELIST", ""), batch.n_nodes,
        batch.n_ranks_per_node, tasks_per_node,
    )  # fmt: skip
    if gone is None and batch.style == "srun" and failures and failures[0].order[0] >= failure.UNSURE:
        # srun does not report a task that exited with 0.
        ranks = set(range(batch.n_nodes * batch.n_ranks_per_node)) - {rank_failure.rank for rank_failure in failures}
        failures = failure.merged(failures, [failure.ended_early(rank) for rank in sorted(ranks)])
    if batch.script is None:
        requeue_reason = requeue.reason(ending, warning.came, failures, stopped, saved and saved[0], gone)
    else:
        requeue_reason = requeue.script_reason(ending, warning.came, failures, code, saved is not None, gone)
        stopped = stopped or (requeue_reason is not None and requeue_reason.endswith("after USR2"))
    if requeue_reason is None and ending is not None and ending.how == requeue.TIME_LIMIT and not stopped:
        how = _late_save(batch, warning.told_at)
        batch.note_end(how)
        if any(rank_failure.is_error and not rank_failure.lost_peer for rank_failure in failures):
            _explain(batch, failures)
        else:
            fix = "raise --signal-s or --time, or save more often (checkpoint.every_minutes)"
            print(f"error: not saved in time: {how}\n  fix: {fix}", file=sys.stderr, flush=True)
        return exit_codes.shell_code(code)
    if requeue_reason is None:
        return _failed(batch, code, failures, stopped, saved is not None)
    if requeue_reason == gone:
        say(f"{requeue_reason}; Slurm has not declared the node lost")
    batch.note_end(requeue_reason)
    if not stopped and requeue_reason not in requeue.NOT_ITS_DOING:
        _explain(batch, failures)
    refuse(batch, environ)
    say(f"{requeue_reason}: {requeue.queue_again(batch.job_id, requeue.bad_nodes(failures), batch.restart)}")
    warning.wait_for_term()
    if requeue.was_cancelled(batch.job_id):  # after the look above, and before the requeue
        commands.ask("scancel", batch.job_id)
        return _cancelled(batch, code, failures, saved is not None)
    return exit_codes.PREEMPTED


def _cancelled(batch: Batch, code: int, failures: list[failure.Failure], saved: bool) -> int:
    """End a cancelled job for good, whatever warning came before; returns the exit code."""
    batch.note_end(requeue.CANCELLED)
    if any(rank_failure.exit_code == exit_codes.PREEMPTED for rank_failure in failures) and saved:
        say(f"cancelled, not queued again; {_newest_words(batch)}; continue with run.resume=true")
        return exit_codes.PREEMPTED
    if any(rank_failure.is_error and not rank_failure.lost_peer for rank_failure in failures):  # such as a full disk
        _explain(batch, failures)
    if batch.script is not None:
        written = "wrote a checkpoint in this start" if saved else "wrote no checkpoint in this start"
        say(f"cancelled, not queued again; the script {written}")
    else:
        say(f"cancelled, not queued again; the ranks ended without a save; {_newest_words(batch)}")
    return exit_codes.shell_code(code)


def _failed(batch: Batch, code: int, failures: list[failure.Failure], stopped: bool, saved: bool) -> int:
    if stopped and not saved:
        say(f"error: the ranks reported a save, but {batch.run_dir}/checkpoints has no checkpoint of this start")
        batch.note_end("stopped, without a checkpoint")
        return exit_codes.UNSAVED
    if stopped:
        say("saved and stopped; not queued again: only Slurm's warning or a preemption requeues a job")
        batch.note_end("stopped")
        return exit_codes.PREEMPTED
    batch.note_end(f"failed: {_cause(failures[0]) if failures else code}")
    if not failures:
        say(f"srun ended with {exit_codes.describe(code)}, no rank reported an error; logs: {batch.log_dir}")
        return exit_codes.shell_code(code)
    _explain(batch, failures)
    return failure.exit_code_of(failures)


def _explain(batch: Batch, failures: list[failure.Failure]) -> None:
    """Print why ranks failed. Under torchrun each node's launcher has printed it."""
    if failures and batch.style == "srun":
        memory = failure.memory_words(failures, failure.read_post_mortems(batch.run_dir, _BEGAN))
        kills = failure.oom_kills_in_srun_log(srun_log(batch))
        print(failure.explain(failures, str(batch.log_dir), kills, memory), file=sys.stderr, flush=True)


def _cause(origin: failure.Failure) -> str:
    return origin.message if origin.trace or origin.is_error else f"rank {origin.rank}: {origin.message}"


def _failures(batch: Batch) -> list[failure.Failure]:
    """The failures of all ranks, likely origin first: from their own files, their launchers and srun."""
    if batch.style == "torchrun":
        launchers = [failure.of_launcher(folder) for folder in batch.log_dir.glob("*")]
        return sorted((entry for entries in launchers for entry in entries), key=lambda entry: entry.order)
    reported = failure.in_srun_log(srun_log(batch))
    if batch.script is not None:
        reported = [
            failure.with_traceback(rank_failure, batch.log_dir / f"rank-{rank_failure.rank}.log")
            for rank_failure in reported
        ]
    return failure.merged(failure.read(batch.error_dir.glob("*.json")), reported)


def srun_log(batch: Batch) -> str:
    try:
        return (batch.log_dir / SRUN_LOG).read_text(errors="replace")
    except OSError:  # the run was deleted
        return ""


if __name__ == "__main__":
    sys.exit(main())
