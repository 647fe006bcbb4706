"""Prove that a command computes what one process computes: the runs, in order."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from ..errors import LaunchError, gib, listed, one_line
from . import rows, saved
from .inject import shardkit_pieces as pieces
from .judge import Judge
from .leaks import LeakSearch, look
from .replay import Proof
from .runs import OF_TORCHS_LOG, PlannedStep, RecordedRun, Runner, one_process, say
from .verdict import CANNOT_TELL, FAILED, NOT_SAME, ROWS, SAME, ProofVerdict

STRANGE_SPREAD = 1e-3
"""Part of a gradient in fp32 that an ulp of the weights does not move: the loss depends on the number of the step."""


def prove(
    command: Sequence[str], against: str | None, n_steps: int, runner: Runner, until: str = "",
    leak: LeakSearch | None = None,
) -> ProofVerdict:  # fmt: skip
    """The verdict on a command. Both programs run unchanged, in folders of the runner.

    `until`: "save" for the parallel run to go on until it has saved, so that the files are compared, too. `leak`: look
    for documents that see each other.
    """
    process_command = shlex.split(against) if against else one_process(command)
    assert process_command is not None, "refused by `check`"
    say("the parallel run")
    steps = [PlannedStep(f"step{number}") for number in range(1, n_steps + 1)]
    parallel = runner.start(command, steps, **({"until": until} if until else {}))
    ended = _ended_early(parallel, n_steps, runner)
    if ended is not None:
        return ended
    n_steps = len(parallel.steps)
    world_size = int(next(iter(parallel.record("start").values()))["world"])
    if world_size == 1 and against is None:
        raise LaunchError("the command starts one rank", "start several: torchrun --nproc-per-node 2 …")
    feed = rows.drawn([parallel.record(name) for name in parallel.steps], parallel.record("batches"))
    proof = Proof(list(command), process_command, against is None, runner, parallel, feed, world_size)
    verdict = _of_runs(proof, n_steps)
    if leak is not None:
        verdict = look(proof, leak, verdict)
    if until and verdict.kind in (SAME, ROWS):
        verdict = _of_files(proof, verdict)
    notes = sorted({note for record in parallel.record(parallel.steps[-1]).values() for note in record["notes"]})
    return replace(verdict, notes=(*verdict.notes, *(note for note in notes if note != "batch norm")))


def _ended_early(run: RecordedRun, n_steps: int, runner: Runner) -> ProofVerdict | None:
    """The verdict on a program that did not do its steps; its own error comes before any comparison."""
    if len(run.steps) == n_steps:
        return None
    if (file := run.folder / "disk").exists():
        disk = json.loads(file.read_text())
        cause = f"the records need {gib(disk['needed'])} of disk, and {runner.folder} has {gib(disk['free'])} free"
        raise LaunchError(
            cause, "set TMPDIR or --keep to a larger disk, or take a smaller model, fewer ranks or --steps 1"
        )
    if (run.folder / "nameless").exists():
        raise LaunchError(
            "FSDP1 with use_orig_params=False keeps gradients without the names of their parameters",
            "pass use_orig_params=True to FullyShardedDataParallel (Accelerate: fsdp_use_orig_params: true)",
        )
    if run.code and run.is_of_recorder:
        headline = f"CANNOT TELL: the recorder failed after {len(run.steps)} steps: {run.error()}"
        return ProofVerdict(
            CANNOT_TELL, headline, reasons=(f"a defect of shardkit: report it with {runner.kept_log(run)}",)
        )
    if run.code and not run.is_late:
        headline = f"FAILED by itself after {len(run.steps)} steps, with exit code {run.code}: {run.error()}"
        reasons = [f"run the command without a proof, and mend it; {runner.kept_log(run)}"]
        if runner.machine is None and re.search("nccl|cuda|nvidia", run.error(), re.IGNORECASE):
            reasons.append("it ran on the CPU over gloo: --gpus N emulates N GPUs for a program that insists on them")
        return ProofVerdict(FAILED, headline, reasons=tuple(reasons))
    if run.is_late:
        reason = f"the time limit of {runner.limits.time_limit_s:g} s came after {len(run.steps)} of {n_steps} steps"
        return ProofVerdict(
            CANNOT_TELL, f"CANNOT TELL: {reason}", reasons=("raise --time-limit, or take a smaller model",)
        )
    if run.steps:
        return None
    lines = [line for line in run.lines() if not OF_TORCHS_LOG.match(line)]
    ending = f"; it printed last: {one_line(lines[-1], 120)}" if lines else ""
    cause = f"the command ended without an optimizer step that follows a module's call{ending}"
    raise LaunchError(cause, "name a command that trains with torch, in Python started without -I, -E or -S")


def _of_runs(proof: Proof, n_steps: int) -> ProofVerdict:
    """Start one process as often as needed, and judge the steps."""
    feed, numbers = proof.feed, range(1, n_steps + 1)
    clips_unseen = proof.uses_engine()  # so that its gradients are not those that its optimizer gets
    plain = [
        PlannedStep(f"step{n}", weights=n - 1, gradients=None if clips_unseen else n, shares=n == 1) for n in numbers
    ]
    moved = [PlannedStep(f"moved{n}", weights=n - 1, moved=True, gradients_only=not clips_unseen) for n in numbers]
    say(f"one process: {shlex.join(proof.process_command)}")
    feeds = None
    if feed is not None and proof.is_replay:
        proof.process_loader = feed.loader
        feeds = [proof.united(number) for number in numbers]

    def start() -> tuple[range, dict[int, tuple[str, str]]]:
        """The steps that one process took, and how their rows compare."""
        proof.taken.clear()
        # Steps that are fed their rows may be repeated in the same start, with moved weights.
        is_long = feeds is not None and not proof.uses_engine()
        proof.take([*plain, *moved] if is_long else plain, [*feeds, *feeds] if feeds and is_long else feeds, True)
        taken = range(1, sum(f"step{number}" in proof.taken for number in numbers) + 1)
        return taken, {
            number: rows.compare(proof.parallel.record(f"step{number}"), proof.side(f"step{number}").records)
            for number in taken
        }

    notes = []
    taken, kinds = start()
    if taken and (strangers := _other_names(proof)) is not None:
        return strangers
    if feed is not None and any(kind == rows.DIFFERENT for kind, _ in kinds.values()):
        process = [proof.side(f"step{number}").records for number in taken]
        loader, n_micros = proof.process_loader, len(process[0][0]["rows"])
        if feed.kind == "rows":
            process_feed = rows.drawn(process)
            loader, n_micros = (None, 0) if process_feed is None else (process_feed.loader, len(process_feed.micros(0)))
        elif feed.kind == "batches" and (yielded := process[0][0]["yielded"]):
            loader = int(max(yielded, key=yielded.__getitem__))
        # A program that keeps its global batch takes more micro-batches with one process.
        if loader is not None and not (proof.is_replay and n_micros == len(feed.micros(0))):
            if not proof.is_replay:
                words = next(words for kind, words in kinds.values() if kind == rows.DIFFERENT)
                notes.append(f"the runs draw other rows ({words}): one process was given those of the ranks")
            proof.process_loader, proof.regrouped = loader, n_micros
            feeds = [proof.united(number) for number in numbers]
            taken, kinds = start()
    if not taken:
        return _process_failed(proof)
    if f"moved{taken[-1]}" not in proof.taken or _is_strange(proof, taken):
        say("one process, its weights moved by one ulp")
        proof.take(moved[: len(taken)], feeds, True, compute=proof.side("step1").records[0]["compute"])
    verdict = Judge(proof, taken, kinds).verdict()
    return replace(verdict, notes=(*notes, *verdict.notes))


def _of_files(proof: Proof, verdict: ProofVerdict) -> ProofVerdict:
    """The verdict with the saved files in view, of a program that is the same in memory."""
    parallel = proof.parallel
    marker = parallel.folder / "save"
    if not marker.exists():
        reason = "the program saved nothing with torch or safetensors after its first step"
        return ProofVerdict(
            CANNOT_TELL, f"CANNOT TELL: {reason}", reasons=(reason, "what would tell: let it save sooner")
        )
    n_steps = min(int(marker.read_text()), len(parallel.steps))
    n_further = int(marker.read_text()) - n_steps  # beyond the recorded ones
    named = ["start", *(f"step{number}" for number in range(1, n_steps + 1))]
    further = parallel.record("further")
    records = [parallel.record(name) for name in named if parallel.record(name)]
    if further and n_further:
        records.append(further)
    memory, trained = saved.in_memory(parallel.folder, records)
    files, unread = saved.findings(parallel.folder.parent, memory, trained)
    complete = [finding for finding in files if not finding.is_foreign]
    foreign = [finding.path for finding in files if finding.is_foreign]
    notes = (*verdict.notes, *unread, *(f"{path} holds other weights" for path in foreign))
    if (wrong := _wrong_file(complete, "the ranks have in memory", notes)) is not None:
        return wrong
    process, file_notes = _files_of_one_process(proof, n_steps, n_further, set(memory), foreign if n_further else [])
    notes = (*notes, *file_notes)
    if (wrong := _wrong_file(process, "one process saves", notes)) is not None:
        return wrong
    equal = [finding for finding in process if finding.n_equal]
    if not complete and not equal:
        reason = "no saved file holds the trained weights under their names"
        if any(finding.unsure for finding in process):
            reason += ", and one process saves other numbers: averages, or wrong ones"
            reason += f" (--steps {n_steps + n_further} would tell)"
        return ProofVerdict(CANNOT_TELL, f"CANNOT TELL: {reason}", reasons=(reason, *unread), notes=notes)
    lines = [
        f"saved: {', '.join(finding.path for finding in findings[:3])} {words}"
        for findings, words in ((complete, "as in memory"), (equal, "as one process saves it"))
        if findings
    ]
    return replace(verdict, lines=(*verdict.lines, *lines), notes=notes)


def _wrong_file(files: Sequence[saved.Finding], whose: str, notes: tuple[str, ...]) -> ProofVerdict | None:
    for finding in files:
        if finding.wrong:
            name, words = finding.wrong[-1]
            lines = [f"  {name}: {words}" for name, words in finding.wrong[:4]]
            headline = f"NOT THE SAME: {finding.path} holds other weights than {whose}"
            lines = [f"{len(finding.wrong)} tensors differ, {finding.n_equal} are equal", *lines]
            reason = f"the saved {name}: {words}"
            return ProofVerdict(NOT_SAME, headline, tuple(lines), (reason,), notes, word="saved", parameter=name)
    return None


def _files_of_one_process(
    proof: Proof, n_steps: int, n_further: int, weights: set[str], foreign: Sequence[str]
) -> tuple[list[saved.Finding], list[str]]:
    """What the ranks' files hold of one process's, which saves with the weights that the ranks had when they saved."""
    say("one process, until it has saved")
    numbers = range(1, n_steps + 1)
    gradients = not proof.uses_engine()
    steps = [PlannedStep(f"saving{n}", n - 1, n if gradients else None, gradients_only=True) for n in numbers]
    feeds = None if proof.process_loader is None else [proof.united(number) for number in numbers]
    proof.take(steps, feeds, True, until="save", further=n_further)
    run = proof.newest
    assert run is not None, "one process was started"
    marker = run.folder / "save"
    if not marker.exists():
        return [], ["one process saved nothing, so that no file was compared with its"]
    if (reached := int(marker.read_text())) != n_steps + n_further:
        return [], [f"one process saves after {reached} steps, not {n_steps + n_further}: its files were not compared"]
    buffers = {name for record in run.record("start").values() for name in record["buffers"]}

    def is_weight(name: str) -> bool:
        """Whether one process had the ranks' numbers: its buffers are of other batches, and the weights that the ranks
        had between the recorded steps and the save, of which it may save an average, are not known."""
        return name in weights if n_further else name not in buffers

    return saved.compare(proof.parallel.folder.parent, run.folder.parent, is_weight, foreign)


def _process_failed(proof: Proof) -> ProofVerdict:
    run = proof.newest
    assert run is not None, "one process was never started"
    words = shlex.join(proof.process_command)
    if run.is_late:
        headline = f"CANNOT TELL: the time limit came before one process made a step: {words}"
    elif not run.code:
        headline = f"CANNOT TELL: one process made no optimizer step: {words}"
    else:
        headline = f"CANNOT TELL: one process failed: {run.error()}"
    fix = f"name a program of one process that runs: --against 'python train.py …'; {proof.runner.kept_log(run)}"
    if proof.is_replay or run.is_late or not run.code:
        return ProofVerdict(CANNOT_TELL, headline, reasons=(fix,))
    return ProofVerdict(
        FAILED, f"FAILED: the program of --against ended with exit code {run.code}: {run.error()}", reasons=(fix,)
    )


def _other_names(proof: Proof) -> ProofVerdict | None:
    """The verdict where the two programs' parameters have other names or shapes, or one has parameters of its own."""
    run = proof.taken["step1"]
    start = next(iter(run.record("start").values()))
    ranks = pieces.by_name(proof.parallel.record("start"), "weights")
    missing = {name: tuple(shape) for name, shape, _ in start["missing"]}  # frozen ones act on the gradients, too
    surplus = {name: by_rank for name, by_rank in ranks.items() if name not in start["weights"]}
    trained = [name for name, by_rank in surplus.items() if any(piece["trains"] for piece in by_rank.values())]
    if not missing and not trained:
        return None
    nearest = []
    for name in list(missing)[:4]:
        if name in ranks:
            shapes = sorted({tuple(piece.get("of", piece)["local"]) for piece in ranks[name].values()})
            nearest.append(f"{name}: the ranks' {', '.join(map(str, shapes))} do not make {missing[name]}")
        else:
            match = difflib.get_close_matches(name, list(surplus) or list(ranks), 1, 0.0)
            nearest.append(f"{name}: nearest of the ranks' is {match[0] if match else 'none'}")
    if len(missing) == len(start["weights"]):
        cause = "the ranks and one process have no parameter in common"
        raise LaunchError(f"{cause}; {listed(nearest)}", "name a program with the same modules: --against 'COMMAND'")
    reasons = [*nearest, *(f"{name}: one process does not have it" for name in trained[:4])]
    counts = f"{len(missing)} parameters of one process have no counterpart, and {len(trained)} of the ranks'"
    records = proof.parallel.record("start").values()
    if len(records) > 1 and not set.intersection(*(set(record["weights"]) for record in records)):
        counts = f"the ranks have no parameter in common, and one process does not have {len(trained)} of theirs"
    headline = f"CANNOT TELL: {counts}"
    return ProofVerdict(
        CANNOT_TELL, headline, reasons=(*reasons, "what would tell: a program of the same modules for --against")
    )


def _is_strange(proof: Proof, numbers: range) -> bool:
    """Whether one process's gradients differ by more than rounding when a later step repeats them."""
    for number in numbers:
        reference, moved = proof.side(f"step{number}"), proof.side(f"moved{number}")
        a = [reference.of(name)[0] for name in reference]
        b = [moved.of(name).get(0) for name in reference]
        pairs = [(p["norm"], q["norm"]) for p, q in zip(a, b, strict=True) if p and q and p["dtype"] == "float32"]
        if any(abs(p - q) > STRANGE_SPREAD * max(p, q) and max(p, q) > 1e-6 for p, q in pairs):
            return True
    return False
