"""Judge the steps of a proof in order, and explain the first that differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch

from ..errors import listed
from . import rows, weights
from .compare import Difference, Side, compare
from .diagnosis import Counts, common_factor, explain, grouped
from .inject import shardkit_pieces as pieces
from .replay import Proof
from .runs import PlannedStep, say
from .verdict import ALLOWED, CANNOT_TELL, NOT_SAME, ROWS, SAME, ProofVerdict

NO_INTERACTION = frozenset({"factor", "sign", "missing gradient", "not summed", "copies differ", "shard"})
"""Kinds of differences that rows which act on each other cannot make."""


class Judge:
    """Judges the steps in order; the first that differs is explained."""

    def __init__(self, proof: Proof, numbers: range, kinds: dict[int, tuple[str, str]]) -> None:
        self.proof, self.numbers, self.kinds = proof, numbers, kinds
        self.start = proof.parallel.record("start")
        reference = proof.taken["step1"].record("start")
        self.shapes = {name: tuple(piece["shape"]) for name, piece in reference[0]["weights"].items()}
        self.unverified = reference[0]["unverified"]
        self.worst = 0.0
        self.uncounted: tuple[int, ...] = ()  # one process's backwards that leave nothing
        self.notes: list[str] = []
        self.judged = 0  # the step whose gradients were compared last
        self.distances: dict[str, dict[str, object]] = {}  # of these gradients

    def verdict(self) -> ProofVerdict:
        verdict = self.copies_at_start()
        for number in self.numbers:
            verdict = verdict or self.step(number)
        verdict = verdict or self.same()
        return replace(verdict, notes=(*self.notes, *verdict.notes), step=self.judged, gradients=self.distances or None)

    def _not_same(self, lines: Sequence[str], word: str, **details: Any) -> ProofVerdict:
        headline = f"NOT THE SAME as one process ({self.proof.world_size} ranks)"
        return ProofVerdict(NOT_SAME, headline, tuple(lines), word=word, **details)

    def copies_at_start(self) -> ProofVerdict | None:
        """Ranks that hold copies of a weight are to start alike, bit for bit."""
        folder = str(self.proof.parallel.folder)
        apart = {}
        for name, by_rank in pieces.by_name(self.start, "weights").items():
            if name in self.shapes:
                ranks = pieces.assemble(folder, by_rank, self.shapes[name])[1]
                if ranks:
                    apart[name] = ranks
        if not apart:
            return None
        line = f"before step 1: {len(apart)} of {len(self.shapes)} parameters differ between ranks that hold copies"
        reason = "the ranks' copies differ from the start: seeds that are not tied, or no broadcast"
        return self._not_same(
            [f"{line}; last in forward order {[*apart][-1]}"],
            "copies differ",
            parameter=[*apart][-1],
            reasons=(reason,),
        )

    def step(self, number: int) -> ProofVerdict | None:
        parallel, reference = self.proof.ranks(number), self.proof.side(f"step{number}")
        moved = self.proof.side(f"moved{number}") if f"moved{number}" in self.proof.taken else None
        micros = [len(record["backwards"]) for record in parallel.records.values()]
        targets = sum(
            row["targets"] or 0 for record in parallel.records.values() for batch in record["rows"] for row in batch
        )
        counts = Counts(self.proof.world_size, max(micros), targets)
        plain = None
        self.uncounted = weights.uncounted(reference, self.shapes) if number == 1 else ()
        if self.uncounted:
            plain = weights.added(reference)
        differences = compare(
            parallel, reference, moved, lambda tensors: explain(tensors, counts),
            substitute=None if plain is None else plain.get,
        )  # fmt: skip
        self.judged = number
        self.distances = {d.name: {"times": d.times, "cause": d.cause} for d in differences.values()}
        blind = self._blind(number, reference)
        if blind is not None:
            return blind
        self.worst = max([self.worst, *(d.times for d in differences.values() if not d.is_wrong)])
        if any(d.is_wrong for d in differences.values()):
            return self.gradients(number, differences, counts, plain)
        return self.orphans(number) or self.clipping(number, counts) or self.updates(number, counts)

    def _blind(self, number: int, reference: Side) -> ProofVerdict | None:
        """The verdict where a comparison would see nothing."""
        norms = [piece["norm"] for name in reference if (piece := reference.of(name)[0]) is not None]
        losses = [loss for record in reference.records.values() for loss in record["losses"]]
        if not all(map(math.isfinite, [*norms, *losses])):
            reason = f"one process's gradients or losses of step {number} are not finite"
            return self._cannot_tell([], reason, "a smaller learning rate, or fp32")
        if not any(norms):
            return self._cannot_tell([], f"every gradient of step {number} is zero", "a program whose loss trains it")
        strangers = max(record["strangers"] for record in self.proof.ranks(number).records.values())
        if strangers:
            reason = f"an optimizer trains {strangers} tensors that belong to no module whose call was seen"
            return self._cannot_tell([], reason, "parameters of modules that the program calls")
        return None

    # ---- gradients

    def gradients(
        self, number: int, differences: dict[str, Difference], counts: Counts, plain: dict[str, torch.Tensor] | None
    ) -> ProofVerdict:
        wrong = [d for d in differences.values() if d.is_wrong]
        kind, words = self.kinds[number]
        lines = [
            f"step {number}: {len(wrong)} of {len(differences)} gradients differ;"
            f" last in forward order {wrong[-1].name}",
            self._losses(number),
            *(f"  {line}" for line in grouped(differences)),
        ]  # fmt: skip
        factor = common_factor(differences)
        if kind == rows.DIFFERENT and factor is None:  # other rows make no multiple of each gradient
            reason = f"the ranks saw other rows than one process: {words}"
            return self._cannot_tell(lines, reason, self._way_to_rows())
        if self.unverified:
            reason = f"how the ranks' parts of {listed(self.unverified)} make the full weight is not known"
            return self._cannot_tell(lines, reason, "start both programs from the same seed or file, so that it shows")
        kinds = {d.kind for d in wrong}
        if kinds & {"not summed", "copies differ"} and self._stay_equal(number, wrong) and self._adds_up(number):
            reason = (
                "the ranks' gradients differ when the optimizer gets them, and their weights do not when it has stepped"
            )
            return self._cannot_tell(lines, f"{reason}: it adds them up by itself", "an optimizer of torch")
        # In 16 bits a few numbers are soon a multiple of others: without a common factor that says little.
        weak = {"other", "factor", "sign"} if "other" in kinds and factor is None else {"other"}
        word = (
            "sign"
            if factor is not None and factor < 0
            else max(kinds, key=lambda kind: (kind not in weak, sum(d.kind == kind for d in wrong), kind == "other"))
        )
        details: dict[str, Any] = {"parameter": wrong[-1].name, "factor": factor}
        is_ambiguous = factor is not None and abs(factor * counts.ranks - 1) < 2e-3 and self.proof.is_replay
        if kinds <= NO_INTERACTION and not is_ambiguous and plain is None:
            return self._not_same(lines, word, reasons=(self._cause(wrong, factor, counts),), **details)
        table, reason = self._table(number, plain, [d.name for d in wrong])
        if table is None and plain is not None:
            return self._not_same(lines, "micro-batches", reasons=(self._uncounted_words(),), **details)
        if table is None:
            if not is_ambiguous and (self._has_same_batches(number) or kinds <= NO_INTERACTION):
                return self._not_same(lines, word, reasons=(self._cause(wrong, factor, counts),), **details)
            return self._cannot_tell(
                lines,
                f"rows may act on each other in a batch or add up to the loss, and {reason}",
                "an --against that takes the ranks' micro-batches one after the other",
            )
        details["weights"] = table.as_json()
        if is_ambiguous and table.is_sum_loss:
            reason = "a loss that is a sum over rows: one process adds up what ranks average"
            fix = (
                f"wrong if it is divided by a count over all ranks (multiply it by {counts.ranks}); if not, name the"
                " program of one process with --against"
            )
            return self._cannot_tell(lines, reason, fix, table)
        if table.rows_interact and not kinds <= NO_INTERACTION and plain is None:
            reason = (
                "rows of a batch act on each other (batch norm, padding, in-batch negatives, a balance loss,"
                f" capacities): one process's gradient is no sum of its rows' (rest {table.process_remaining:.2g})"
            )
            fix = "--against a program that takes the ranks' batches one after the other, or a batch of one row"
            return self._cannot_tell(lines, reason, fix, table)
        if factor is not None and plain is None:
            return self._not_same(lines, word, reasons=(self._cause(wrong, factor, counts),), **details)
        if not table.is_weighted_sum and not kinds <= NO_INTERACTION and (sizes := self._other_sizes(number, table)):
            reason = f"rows may act on each other in a batch, and {sizes}"
            return self._cannot_tell(lines, reason, "an --against that cuts its batches as the ranks do", table)
        words = table.words()
        if plain is not None and not table.is_weighted_sum:
            word, words = "micro-batches", self._uncounted_words()
        elif table.is_weighted_sum:
            word = "micro-batches"
            lines = [*lines[:2], *(f"  {line}" for line in table.lines())]
        else:
            lines.append(f"  {words} (rest {table.remaining:.2g})")
            words = self._cause(wrong, factor, counts)
        return self._not_same(lines, word, reasons=(words,), **details)

    def _adds_up(self, number: int) -> bool:
        """Whether the ranks' update is that of one process's gradients, though no rank's gradients are: the optimizer
        adds them up. Of later steps nobody can tell, as one process's optimizer has no such state."""
        if number > 1:
            return True
        say("one process, stepping with its own gradients")
        proof = self.proof
        feeds = None if proof.feed is None or proof.process_loader is None else [proof.united(number)]
        proof.take([PlannedStep("free1", weights=0)], feeds, True)
        if "free1" not in proof.taken:
            return True
        ranks, process = proof.ranks(number, "after"), proof.side("free1", "after")
        distance = size = 0.0
        for name in process:
            before, update = (
                proof.weights_before(number, name, self.shapes[name]),
                process.full(name, self.shapes[name]),
            )
            tensor = ranks.full(name, self.shapes[name])[0]
            if before is not None and update[0] is not None and tensor is not None:
                distance += float((tensor.double() - update[0].double()).square().sum())
                size += float((update[0].double() - before.double()).square().sum())
        return distance < 1e-2 * size

    def _uncounted_words(self) -> str:
        numbers = ", ".join(map(str, self.uncounted))
        return f"backward {numbers} of a step leaves nothing in the gradient, in one process too"

    def _stay_equal(self, number: int, wrong: Sequence[Difference]) -> bool:
        """Whether the ranks' copies of weights stay equal from a step on with gradients that are not."""
        names = [d.name for d in wrong if d.kind in ("not summed", "copies differ") and d.name in self.shapes]
        # The first step of Adam is as large for all gradients of one sign: the later ones are looked at, too.
        afters = [self.proof.ranks(n, "after") for n in range(number, len(self.proof.parallel.steps) + 1)]
        if any(after.full(name, self.shapes[name])[1] for after in afters for name in names):
            return False
        full = {name: afters[0].full(name, self.shapes[name])[0] for name in names}
        before = {name: self.proof.weights_before(number, name, self.shapes[name]) for name in names}
        return any(
            weight is not None and tensor is not None and not torch.equal(weight, tensor)
            for tensor, weight in zip(full.values(), before.values(), strict=True)
        )

    def _cause(self, wrong: Sequence[Difference], factor: float | None, counts: Counts) -> str:
        if factor is not None:
            return f"{len(wrong)} gradients are {factor:.6g} times one process's: {counts.word(factor)}"
        return f"{wrong[-1].name}: {wrong[-1].cause}"

    def _losses(self, number: int) -> str:
        def mean(record: dict[str, Any]) -> str:
            losses = record["losses"]
            return f"{sum(losses) / len(losses):.5f}" if losses else "not seen"

        ranks = ", ".join(mean(record) for record in self.proof.parallel.record(f"step{number}").values())
        return f"  loss: ranks {ranks}; one process {mean(self.proof.side(f'step{number}').records[0])}"

    def _cannot_tell(
        self, lines: Sequence[str], reason: str, fix: str, table: weights.WeightTable | None = None
    ) -> ProofVerdict:
        details = [] if table is None else [f"  {line}" for line in table.lines()]
        return ProofVerdict(
            CANNOT_TELL, f"CANNOT TELL: {reason}", (*lines, *details), (reason, f"what would tell: {fix}"),
            weights=None if table is None else table.as_json(),
        )  # fmt: skip

    def _way_to_rows(self) -> str:
        if self.proof.feed is None:
            return (
                "rows that a torch DataLoader draws by number are replayed; or --against a program that sees the same"
            )
        if self.proof.feed.kind != "rows":
            return "an --against whose loader gives batches of the same keys, or data that does not depend on the rank"
        return "a data set and a collator that give the same row for the same number"

    def _has_same_batches(self, number: int) -> bool:
        """Whether each call of one process's module has the rows of each rank's call: nothing is batched otherwise."""
        records, parallel = self.proof.side(f"step{number}").records, self.proof.parallel.record(f"step{number}")
        fed = rows.fed(parallel, records)
        key = rows.key_of(fed, records)
        process = [sorted(row[key] for row in batch) for batch in records[0]["rows"]]
        sizes = list(map(len, process))
        kind = self.kinds[number][0]
        for rank, record in parallel.items():
            batches = [sorted(row[key] for row in batch) for batch in rows.trained(record)]
            if rank not in fed:  # a later stage, whose activations show how many rows they are of
                if sizes not in (list(map(len, batches)), list(map(len, batches[1:]))):  # it may learn shapes first
                    return False
            elif kind == rows.SPLIT:
                if list(map(len, batches)) != sizes:
                    return False
            elif batches != process:
                return False
        return True

    def _other_sizes(self, number: int, table: weights.WeightTable) -> str:
        """Words on calls of the ranks' modules with other numbers of rows than one process's for the same batch."""
        parallel, records = self.proof.parallel.record(f"step{number}"), self.proof.side(f"step{number}").records
        parts = [self.proof.side(f"part{number}-{index}").records[0] for index in range(len(table.parts))]
        ranks, process = (
            sorted({len(batch) for record in side for batch in rows.trained(record)})
            for side in (rows.fed(parallel, records).values(), parts)
        )
        return f"the ranks call modules with {ranks} rows, one process with {process}" if ranks != process else ""

    def _table(
        self, number: int, plain: dict[str, torch.Tensor] | None, wrong: Sequence[str]
    ) -> tuple[weights.WeightTable | None, str]:
        """The weight table of the parameters that are wrong in a step, or why there is none."""
        proof, feed = self.proof, self.proof.feed
        if feed is None or proof.process_loader is None:
            if feed is None or feed.kind != "rows":
                return None, "the rows come from no DataLoader that draws them by number"
            loader = rows.drawn([proof.side(f"step{number}").records])
            if loader is None:
                return None, "one process's rows come from no DataLoader that draws them by number"
            proof.process_loader = loader.loader
        record = proof.side(f"step{number}").records[0]
        if feed.kind == "calls" and len(record["rows"]) != len(record["backwards"]):
            return None, "a backward follows several calls of modules"
        draws = feed.steps[number - 1]
        seen, parts = set(), []
        for part in sorted(draws):
            if (tuple(draws[part]), part[1]) not in seen:  # ranks that share rows are one
                seen.add((tuple(draws[part]), part[1]))
                parts.append(part)
        if len(parts) > weights.MOST_PARTS:
            return None, f"{len(parts)} micro-batches are more than the {weights.MOST_PARTS} that are weighed"
        n_process = len(proof.side(f"step{number}").records[0]["backwards"]) or 1
        steps = [
            PlannedStep(f"part{number}-{index}", weights=number - 1, shares=True, gradients_only=True)
            for index in range(len(parts))
        ]
        say(f"one process, {len(parts)} micro-batches one after the other")
        proof.take(steps, [[draws[part]] * n_process for part in parts])
        if any(step.name not in proof.taken for step in steps):
            return None, f"one process makes too few steps to weigh {len(parts)} micro-batches"
        columns = [weights.added(proof.side(step.name)) or proof.side(step.name) for step in steps]
        moved = proof.side(f"moved{number}") if f"moved{number}" in proof.taken else None
        shapes = {name: self.shapes[name] for name in wrong if name in self.shapes}
        if sum(map(math.prod, shapes.values())) < 8 * len(parts):  # any few numbers are a sum of many gradients
            shapes = self.shapes
        table = weights.make(
            parts, columns, proof.ranks(number), proof.side(f"step{number}"), moved, ALLOWED,
            [self._targets(number, part) for part in parts], shapes, plain,
        )  # fmt: skip
        return table, "no gradient of a micro-batch was recorded"

    def _targets(self, number: int, part: tuple[int, int]) -> int | None:
        batches = self.proof.parallel.record(f"step{number}")[part[0]]["rows"]
        if part[1] >= len(batches):
            return None
        counts = [row["targets"] for row in batches[part[1]]]
        return None if None in counts else sum(counts)

    # ---- the optimizer's step

    def clipping(self, number: int, counts: Counts) -> ProofVerdict | None:
        """Both runs are to clip by the same norm."""
        records, process = self.proof.ranks(number).records, self.proof.side(f"step{number}").records[0]
        if not self.proof.uses_engine():  # an engine clips where nobody sees it
            moved = self.proof.side(f"moved{number}", "used") if f"moved{number}" in self.proof.taken else None
            differences = compare(
                self.proof.ranks(number, "used"), self.proof.side(f"step{number}", "used"), moved,
                lambda tensors: explain(tensors, counts),
            )  # fmt: skip
            wrong = [d for d in differences.values() if d.is_wrong]
            if wrong:
                factors = {f"rank {rank}": _clip_factor(record) for rank, record in records.items()}
                words = ", ".join(f"{who} x{factor:.5g}" for who, factor in factors.items())
                line = (
                    f"step {number}: gradients equal, but clipping multiplies {len(wrong)} by another number:"
                    f" {words}; one process x{_clip_factor(process):.5g}"
                )
                reason = "clipped by another norm"
                return self._not_same([line], "clip norm", parameter=wrong[-1].name, reasons=(reason,))
        # In 16 bits a norm is rounded by more than a thousandth.
        dtypes = {piece["dtype"] for piece in process["raw"].values() if piece}
        allowed = max([1e-3, *(4 * torch.finfo(getattr(torch, dtype)).eps for dtype in dtypes)])
        if f"moved{number}" in self.proof.taken:  # an engine's gradients are copies in fp32 of those in 16 bits
            nudged = self.proof.side(f"moved{number}").records[0]["norms"]
            spreads = [abs(a / b - 1) for a, b in zip(nudged, process["norms"], strict=False) if b]
            allowed = max([allowed, *(ALLOWED * spread for spread in spreads)])
        for record in records.values():
            pairs = list(zip(record["norms"], process["norms"], strict=False))
            if len(record["norms"]) != len(process["norms"]) or all(abs(a - b) <= allowed * abs(b) for a, b in pairs):
                continue
            a, b = next((a, b) for a, b in pairs if abs(a - b) > allowed * abs(b))
            line = f"step {number}: gradients equal, but clipped by norm {a:.5g}; one process {b:.5g}"
            return self._not_same(
                [line], "clip norm", factor=a / b if b else None, reasons=("clipped by another norm",)
            )
        return None

    def orphans(self, number: int) -> ProofVerdict | None:
        """Parameters with a gradient that no optimizer holds, and that no step moves: copies in fp32 would."""
        folder, ranks = self.proof.parallel.folder, self.proof.ranks(number, "after")
        orphans = [name for record in ranks.records.values() for name in record.get("orphans", [])]
        names = [
            name
            for name in dict.fromkeys(orphans)  # under FSDP1 a rank without a part of a parameter has no gradient
            if name in self.shapes
            and (before := self.proof.weights_before(number, name, self.shapes[name])) is not None
            and (after := pieces.assemble(str(folder), ranks.of(name), self.shapes[name])[0]) is not None
            and torch.equal(before, after)
        ]
        if not names:
            return None
        line = (
            f"step {number}: gradients equal, but no optimizer holds {len(names)} parameters that have one"
            f" ({listed(names)})"
        )
        reason = "the optimizer holds other tensors than the model: made before the model was wrapped?"
        return self._not_same([line], "other tensors", parameter=names[-1], reasons=(reason,))

    def updates(self, number: int, counts: Counts) -> ProofVerdict | None:
        parallel, reference = self.proof.ranks(number, "after"), self.proof.side(f"step{number}", "after")
        moved, is_sure = None, None
        if self.proof.uses_engine():  # its optimizer steps with one process's own gradients
            is_sure = partial(self._is_sure, number)
            if f"moved{number}" in self.proof.taken:
                moved = self.proof.side(f"moved{number}", "after")
        differences = compare(
            parallel, reference, moved, lambda tensors: explain(tensors, counts),
            partial(self.proof.weights_before, number), is_sure=is_sure,
        )  # fmt: skip
        wrong = [d for d in differences.values() if d.is_wrong]
        if not wrong:
            return None
        factor = common_factor({d.name: d for d in wrong})
        lines = [
            f"step {number}: gradients equal, but {len(wrong)} of {len(differences)} updates differ;"
            f" last in forward order {wrong[-1].name}",
            *(f"  {line}" for line in grouped(differences)),
        ]
        cause = f"the update of {wrong[-1].name}: {wrong[-1].cause}"
        if not self.proof.is_replay and (words := self._rates(number)):
            cause = f"{words}; {cause}"
        return self._not_same(
            lines, wrong[-1].kind, parameter=wrong[-1].name, factor=factor, reasons=(cause,)
        )  # fmt: skip

    def _rates(self, number: int) -> str:
        """Words on learning rates that differ between the runs."""
        ranks, process = (
            next(iter(self.proof.ranks(number).records.values())),
            self.proof.side(f"step{number}").records[0],
        )
        pairs = zip(chain(*ranks["rates"]), chain(*process["rates"]), strict=False)
        a, b = next(((a, b) for a, b in pairs if not math.isclose(a, b, rel_tol=1e-6)), (0.0, 0.0))
        return f"step {number}: the learning rate is {a:g} on the ranks, and {b:g} in one process" if a != b else ""

    def _is_sure(self, number: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The elements whose gradients so far are no rounding: Adam makes as much of those as of large ones."""
        is_sure = torch.ones(shape, dtype=torch.bool)
        for step in range(1, number + 1):
            ranks, process = (
                side.full(name, shape)[0] for side in (self.proof.ranks(step), self.proof.side(f"step{step}"))
            )
            if ranks is not None and process is not None:
                is_sure &= (ranks.double() - process.double()).abs() <= 0.1 * process.double().abs()
        return is_sure

    # ---- the same

    def same(self) -> ProofVerdict:
        proof, numbers = self.proof, self.numbers
        n_steps = f"{len(numbers)} step{'s'[: len(numbers) > 1]}"
        words = next((words for kind, words in self.kinds.values() if kind in (rows.SPLIT, rows.COPIES)), "")
        if proof.feed is not None:
            records = [proof.parallel.record(f"step{number}") for number in numbers]
            lines = rows.repeated(replace(proof.feed, steps=proof.feed.steps[: len(numbers)]), records, self.start)
            ending = proof.taken[f"step{numbers[-1]}"]
            epoch = ending.record(ending.steps[-1]) if proof.is_replay else None
            lines += rows.over_the_epoch(proof.feed, proof.parallel.record(proof.parallel.steps[-1]), epoch)
            if lines:
                headline = (
                    "THE SAME for the rows they saw, BUT ROWS REPEAT OR ARE MISSING"
                    f" ({proof.world_size} ranks, {n_steps})"
                )
                return ProofVerdict(ROWS, headline, tuple(lines), word="rows")
        n_parameters = len(list(proof.side("step1")))
        headline = (
            f"THE SAME: {n_steps}, {n_parameters} parameters: gradients and updates of {proof.world_size} ranks equal"
            f" one process's within rounding (worst {self.worst:.1f} times an ulp's, {ALLOWED:g} allowed)"
        )
        lines = [words] if words else []
        n_sampled = len({name for r in self.start.values() for name, p in r["weights"].items() if "of" in p})
        if n_sampled:
            lines.append(
                f"{n_sampled} are large: a sample of their numbers was compared, the norms of their gradients, and the"
                " hashes of copies (--sample-above N compares more)"
            )
        if proof.is_replay:
            lines.append("one process ran the same program: a factor that is wrong in both shows only with --against")
            lines += [f"{words}: it stepped with the ranks'" for number in numbers if (words := self._rates(number))][
                :1
            ]
        return ProofVerdict(SAME, headline, tuple(lines))


def _clip_factor(record: dict[str, Any]) -> float:
    """What clipping multiplied most of this rank's pieces of the gradients by."""
    factors = [
        record["used"][name]["norm"] / piece["norm"]
        for name, piece in record["raw"].items()
        if piece and piece["norm"] and record["used"].get(name)
    ]
    return median(factors) if factors else 1.0
