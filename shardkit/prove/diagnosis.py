"""Why a parameter's gradient or update differs, in the field's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .compare import Difference, Tensors, norm
from .inject import shardkit_pieces as pieces
from .verdict import ALLOWED

NEAR = 2e-3
"""How near a factor is to a number that has a name."""
NEAR_EACH_OTHER = 2e-2
"""How near the factors of several parameters are to one: in 16 bits each is off by its own rounding."""
UNNAMED = "a constant factor"


@dataclass(frozen=True)
class Counts:
    """Numbers of a step that a wrong factor may be made of."""

    ranks: int
    micro_batches: int
    targets: int  # tokens with a loss, of all ranks; 0: unknown

    def word(self, factor: float) -> str:
        if abs(factor + 1) < NEAR:
            return "the sign is turned"
        numbers: dict[float, str] = {}
        for number, words in (
            (self.ranks, "the number of ranks"), (self.micro_batches, "the micro-batches of a step"),
            (self.ranks * self.micro_batches, "ranks times micro-batches"), (self.targets, "the targets of a step"),
            (self.targets / self.ranks, "the targets of a rank"),
        ):  # fmt: skip
            if number > 1:
                numbers[number] = f"{numbers[number]} or {words}" if number in numbers else words
        sign = ", and the sign is turned" if factor < 0 else ""
        for number, words in numbers.items():
            for power, verb in ((number, "multiplied by"), (1 / number, "divided by")):
                if abs(abs(factor) / power - 1) < NEAR:
                    return f"{verb} {number:g}, {words}{sign}"
        for above, words in numbers.items():
            for below, further in numbers.items():
                if above != below and abs(abs(factor) * below / above - 1) < NEAR:
                    return f"multiplied by {above:g}, {words}, and divided by {below:g}, {further}{sign}"
        return UNNAMED


def ratio(tensor: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """The factor by which a tensor is nearest to a multiple of another, and the distance that remains."""
    a, b = tensor.double().reshape(-1), reference.double().reshape(-1)
    square = float(b @ b)
    if not square:
        return float("nan"), norm(a)
    factor = float(a @ b) / square
    return factor, norm(a - factor * b)


def explain(tensors: Tensors, counts: Counts) -> tuple[str, str, float | None]:
    """The kind of a difference, its words, and a factor."""
    parallel, reference = tensors.parallel, tensors.reference
    if tensors.differing:
        return *_of_copies(tensors), None
    if not norm(parallel):
        if tensors.norms is not None and tensors.norms[0]:
            return "other", "zero", None
        return "missing gradient", "zero", 0.0
    if not norm(reference):
        return "other", "one process has zero", None
    factor, remaining = ratio(parallel, reference)
    if remaining <= ALLOWED * tensors.unit * max(1.0, abs(factor)):
        word = counts.word(factor)
        if parallel.numel() == 1 and word == UNNAMED:  # any two numbers are multiples
            return "other", "another number", None
        return "sign" if factor < 0 else "factor", f"x{factor:.6g}: {word}", factor
    if tensors.before is not None:
        _, remaining = ratio(parallel - reference, tensors.before.double())
        if remaining < 1e-2 * tensors.distance:
            return "other", "moved by a multiple of the weight: another weight decay", None
    parts = []
    for rank, piece in tensors.pieces.items():
        expected = pieces.region(reference, piece) if tensors.before is None else None
        if expected is not None and norm(expected):
            part = pieces.tensor_of(str(tensors.folder), piece).double()
            factor, remaining = ratio(part, expected)
            # Any two single numbers are multiples.
            distance = remaining / (norm(part) or 1.0) if part.numel() > 1 else 1.0
            parts.append((rank, piece["norm"], factor, distance))
    zero = [rank for rank, size, *_ in parts if not size]
    if zero and len(zero) < len(parts):
        return "shard", f"zero on the parts of rank{'s'[: len(zero) > 1]} {', '.join(map(str, zero))}", None
    if len(parts) > 1 and all(remaining < 1e-4 for *_, remaining in parts):
        words = ", ".join(f"rank {rank} x{factor:.4g}" for rank, _, factor, _ in parts)
        return "shard", f"each rank's part by another factor: {words}", None
    rows = _zero_part(parallel, reference)
    if rows:
        return "shard", rows, None
    return "other", "another direction", None


def _of_copies(tensors: Tensors) -> tuple[str, str]:
    shape = tuple(tensors.reference.shape)
    copies = [piece for piece in tensors.pieces.values() if tuple(piece["local"]) == shape]
    ranks = ", ".join(map(str, tensors.differing[:4]))
    samples = [pieces.tensor_of(str(tensors.folder), piece).double() for piece in copies]
    do_differ = any(not torch.equal(sample, samples[0]) for sample in samples)  # in what is sampled of them, too
    if len(copies) == len(tensors.pieces) and tensors.before is None and do_differ:
        total = torch.stack(samples).sum(0)
        if tensors.is_close(total, 1.0) or norm(total - tensors.reference) <= 2 * ALLOWED * tensors.unit:
            return "not summed", "the ranks' copies differ, and their sum is right: not summed over the ranks"
        if norm(total / len(copies) - tensors.reference) <= 2 * ALLOWED * tensors.unit:
            return "not summed", "the ranks' copies differ, and their mean is right: not averaged over the ranks"
    return "copies differ", f"the copies of ranks {ranks} differ from the lowest rank's"


def _zero_part(parallel: torch.Tensor, reference: torch.Tensor) -> str:
    """Words if a tensor is right in a contiguous part along a dimension and zero in the others."""
    for dim in range(parallel.dim()):
        dims = tuple(d for d in range(parallel.dim()) if d != dim)
        sizes = parallel.abs().sum(dims) if dims else parallel.abs()
        expected = reference.abs().sum(dims) if dims else reference.abs()
        zero = (sizes == 0) & (expected > 0)
        n_zero = int(zero.sum())
        if n_zero and n_zero * 4 >= zero.numel() and bool((sizes[~zero] > 0).any()):
            changes = int((zero[1:] != zero[:-1]).sum())
            if changes <= 2:
                return f"zero in {n_zero} of {zero.numel()} of dimension {dim}"
    return ""


def grouped(differences: Mapping[str, Difference]) -> list[str]:
    """Lines on the wrong parameters, those with one cause in one line."""
    wrong = [difference for difference in differences.values() if difference.is_wrong]
    groups: dict[str, list[Difference]] = {}
    for difference in wrong:
        key = difference.cause.partition(": ")[2] if difference.factor is not None else ""
        groups.setdefault(difference.cause if key in ("", UNNAMED) else key, []).append(difference)
    lines = []
    for members in sorted(groups.values(), key=lambda members: -len(members))[:4]:
        names = f" ({', '.join(member.name for member in members)})" if len(members) <= 4 else ""
        lines.append(f"{len(members)} of {len(differences)}: {members[0].cause}{names}")
    return lines


def common_factor(differences: Mapping[str, Difference]) -> float | None:
    """The factor that all wrong parameters are wrong by; None if there is none."""
    factors = [d.factor for d in differences.values() if d.is_wrong]
    known_factors = sorted(factor for factor in factors if factor)
    if not factors or len(known_factors) < len(factors):
        return None
    middle = known_factors[len(known_factors) // 2]
    return middle if all(abs(factor / middle - 1) < NEAR_EACH_OTHER for factor in known_factors) else None
