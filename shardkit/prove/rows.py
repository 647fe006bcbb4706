"""The rows of the data that ranks draw and see: those of a step together, and which repeat or are missing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from .inject import shardkit_pieces as pieces

Records = Mapping[int, dict[str, Any]]
"""Rank → its record of a step."""
Draws = dict[tuple[int, int], list[Any]]
"""(rank, micro-batch) → the row numbers that its loader's sampler drew."""
SAME, COPIES, SPLIT, DIFFERENT = "same", "copies", "split", "different"


@dataclass(frozen=True)
class Feed:
    """What ranks drew in each step: row numbers of a loader, or whole batches where there are none."""

    loader: int  # the number of the one that trains, in the order in which the program iterates over loaders
    steps: tuple[Draws, ...]
    kind: str = "rows"  # "batches" of a loader without row numbers, or of the "calls" of the outermost module
    sources: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # a batch's hash → (rank, index)

    def plan(self, loader: int, draws: Sequence[list[Any]]) -> dict[str, Any]:
        """What the recorder of one process is told to feed."""
        if self.kind == "rows":
            return {"rows": {loader: draws}}
        batches = [[self.sources[batch] for batch in draw] for draw in draws]
        return {"batches": {loader: batches}} if self.kind == "batches" else {"calls": batches}

    def united(self, step: int, n_micro_batches: int | None = None) -> list[list[Any]]:
        """The draws of all ranks in a step (from 0) as one process makes them, a list for each micro-batch."""
        draws = self.steps[step]
        lists = [unite([rows for (_, m), rows in sorted(draws.items()) if m == micro]) for micro in self.micros(step)]
        if n_micro_batches in (None, len(lists)):
            return lists
        flat = list(chain.from_iterable(lists))
        size = math.ceil(len(flat) / n_micro_batches)
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def micros(self, step: int) -> list[int]:
        return sorted({micro for _, micro in self.steps[step]})


def unite(lists: Sequence[list[Any]]) -> list[Any]:
    """All rows once for each data-parallel rank: where every list occurs equally often, ranks share their rows."""
    counts = Counter(map(tuple, lists))
    distinct = list(counts) if len(set(counts.values())) == 1 else list(map(tuple, lists))
    return list(chain.from_iterable(distinct))


def drawn(steps: Sequence[Records], batches: Records | None = None) -> Feed | None:
    """What the training loader drew in each step; None if that can not be replayed.

    `batches`: rank → the batches that no row numbers name.
    """
    ending = steps[-1]
    lengths = {
        int(loader): len(draws) for loader, draws in next(iter(ending.values()))["draws"].items() if draws and draws[0]
    }
    if not lengths:
        return _of_batches(steps, batches or {})
    loader = max(lengths, key=lambda number: lengths[number])
    starts: Counter[int] = Counter()
    n_backwards: Counter[int] = Counter()
    feeds = []
    for records in steps:
        draws: Draws = {}
        for rank, record in records.items():
            n_backwards[rank] += len(record["backwards"])
            # A loop may hold a batch ahead of its backward, and may take several backwards for a batch.
            stop = min(n_backwards[rank], int(record["yielded"].get(str(loader), 0)))
            all_draws = ending[rank]["draws"].get(str(loader), [])
            for micro, index in enumerate(range(starts[rank], min(stop, len(all_draws)))):
                if all_draws[index] is None:
                    return None
                draws[rank, micro] = all_draws[index]
            starts[rank] = stop
        feeds.append(draws)
    return Feed(loader, tuple(feeds)) if all(feeds) else None


def _of_batches(steps: Sequence[Records], batches: Records) -> Feed | None:
    """A feed of whole batches: those of a loader, or of the calls of a module that returns the loss."""
    keys = {key for index in batches.values() for key in index}
    if len(keys) != 1 or any(batch is None for index in batches.values() for batch in chain(*index.values())):
        return None
    key = keys.pop()
    if key == "calls" and any(record.get("loss_outside") for records in steps for record in records.values()):
        return None
    hashes = {rank: [pieces.digest(batch) for batch in index[key]] for rank, index in batches.items()}
    starts: Counter[int] = Counter()
    n_backwards: Counter[int] = Counter()
    feeds = []
    for records in steps:
        draws: Draws = {}
        for rank, record in records.items():
            n_backwards[rank] += len(record["backwards"])
            n_seen = record["calls"] if key == "calls" else record["yielded"][key]
            stop = min(n_seen if key == "calls" else n_backwards[rank], n_seen, len(hashes[rank]))
            for micro, index in enumerate(range(starts[rank], stop)):
                draws[rank, micro] = [hashes[rank][index]]
            starts[rank] = stop
        feeds.append(draws)
    sources = {batch: (rank, index) for rank, batches_ in hashes.items() for index, batch in enumerate(batches_)}
    kind = "calls" if key == "calls" else "batches"
    return Feed(-1 if kind == "calls" else int(key), tuple(feeds), kind, sources) if all(feeds) else None


def compare(parallel: Records, reference: Records) -> tuple[str, str]:
    """Whether the modules of both runs saw the same rows in a step: a kind, and words for a kind but SAME."""
    parallel = fed(parallel, reference)
    key = key_of(parallel, reference)
    process = Counter(row[key] for record in reference.values() for row in chain(*record["rows"]))
    ranks = Counter(row[key] for record in parallel.values() for row in chain(*trained(record)))
    if ranks == process:
        return SAME, ""
    ratios = {ranks[row] / process[row] for row in process}
    if set(ranks) == set(process) and len(ratios) == 1:
        return COPIES, f"each row goes to {ratios.pop():g} ranks"
    if _is_split(parallel, reference):
        return SPLIT, "each row is split between ranks"
    n_missing = sum(ranks[row] < count for row, count in process.items())
    n_others = sum(count > process.get(row, 0) for row, count in ranks.items())
    return DIFFERENT, (
        f"{n_missing} of {process.total()} rows of one process are missing, {n_others} are others or repeated"
    )


def _is_split(parallel: Records, reference: Records) -> bool:
    """Whether ranks saw parts of the rows of one process: the same tokens together, in each argument that both have."""
    sides: list[dict[str, Counter[int]]] = []
    cut: dict[str, set[int]] = {}
    for side in (parallel, reference):
        tokens: dict[str, Counter[int]] = {}
        for row in chain(*(chain(*record["rows"]) for record in side.values())):
            for name, numbers in row["tokens"].items():
                tokens.setdefault(name, Counter()).update(numbers)
            for name, number in row["cut"].items():
                cut.setdefault(name, set()).add(number)
        sides.append(tokens)
    names = sides[0].keys() & sides[1].keys()
    # A row and its parts end in runs of other lengths: the tokens of such runs are not counted.
    ranks, process = (
        {name: {n: count for n, count in side[name].items() if n not in cut.get(name, ())} for name in names}
        for side in sides
    )
    n_rows = sum(len(batch) for record in reference.values() for batch in record["rows"])
    for name in names:
        padding = Counter(ranks[name])
        padding.subtract(process[name])
        padding = Counter({n: count for n, count in padding.items() if count})
        # Rows are padded, with one token, to a multiple of the ranks.
        if len(padding) > 1 or not all(0 < count < n_rows * len(parallel) for count in padding.values()):
            return False
    return any(process.values())


def fed(parallel: Records, reference: Records) -> Records:
    """The ranks without later stages of a pipeline: these train other parameters than those that are fed rows."""
    with_tokens = {
        rank: record for rank, record in parallel.items() if any(row["tokens"] for row in chain(*record["rows"]))
    }
    parallel = with_tokens or parallel  # a later stage is fed activations
    key = key_of(parallel, reference)
    process = {row[key] for record in reference.values() for row in chain(*record["rows"])}
    readers = {
        rank for rank, record in parallel.items() if any(row[key] in process for row in chain(*trained(record)))
    }  # fmt: skip
    names = {name for rank in readers for name in parallel[rank]["raw"]}
    return {
        rank: record
        for rank, record in parallel.items()
        if not readers or rank in readers or not names.isdisjoint(record["raw"])
    }


def trained(record: dict[str, Any]) -> list[Any]:
    """The rows of each call, without the one by which a stage of a pipeline learns the shapes of its first rows."""
    calls: list[Any] = record["rows"]
    return calls[1:] if len(calls) > len(record["backwards"]) and calls[:1] == calls[1:2] else calls


def key_of(parallel: Records, reference: Records) -> str:
    """The hash by which both runs' rows are compared: without labels where only one run's modules are given them."""
    with_labels = {
        any(row["targets"] is not None for record in side.values() for row in chain(*record["rows"]))
        for side in (parallel, reference)
    }
    return "row" if len(with_labels) == 1 else "inputs"


def repeated(feed: Feed, steps: Sequence[Records], start: Records) -> list[str]:
    """Words on rows that several ranks draw in a step though their gradients are averaged."""
    words = []
    for number, (draws, records) in enumerate(zip(feed.steps, steps, strict=True), start=1):
        by_rank = {
            rank: list(chain(*(draws[key] for key in sorted(draws) if key[0] == rank))) for rank in sorted(records)
        }
        seen = {rank: [row["row"] for row in chain(*record["rows"])] for rank, record in records.items()}
        group = start[0]["group"] or list(by_rank)
        ranks: list[int] = []
        for rank in group:
            # Ranks that draw the same rows and see others take parts of the same sequences: they are one data rank.
            parts = (data for data in ranks if by_rank[data] == by_rank.get(rank) and seen[data] != seen[rank])
            if rank in by_rank and next(parts, None) is None:
                ranks.append(rank)
        sharded = start[0]["group"] is None and any(
            piece["offset"] is not None or is_part for piece, is_part in _pieces(start)
        )
        if len(ranks) < 2 or sharded:
            continue
        if all(by_rank[rank] == by_rank[ranks[0]] for rank in ranks):
            words.append(
                f"step {number}: ranks {', '.join(map(str, ranks))} draw the same rows: the data is not split"
                " (no DistributedSampler?)"
            )
            continue
        counts = Counter(chain.from_iterable(by_rank[rank] for rank in ranks))
        twice = [row for row, count in counts.items() if count > 1]
        if twice:
            shown = ", ".join(map(str, twice[:5]))
            words.append(f"step {number}: several ranks draw rows {shown} ({len(twice)} of {len(counts)})")
    return words


def _pieces(start: Records) -> list[tuple[dict[str, Any], bool]]:
    """Each piece of the weights at the start, and whether ranks hold pieces of several shapes or contents."""
    hashes = {
        name: {record["weights"][name]["hash"] for record in start.values() if name in record["weights"]}
        for name in start[0]["weights"]
    }
    return [(piece, len(hashes[name]) > 1) for name, piece in start[0]["weights"].items()]


def over_the_epoch(feed: Feed, parallel: Records, reference: Records | None) -> list[str]:
    """Words on rows that several ranks draw in an epoch, or that none of them draws and one process does."""
    key = str(feed.loader)
    if feed.kind != "rows":
        return []
    epochs = {
        rank: list(chain(*record["draws"].get(key, []), *record["epoch"].get(key, [])))
        for rank, record in parallel.items()
        if "epoch" in record
    }
    if len(epochs) < 2 or all(rows == epochs[0] for rows in epochs.values()):
        return []
    sets = [set(rows) for rows in unique(list(epochs.values()))]
    union = set[Any]().union(*sets)
    n_draws, n_ranks = sum(map(len, sets)), len(epochs)
    # A sampler that gives each rank as many rows repeats a few at the epoch's end.
    allowed = max(0.02 * len(union), 2 * n_ranks)
    if n_draws - len(union) > allowed:
        return [
            f"the epoch: {n_draws - len(union)} of {n_draws} draws are of rows that another rank draws too"
            " (each rank samples from all the data?)"
        ]
    rows = list(chain(*reference[0]["epoch"].get(key, []))) if reference and "epoch" in reference[0] else []
    are_permutations = len(rows) == len(set(rows)) and all(
        len(numbers) == len(set(numbers)) for numbers in epochs.values()
    )
    missing = set(rows) - union
    batch = max((len(draw) for draw in parallel[0]["draws"].get(key, [[]])), default=0)
    if are_permutations and len(missing) > max(0.02 * len(rows), 2 * n_ranks * batch):
        return [f"the epoch: no rank draws {len(missing)} of {len(rows)} rows that one process draws"]
    return []


def unique(lists: list[list[Any]]) -> list[list[Any]]:
    return [list(rows) for rows in dict.fromkeys(map(tuple, lists))]
