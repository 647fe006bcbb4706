"""Does it fit? The verdict on a rehearsal, from the records of its processes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, gib, printable
from ..hardware.cards import GPUS, Gpu, parse_bytes
from .ranks import RehearsedWorld

FITS, DOES_NOT_FIT, FAILED, NOT_KNOWN = "fits", "does not fit", "failed", "not known"
EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 4, NOT_KNOWN: 7, FAILED: 8}
_NOT_EMULATED = re.compile(
    "emucuda|not emulated|initialization error|cu(sparse|fft|solver) error"
    "|CUDA error: operation not supported|CUDA_ERROR_NOT_SUPPORTED",
    re.IGNORECASE,
)
"""What errors of the emulation say, and of libraries that bring a CUDA runtime of their own, which finds no GPU."""
_LAUNCHERS_ERRORS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError")
"""What a launcher raises since a rank failed, which says why itself."""
GIVEN = "given"
ASSUMPTIONS = {
    "any": "any() of what nobody computed is False",
    "all": "all() of what nobody computed is True",
    "one": "losses, norms and other small tensors follow from ones",
    "positions": "positions that nobody computed (topk, argmax, sort) are 0, 1, 2, … round and round",
    "zeros": "large floats that nobody computed are zeros on the host",
    GIVEN: "values that nobody computed are those of --assume",
    "unequal": "two tensors that nobody computed are not equal",
    "rows": "the busiest rank's experts get `parallel.ep_imbalance` times the average rows",
    "printed": "the numbers of a printed tensor that nobody computed are `...`",
}
"""What an emulated GPU tells a program that reads what it did not compute; docs/rehearse.md has a reason for each."""
SHOWN = 8
"""Assumptions that the table names; further ones are counted."""
SHOWN_CHARACTERS = 100
"""Of a program's line."""
SHOWN_LINES = 4
"""Lines of the program that the table names for the tensors of the peak."""
EVENTS = ("forward", "backward", "update", "evaluation", "save")
"""Of a training; the verdict says which of them ran."""
NEEDS = {
    "bf16": ((8, 0), "torch emulates it slowly there, and fp16 is the type to use"),
    "fp8": ((8, 9), "its products fail there"),
}
"""Types of tensors: the compute capability from which cards have them, and what happens on others."""


CARDS = "cards"
"""The account's files among the records, one a machine: `cards.0` (native/account.h has the layout)."""
_MAX_CARDS, _MAX_PROCESSES = 64, 1024
_CARD = struct.Struct("=2Q")
_PROCESS = struct.Struct(f"={1 + 2 * _MAX_CARDS}Q")


@dataclass(frozen=True)
class CardUse:
    """A card when most of it was in use."""

    machine: int
    number: int  # on its machine, whatever CUDA_VISIBLE_DEVICES says
    peak: int  # bytes of all processes, with their contexts
    held: dict[int, int]  # process → bytes that it held then


def read_cards(folder: Path) -> tuple[CardUse, ...]:
    """The cards that processes used, from the records of a rehearsal."""
    uses = []
    for path in sorted(folder.glob(f"{CARDS}.*")):
        content = path.read_bytes()
        start = _MAX_CARDS * _CARD.size
        processes = [_PROCESS.unpack_from(content, start + index * _PROCESS.size) for index in range(_MAX_PROCESSES)]
        for number in range(_MAX_CARDS):
            _, peak = _CARD.unpack_from(content, number * _CARD.size)
            held = {row[0]: row[1 + _MAX_CARDS + number] for row in processes if row[1 + _MAX_CARDS + number]}
            if peak:
                uses.append(CardUse(int(path.suffix[1:]), number, peak, held))
    return tuple(uses)


@dataclass(frozen=True)
class Rank:
    """What a process that used a GPU recorded."""

    rank: int
    world_size: int
    pid: int
    device: int  # the GPU of its largest peak
    allocated: int  # bytes of tensors at their peak
    reserved: int  # bytes that torch's allocator held of the GPU at most
    phase: str  # of the peak of `allocated`, and its `step`, from 1
    step: int
    steps: int  # optimizer steps that it finished
    ooms: int  # how often its allocator found no memory
    nccl_groups: int
    types: tuple[str, ...] = ()  # of its tensors, those that not every card has
    # category → bytes that its optimizer held after its last step, on the GPU
    at_update: dict[str, int] = field(default_factory=dict)
    # category → bytes of its peak, from its allocator's history; one rank tells them
    at_peak: dict[str, int] = field(default_factory=dict)
    host: int = 0  # the most bytes of host memory that its process had
    # ranks of each group in which it exchanged messages with pretended ranks
    with_messages: tuple[tuple[int, ...], ...] = ()
    has_whole_history: bool = True  # whether its allocator's history, which tells `at_peak` and `lines`, was not cut
    is_warming_up: bool = False  # its last step ran on a side stream, as steps before the capture of a CUDA graph do
    seen: frozenset[str] = frozenset()  # phases that it went through
    allowed: int | None = None  # bytes that its program lets torch's allocator take of the device; None: all
    # `bytes_a_step`, `first_step`, `last_step` and `source_line` of memory that every step leaves behind
    growth: dict[str, Any] = field(default_factory=dict)
    # `name`, `source_line`, `parameters` and `more` of optimizers that made no step, in bytes
    never_stepped: tuple[dict[str, Any], ...] = ()
    # `source_line`, `n_bytes` and `tensors` of its peak, those with most bytes first; one rank tells them
    lines: tuple[dict[str, Any], ...] = ()
    # how it ended: `kind` is steps, exit or exception; empty while it runs, or if it was killed
    end: dict[str, Any] = field(default_factory=dict)

    def outside(self, card: Gpu) -> int:
        """Bytes outside of torch's allocator, an estimate: the context, and NCCL's buffers for each group."""
        return card.context + self.nccl_groups * card.per_communicator

    @property
    def moment(self) -> str:
        return "before the first forward" if self.phase == "building" else f"{self.phase} of step {self.step}"


@dataclass(frozen=True)
class Assumption:
    """What an emulated GPU told the program without having computed it."""

    kind: str  # one of the keys of `ASSUMPTIONS`
    source_line: str  # the program's line
    count: int  # the most that a rank was told it there


@dataclass(frozen=True)
class Verdict:
    kind: str  # one of the keys of `EXIT_CODES`
    reason: str  # one line: the margin, or the failing rank with its error
    card: Gpu
    ranks: tuple[Rank, ...] = ()
    # bytes of a card that the rank with most of it needs; None where the program did not come far enough
    needed: int | None = None
    at_least: bool = False  # whether the program ended before `needed` was its peak
    notes: tuple[str, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    pretended: int | None = None  # the rank that was asked for what nobody can invent; None where none was
    cards: tuple[CardUse, ...] = ()  # those that several processes shared

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.kind]

    @property
    def seen(self) -> frozenset[str]:
        return frozenset[str]().union(*(rank.seen for rank in self.ranks))

    def other_cards(self) -> list[Gpu]:
        """Cards of the table, least memory first, that would hold it; by their memory alone."""
        if self.needed is None or self.at_least:
            return []
        holding = [gpu for gpu in GPUS.values() if gpu.memory >= self.needed and gpu.name != self.card.name]
        return sorted(holding, key=lambda gpu: gpu.memory)

    def as_json(self) -> dict[str, Any]:
        """The verdict with everything that it follows from; bytes are numbers."""
        ranks = [
            {
                "rank": rank.rank, "device": rank.device,
                "peak_allocated": rank.allocated, "peak_reserved": rank.reserved,
                "peak_in": rank.phase, "peak_step": rank.step, "steps": rank.steps, "ooms": rank.ooms,
                "outside_estimate": rank.outside(self.card), "at_update": rank.at_update, "at_peak": list(rank.lines),
                "peak_categories": rank.at_peak, "host_peak": rank.host, "allowed": rank.allowed,
                "growth": rank.growth or None, "never_stepped": list(rank.never_stepped),
            }
            for rank in self.ranks
        ]  # fmt: skip
        return {
            "verdict": self.kind, "reason": self.reason, "exit_code": self.exit_code, "gpu": self.card.name,
            "gpu_memory": self.card.memory, "needed": self.needed, "at_least": self.at_least, "ranks": ranks,
            "other_cards": [gpu.name for gpu in self.other_cards()], "notes": list(self.notes), "emulated": True,
            "assumptions": [asdict(assumption) for assumption in self.assumptions],
            "seen": [event for event in EVENTS if event in self.seen],
            "shared_cards": [
                {"machine": use.machine, "card": use.number, "peak": use.peak, "held": use.held} for use in self.cards
            ],
        }  # fmt: skip

    def text(self) -> str:
        """The verdict as a table and lines for a terminal."""
        lines = []
        if self.ranks:
            lines.append("rank  peak allocated  peak reserved  steps  peak in")
            lines += [
                f"{rank.rank:<5} {gib(rank.allocated):>14}  {gib(rank.reserved):>13}  {rank.steps:>5}  {rank.moment}"
                for rank in self.ranks
            ]
            most = max(self.ranks, key=lambda rank: rank.reserved)
            groups = f", NCCL {gib(most.nccl_groups * self.card.per_communicator)}" if most.nccl_groups else ""
            lines.append(
                f"outside   context {gib(self.card.context)}{groups} on each GPU (estimates, {self.card.overhead_from})"
            )
            if host := max(rank.host for rank in self.ranks):
                lines.append(f"host      {gib(host)} of this machine's memory at most in a rank, mapped files included")
            lines += [f"shared    {_shared(use, self.ranks)}" for use in self.cards]
            lines += _tensors(self.ranks)
            lines += [f"growth    {_growing(rank)}" for rank in self.ranks if rank.growth][:1]
            missing = [event for event in EVENTS if event not in self.seen]
            lines.append(
                f"seen      {', '.join(event for event in EVENTS if event in self.seen) or 'no step'}"
                + f"; not seen: {', '.join(missing)}" * bool(missing)
            )
        lines += [f"note      {note}" for note in self.notes]
        lines += [
            f"assumed   {ASSUMPTIONS[assumption.kind]}: {assumption.count} × {_shortened(assumption.source_line)}"
            for assumption in self.assumptions[:SHOWN]
        ]
        if len(self.assumptions) > SHOWN:
            lines.append(f"assumed   {len(self.assumptions) - SHOWN} lines more: --json has all")
        lines.append(f"verdict   {self.kind}: {self.reason}" if self.kind != FITS else f"verdict   {self.reason}")
        if cards := self.other_cards():
            names = ", ".join(f"{gpu.name} ({gib(gpu.memory, 1)})" for gpu in cards)
            lines.append(f"would hold it, by their memory alone: {names}")
        lines.append("The GPUs were emulated and computed nothing: losses that the program printed mean nothing.")
        return "\n".join(map(printable, lines))


def _shared(use: CardUse, ranks: Sequence[Rank]) -> str:
    """A card and the processes on it, by rank where a rank is known."""
    names = {rank.pid: f"rank {rank.rank}" for rank in ranks}
    held = sorted(use.held.items(), key=lambda entry: -entry[1])
    parts = [f"{names.get(pid, f'process {pid}')} {gib(n_bytes)}" for pid, n_bytes in held[:SHOWN]]
    more = f", {len(held) - SHOWN} more" if len(held) > SHOWN else ""
    return f"card {use.number} holds {gib(use.peak)} of {len(held)} processes: {', '.join(parts)}{more}"


def _growing(rank: Rank) -> str:
    growth = rank.growth
    steps = f"in each of steps {growth['first_step']} to {growth['last_step']}"
    return f"rank {rank.rank} keeps {gib(growth['bytes_a_step'])} more {steps}: {_shortened(growth['source_line'])}"


def _shortened(source_line: str) -> str:
    """A line of a library without the folder that it is installed in, and of any no more than a terminal's width."""
    source_line = source_line.rpartition("-packages/")[2]
    return source_line if len(source_line) <= SHOWN_CHARACTERS else f"{source_line[:SHOWN_CHARACTERS]}…"


def _tensors(ranks: tuple[Rank, ...]) -> list[str]:
    """Lines on the tensors of the rank that tells them: those of its optimizer, and the largest of its peak."""
    rank = next((rank for rank in ranks if rank.lines), ranks[0])
    by_size = sorted(rank.at_peak.items(), key=lambda entry: -entry[1])
    categories = ", ".join(f"{category} {gib(n_bytes)}" for category, n_bytes in by_size if n_bytes)
    lines = [f"at peak   rank {rank.rank} holds {categories}"] if categories else []
    lines += [
        f"at peak   {gib(line['n_bytes'])} in {line['tensors']} tensors: {_shortened(line['source_line'])}"
        for line in rank.lines[:SHOWN_LINES]
    ]
    if any(rank.at_update.values()):
        sizes = ", ".join(f"{category} {gib(n_bytes)}" for category, n_bytes in rank.at_update.items())
        lines.insert(0, f"update    rank {rank.rank} holds {sizes}")
    return lines


@dataclass(frozen=True)
class Finish:
    # `steps` (each rank had done its steps), `program` (it ended by itself), or a reason to end it, in words
    cause: str
    exit_code: int = 0  # of the program, if it ended by itself


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of processes in a folder; one that is just being replaced is complete, too."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return records


def ranks_of(records: Sequence[dict[str, Any]]) -> tuple[Rank, ...]:
    """The processes that used a GPU, by rank; of a rank that was started again, the last process that trains."""
    ranks = {}
    for record in sorted(records, key=lambda record: (int(record["steps"]) > 0, int(record["pid"]))):
        if not record["devices"]:
            continue
        device, peaks = max(record["devices"].items(), key=lambda entry: int(entry[1]["reserved"]))
        ranks[int(record["rank"])] = Rank(
            rank=int(record["rank"]), world_size=int(record["world_size"]), pid=int(record["pid"]), device=int(device),
            allocated=int(peaks["allocated"]), reserved=int(peaks["reserved"]), phase=str(peaks["phase"]),
            step=int(peaks["step"]), steps=int(record["steps"]),
            ooms=sum(int(each_device["ooms"]) for each_device in record["devices"].values()),
            nccl_groups=int(record["nccl_groups"]), types=tuple(record.get("types", ())),
            at_update=record.get("at_update", {}), at_peak=record.get("peak", {}), host=int(record.get("peak_rss", 0)),
            with_messages=tuple(map(tuple, record.get("with_messages", ()))),
            has_whole_history=bool(record.get("has_whole_history", True)),
            is_warming_up=bool(record.get("is_warming_up", False)),
            seen=frozenset(record.get("seen", ())), allowed=record.get("allowed", {}).get(device),
            growth=record.get("growth", {}), never_stepped=tuple(record.get("never_stepped", ())),
            lines=tuple(record.get("lines", {}).get(device, ())),
            end=record["end"],
        )  # fmt: skip
    return tuple(ranks[number] for number in sorted(ranks))


def first_error(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first exception of processes that used a GPU, else of the others; a launcher's own comes last."""
    failed = [record for record in records if record["end"].get("kind") == "exception"]

    def order(record: dict[str, Any]) -> tuple[bool, bool, float]:
        end = record["end"]
        return end["type"] in _LAUNCHERS_ERRORS, not record["devices"], float(end["time"])

    return min(failed, key=order, default=None)


def assumptions_of(records: Sequence[dict[str, Any]]) -> tuple[Assumption, ...]:
    """The assumptions of all ranks, the most frequent first; the count of a line is that of the rank with most."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        for entry in record.get("assumptions", ()):
            key = entry["assumption"], entry["source_line"]
            counts[key] = max(counts.get(key, 0), int(entry["count"]))
    ordered = sorted(counts.items(), key=lambda entry: -entry[1])
    return tuple(Assumption(kind, source_line, count) for (kind, source_line), count in ordered)


def judge(
    records: Sequence[dict[str, Any]], card: Gpu, steps: int, finish: Finish, started: RehearsedWorld | None = None,
    cards: Sequence[CardUse] = (), until: str = "",
) -> Verdict | None:  # fmt: skip
    """The verdict on a rehearsal; None for a program that ended well and used no GPU.

    `steps`: optimizer steps after which each rank was to end. `started`: the world of which the rehearsal started some
    ranks. `cards`: what processes held of each card. `until`: the event that was to end it, in place of `steps`.
    """
    shared = tuple(use for use in cards if len(use.held) > 1)
    verdict = _judge(records, card, 0 if until else steps, finish, started, shared, until)
    if verdict is None:
        return None
    notes = verdict.notes
    if started is not None:
        live = ", ".join(map(str, started.live))
        pretended = "; the others were pretended, their parts are copies, and each is assumed on a card of its own"
        notes = (
            f"live of {started.world_size} ranks: {live}{pretended * (len(started.live) < started.world_size)}",
            *notes,
        )
    return replace(verdict, notes=notes, assumptions=assumptions_of(records), cards=shared)


def _judge(
    records: Sequence[dict[str, Any]], card: Gpu, steps: int, finish: Finish, started: RehearsedWorld | None,
    shared: Sequence[CardUse], until: str,
) -> Verdict | None:  # fmt: skip
    ranks = ranks_of(records)
    # Processes that have their steps are killed, which others may report as errors. Memory that ran out before counts.
    ended_by = [record for record in records if finish.cause != "steps" or _ran_out(record["end"])]
    error = first_error(ended_by)
    if error is not None:
        return _of_error(error, ranks, card, finish)
    if finish.cause == "program" and finish.exit_code:
        reason = f"the program ended with exit code {finish.exit_code} and no exception of Python; its output is above"
        return Verdict(FAILED, reason, card, ranks)
    if not ranks:
        return None if finish.cause == "program" else Verdict(NOT_KNOWN, f"{finish.cause}, before a GPU was used", card)
    needed = _needed(ranks, card, shared)
    expected = range(ranks[0].world_size) if started is None else started.live
    missing = sorted(set(expected) - {rank.rank for rank in ranks})
    if missing:
        names = ", ".join(map(str, missing[:8]))
        return Verdict(NOT_KNOWN, f"of {ranks[0].world_size} ranks these used no GPU: {names}", card, ranks)
    if finish.cause not in ("steps", "program"):
        slowest = min(ranks, key=lambda rank: rank.steps)
        of_steps = f"{slowest.steps} of {steps} steps" if steps else f"{slowest.steps} steps and was not done"
        waiting = [f"; {_named(optimizer)} never stepped" for rank in ranks for optimizer in rank.never_stepped][:1]
        reason = f"{finish.cause}; rank {slowest.rank} had done {of_steps}{''.join(waiting)}"
        return Verdict(NOT_KNOWN, reason, card, ranks, needed, at_least=True)
    verdict = _of_memory(ranks, card, shared, _notes(ranks, steps))
    reason = _not_seen(verdict, finish, started, shared, until) if verdict.kind == FITS else ""
    return replace(verdict, kind=NOT_KNOWN, reason=reason, at_least=True) if reason else verdict


def _named(optimizer: dict[str, Any]) -> str:
    sizes = f"{gib(optimizer['parameters'])} of parameters, about {gib(optimizer['more'])} more"
    return f"{optimizer['name']} of {_shortened(optimizer['source_line'])} ({sizes})"


def _not_seen(
    verdict: Verdict, finish: Finish, started: RehearsedWorld | None, shared: Sequence[CardUse], until: str
) -> str:
    """Why a program that would fit by what ran may still not fit; empty if nothing tells so."""
    ranks = verdict.ranks
    if until and until not in verdict.seen:
        how = "by torch.save or safetensors" if until == "save" else "with the trained model in eval()"
        return f"the program came to no {until} {how}: it {verdict.reason} in what it did"
    if finish.cause == "program":  # all that it does was seen
        return ""
    for rank in ranks:
        for optimizer in rank.never_stepped:
            return f"{_named(optimizer)} never stepped in {rank.steps} steps: --steps {4 * rank.steps}"
        if rank.growth:
            spare = verdict.card.memory - (verdict.needed or 0)
            full_at = rank.steps + spare // rank.growth["bytes_a_step"] + 1
            rate = gib(rank.growth["bytes_a_step"])
            filled = f"it grows {rate} a step and fills the card at step {full_at:,}"
            return f"{filled}; after {rank.steps} it {verdict.reason}"
    if started is not None and shared and len(started.live) < started.world_size:
        return (
            f"live ranks share card {shared[0].number}, and pretended ones of that machine may, too: "
            f"--live {','.join(map(str, range(started.per_node)))}"
        )
    return ""


def _ran_out(end: dict[str, Any]) -> bool:
    return end.get("type") == "OutOfMemoryError" or "CUDA out of memory" in end.get("message", "")


def _of_error(error: dict[str, Any], ranks: tuple[Rank, ...], card: Gpu, finish: Finish) -> Verdict:
    end = error["end"]
    first_line = (str(end["message"]).splitlines() or [""])[0].partition(" GPU ")[0]  # it goes on with sizes
    line = f", {end['where']}" if end["where"] else ""
    is_rank = int(error["pid"]) in {rank.pid for rank in ranks} or not error["devices"]
    name = f"rank {error['rank']}" if is_rank else f"process {error['pid']}"
    reason, needed = f"{name}: {end['type']}: {first_line}{line}", _needed(ranks, card) if ranks else None
    if _ran_out(end):
        limited = next((rank for rank in ranks if rank.rank == error["rank"] and rank.allowed is not None), None)
        if limited is not None:
            reason = f"the program lets torch take {gib(limited.allowed or 0)} of {card.name}; {reason}"
        return Verdict(DOES_NOT_FIT, reason, card, ranks, needed, at_least=True)
    if end["type"] == "PretendedRankError":
        asked_rank = re.search(r"rank (\d+), which is pretended", end["message"])
        pretended = int(asked_rank[1]) if asked_rank else None
        return Verdict(NOT_KNOWN, reason, card, ranks, needed, at_least=True, pretended=pretended)
    if _NOT_EMULATED.search(end["message"]):
        notes = ["the emulated GPU computes nothing here; docs/rehearse.md lists what a program cannot ask of it"]
        match = re.match(r"(.+?:[1-9]\d*): ", end["where"])
        if "not computed" in end["message"] and match:
            name = match[1].rpartition("/")[2]
            notes.append(f"--assume '{name}=N' lets it go on: N is each number that it reads, or N values are true")
        return Verdict(NOT_KNOWN, reason, card, ranks, needed, at_least=True, notes=tuple(notes))
    code = f" (exit code {finish.exit_code})" if finish.exit_code else ""
    return Verdict(FAILED, reason + code, card, ranks)


def _of_memory(ranks: tuple[Rank, ...], card: Gpu, shared: Sequence[CardUse], notes: tuple[str, ...]) -> Verdict:
    needed = _needed(ranks, card, shared)
    largest = max(ranks, key=lambda rank: rank.reserved + rank.outside(card))
    size = f"{card.name} ({gib(card.memory)})"
    limited = next((rank for rank in ranks if rank.allowed is not None and rank.reserved > rank.allowed), None)
    if limited is not None:
        reason = (
            f"rank {limited.rank} needs {gib(limited.reserved)}, and the program lets torch take "
            f"{gib(limited.allowed or 0)} of {size} (set_per_process_memory_fraction)"
        )
        return Verdict(DOES_NOT_FIT, reason, card, ranks, needed, notes=notes)
    if needed <= card.memory:
        lacking = sorted({name for rank in ranks for name in rank.types if card.capability < NEEDS[name][0]})
        missing = "".join(f"; but {card.name} has no {name}: {NEEDS[name][1]}" for name in lacking)
        reason = f"fits {size} with {gib(card.memory - needed)} to spare{missing}"
        return Verdict(FITS, reason, card, ranks, needed, notes=notes)
    fullest = max(shared, key=lambda use: _of_card(use, ranks, card), default=None)
    if fullest is not None and _of_card(fullest, ranks, card) == needed:
        reason = f"needs {gib(needed)} of {size}, with the estimates for NCCL: {_shared(fullest, ranks)}"
        return Verdict(DOES_NOT_FIT, reason, card, ranks, needed, notes=notes)
    if largest.allocated + largest.outside(card) <= card.memory:
        reason = (
            f"rank {largest.rank} fits {size} only if the allocator gives {gib(needed - card.memory)} of its cache back"
        )
        return Verdict(NOT_KNOWN, reason, card, ranks, needed, notes=notes)
    reason = f"rank {largest.rank} needs {gib(needed)} of {size}, with the estimates for NCCL and the context"
    return Verdict(DOES_NOT_FIT, reason, card, ranks, needed, notes=notes)


def _needed(ranks: Sequence[Rank], card: Gpu, shared: Sequence[CardUse] = ()) -> int:
    """Bytes of the fullest card. A card of one process: its allocator's peak, and the estimates for the rest."""
    alone = [rank.reserved + rank.outside(card) for rank in ranks]
    return max([*alone, *(_of_card(use, ranks, card) for use in shared)])


def _of_card(use: CardUse, ranks: Sequence[Rank], card: Gpu) -> int:
    """Bytes of a shared card: what was held at one time, contexts included, and NCCL's buffers by estimate."""
    return use.peak + sum(rank.nccl_groups * card.per_communicator for rank in ranks if rank.pid in use.held)


def _notes(ranks: tuple[Rank, ...], steps: int) -> tuple[str, ...]:
    notes = []
    fewest = min(rank.steps for rank in ranks)
    if fewest < min(steps, 2):
        notes.append(f"{fewest} optimizer steps were seen: the peak is that of what ran")
    caught = [rank for rank in ranks if rank.ooms]
    if caught:
        notes.append(
            f"rank {caught[0].rank} ran out of memory {caught[0].ooms} times; the program caught it and went on: "
            "the peaks are those of what it tried, too"
        )
    warming = next((rank for rank in ranks if rank.is_warming_up), None)
    if warming is not None:
        notes.append(
            f"rank {warming.rank}'s last step ran on a side stream, as before the capture of a CUDA graph: "
            f"if it captures one, --steps {warming.steps + 1} shows its memory"
        )
    sending = next((rank for rank in ranks if rank.with_messages), None)
    if sending is not None:
        shown = sorted({rank.rank for rank in ranks}.union(*sending.with_messages))
        notes.append(
            f"rank {sending.rank} exchanges messages with pretended ranks, as the stages of a pipeline do, which may "
            f"hold more: --live {','.join(map(str, shown))} shows them"
        )
    notes += [
        f"rank {rank.rank}'s allocator did more than its history holds: what it held at its peak is not told"
        for rank in ranks
        if not rank.has_whole_history
    ]
    return tuple(notes)


METRICS = ("peak", "reserved", "allocated")
"""Of the rank with most: all that it needs of a card, and the peaks of torch's allocator."""


@dataclass(frozen=True)
class Expectation:
    """Less than (or, with `inclusive`, as much as) a number of bytes."""

    metric: str
    inclusive: bool
    n_bytes: int
    text: str

    def applied(self, verdict: Verdict) -> Verdict:
        """The verdict; one that fits and exceeds the limit becomes one that does not fit."""
        if verdict.kind != FITS or verdict.needed is None:
            return verdict
        peaks = {
            "peak": verdict.needed, "reserved": max(rank.reserved for rank in verdict.ranks),
            "allocated": max(rank.allocated for rank in verdict.ranks),
        }  # fmt: skip
        size = peaks[self.metric]
        if size < self.n_bytes or (self.inclusive and size == self.n_bytes):
            return verdict
        reason = f"{self.metric} is {gib(size)}, and `{self.text}` was expected; it {verdict.reason}"
        return replace(verdict, kind=DOES_NOT_FIT, reason=reason)


def parse_expectation(text: str) -> Expectation:
    match = re.fullmatch(r"\s*(\w+)\s*(<=?)\s*([^<>=]+?)\s*", text)
    if match is None or match[1] not in METRICS:
        raise ConfigError(f"--expect {text!r} is no limit", f"--expect 'peak < 70 GiB'; or {' or '.join(METRICS[1:])}")
    return Expectation(match[1], match[2] == "<=", parse_bytes(match[3], "--expect"), " ".join(text.split()))
