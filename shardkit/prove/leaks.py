"""`--leak`: whether tokens of one document move what a model computes for another document of the same row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .replay import Proof
from .runs import PlannedStep, say
from .verdict import ALLOWED, CANNOT_TELL, FAILED, NOT_SAME, ROWS, SAME, ProofVerdict

DocumentOf = tuple[int, int]
"""(rank, index among its documents)"""
FIX = (
    "rows of several documents, told apart by position_ids that restart, cu_seqlens, seq_idx, document_ids, a mask of"
    " tokens by tokens, or --leak-separator ID for the token between them"
)


@dataclass(frozen=True)
class LeakSearch:
    separator: int | None = None  # the token between documents; None: as the program's arguments tell them apart


@dataclass(frozen=True)
class LeakAnswer:
    leaks: bool | None  # None: it cannot be told
    words: str
    fix: str = FIX


def look(proof: Proof, search: LeakSearch, verdict: ProofVerdict) -> ProofVerdict:
    """A verdict with documents in view.

    Where the ranks' gradients are one process's, one process tells for both. Else the parallel program is looked at,
    in which a leak may be the cause.
    """
    if verdict.kind == FAILED:
        return verdict
    plan = {"leak": {"separator": search.separator}}
    is_right = verdict.kind in (SAME, ROWS)
    if is_right:
        say("one process, with other tokens in one document after the other")
        numbers = range(1, len(proof.parallel.steps) + 1)
        # After the last step, as weights that start at zero hide what comes before them.
        steps = [PlannedStep(f"leak{n}", weights=numbers[-1], gradients_only=True) for n in numbers]
        feeds = None if proof.process_loader is None else [proof.united(number) for number in numbers]
        proof.take(steps, feeds, True, **plan)
        run = proof.newest
        assert run is not None, "one process was started"
    else:
        say("the parallel run, with other tokens in one document after the other")
        run = proof.runner.start(proof.command, [PlannedStep("leak1")], **plan)
    records = run.record("leak")
    if not records:
        answer = LeakAnswer(None, f"the run with other tokens ended before: {run.error()}", "a program that runs again")
    else:
        answer = judge(records)
    if answer.leaks:
        headline = "NOT THE SAME: tokens of one document move another document"
        headline += ", in one process too" if is_right else f" ({proof.world_size} ranks)"
        reasons = (f"documents see each other: {answer.words}", *(() if is_right else verdict.reasons))
        return replace(verdict, kind=NOT_SAME, headline=headline, word="leak", reasons=reasons)
    if answer.leaks is False or not is_right:
        prefix = "" if answer.leaks is False else "leaks cannot be told: "
        return replace(verdict, lines=(*verdict.lines, prefix + answer.words))
    reasons = (answer.words, f"what would tell: {answer.fix}")
    lines = (verdict.headline, *verdict.lines)
    return replace(verdict, kind=CANNOT_TELL, headline=f"CANNOT TELL: {answer.words}", lines=lines, reasons=reasons)


def judge(records: Mapping[int, dict[str, Any]]) -> LeakAnswer:
    """What the ranks' records of changed documents show."""
    telling = {rank: record for rank, record in records.items() if "noise" in record}
    if not telling:
        reasons = sorted({record["reason"] for record in records.values() if record.get("reason")})
        return LeakAnswer(None, "; ".join(reasons))
    allowed = max(max(ALLOWED * record["noise"], record["eps"], 1e-6) for record in telling.values())
    between_rows = max(record["other_rows"] for record in telling.values())
    if between_rows > allowed:
        words = (
            f"rows act on each other in a batch: other tokens in one move another by {between_rows:.2g} of its output"
        )
        return LeakAnswer(None, words, "a batch of one row, or a model without batch norm and capacities")
    effects = list(_effects(telling))
    hows = sorted({record["how"] for record in telling.values() if record["how"]})
    within = max((change for _, _, change, is_itself in effects if is_itself), default=0.0)
    if not within > allowed:
        return LeakAnswer(None, "other tokens move nothing, not even their own document", "weights that are not zero")
    pairs = [effect for effect in effects if not effect[3]]
    worst = max(pairs, key=lambda effect: effect[2], default=None)
    if worst is None:
        return LeakAnswer(None, "no two documents are surely different ones")
    source, victim, change, _ = worst
    if not change > allowed:
        n_documents = max(len(record["documents"]) for record in telling.values())
        words = f"no leak: {len(pairs)} pairs of {n_documents} documents, told apart by {', '.join(hows)}"
        return LeakAnswer(False, f"{words} (at most {change:.1g} of an output, {allowed:.1g} allowed)")
    words = (
        f"other tokens in {_words(telling, source)} move {_words(telling, victim)} by {change:.2g} of its output"
        f" (rounding {allowed:.1g}); told apart by {', '.join(hows)}"
    )
    if hows == ["EOS"]:  # chats end each turn by it, which see each other
        words = f"documents may see each other, if EOS or BOS ends one: {words}"
        return LeakAnswer(None, words, "--leak-separator ID, if that token stands between documents")
    return LeakAnswer(True, words)


def _effects(records: Mapping[int, dict[str, Any]]) -> Iterator[tuple[DocumentOf, DocumentOf, float, bool]]:
    """(changed document, moved document, how far, whether they are one), of those that are surely one or two."""
    for rank, record in records.items():
        for source_rank, index, changes in record["changes"]:
            if rank != source_rank and record["rows"] == records.get(source_rank, {}).get("rows"):
                continue  # the source's own rank tells of these rows
            documents = enumerate(records.get(source_rank, {"documents": []})["documents"])
            sources = [(at, document) for at, document in documents if document["number"] == index]
            for (at, source), (to, moved) in product(sources, enumerate(record["documents"])):
                if source["row"] != moved["row"]:
                    continue
                change = changes[to] if math.isfinite(changes[to]) else math.inf
                if rank == source_rank:
                    later = max(source, moved, key=lambda document: document["start"])
                    if source is moved or later["begun"]:
                        yield (source_rank, at), (rank, to), change, source is moved
                elif source["begun"] and moved["begun"] and not _may_be_one(rank, moved, source_rank, source):
                    yield (source_rank, at), (rank, to), change, False


def _may_be_one(rank: int, document: dict[str, Any], source_rank: int, source: dict[str, Any]) -> bool:
    """Whether a document that ends with a rank's part of the row may go on with the next rank's part."""
    before, after = (document, source) if rank < source_rank else (source, document)
    return abs(rank - source_rank) == 1 and bool(before["is_last"]) and not after["start"]


def _words(records: Mapping[int, dict[str, Any]], document_of: DocumentOf) -> str:
    rank, index = document_of
    document = records[rank]["documents"][index]
    of_rank = f" of rank {rank}" if len(records) > 1 else ""
    return f"row {document['row']}, tokens {document['start']} to {document['stop'] - 1}{of_rank}"
