"""Compare what the ranks computed with what one process computed: a parameter at a time, in units of rounding.

The unit is measured: the distance of one process's result from its result with each weight moved by one ulp. 16 times
that is allowed; programs that are right were at 0.4 to 1.4 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .inject import shardkit_pieces as pieces
from .verdict import ALLOWED

NORMS = 1e-3
"""How far the norms of a large gradient, of which a sample is compared, may be apart."""
Ranks = Mapping[int, dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """A field (`raw`, `after`) of a step's records, with the folder of its pieces."""

    folder: Path
    records: Ranks
    field: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", pieces.by_name(dict(self.records), self.field))

    def of(self, name: str) -> dict[int, Any]:
        return dict(getattr(self, "names").get(name, {}))  # noqa: B009 - set by __post_init__

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(self, "names"))  # noqa: B009

    def full(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor | None, list[int]]:
        return pieces.assemble(str(self.folder), self.of(name), shape)


@dataclass(frozen=True)
class Difference:
    """How far a parameter's gradient or update is from one process's."""

    name: str
    kind: str  # of the cause, a word of `verdict.WORDS`; empty: none
    cause: str  # in words
    times: float = 0.0  # the distance in units of rounding
    factor: float | None = None  # the parallel tensor is so many times the other

    @property
    def is_wrong(self) -> bool:
        return bool(self.kind)


@dataclass(frozen=True)
class Tensors:
    """One parameter's tensors, and the unit of rounding between them."""

    parallel: torch.Tensor  # float64
    reference: torch.Tensor
    unit: float
    pieces: Mapping[int, dict[str, Any]]  # the ranks'
    folder: Path
    differing: list[int]  # ranks whose copies differ
    before: torch.Tensor | None  # the weight, where updates are compared
    norms: tuple[float, float] | None = None  # the ranks' and one process's of all numbers, where these are a sample

    @property
    def distance(self) -> float:
        return norm(self.parallel - self.reference)

    @property
    def are_norms_close(self) -> bool:
        """Whether the sample stands for the rest: a thousandth of the norm, or as much as rounding moves the sample."""
        if self.norms is None:
            return True
        relative = ALLOWED * self.unit / (norm(self.reference) or math.inf)
        return abs(self.norms[0] - self.norms[1]) <= max(NORMS, relative) * self.norms[1]

    def is_close(self, tensor: torch.Tensor, scale: float = 1.0) -> bool:
        return norm(tensor - self.reference * scale) <= ALLOWED * self.unit * max(1.0, abs(scale))


def norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def scale_of(side: Side) -> float:
    """The norm of all tensors of one process together."""
    squares = [side.of(name)[0]["norm"] ** 2 for name in side if side.of(name)[0] is not None]
    return math.sqrt(sum(squares)) or 1.0


def compare(
    parallel: Side, reference: Side, moved: Side | None, explain: Callable[[Tensors], tuple[str, str, float | None]],
    before: Callable[[str, tuple[int, ...]], torch.Tensor | None] | None = None,
    substitute: Callable[[str], torch.Tensor | None] | None = None,
    is_sure: Callable[[str, tuple[int, ...]], torch.Tensor] | None = None,
) -> dict[str, Difference]:  # fmt: skip
    """Name → difference, in the order of one process's modules.

    `explain`: the kind, words and factor of a difference. `before`: the weights before the step, where the changes of
    weights are compared. `substitute`: takes the place of one process's own gradient. `is_sure`: the elements that
    are compared.
    """
    scale = scale_of(reference)
    differences = {}
    for name in reference:
        tensors, cause = tensors_of(name, parallel, reference, moved, scale, before, substitute, is_sure)
        if tensors is None:
            differences[name] = Difference(name, "missing gradient" if cause else "", cause)
            continue
        times = tensors.distance / tensors.unit
        if times <= ALLOWED and not tensors.differing and not tensors.are_norms_close:
            a, b = tensors.norms or (0.0, 0.0)
            cause = f"the sampled numbers are equal, and the norm of all is {a:.6g}, one process's {b:.6g}"
            differences[name] = Difference(name, "other", cause, times)
        elif times <= ALLOWED and not tensors.differing:
            differences[name] = Difference(name, "", "", times)
        else:
            kind, cause, factor = explain(tensors)
            cause += ", in the sample" if any("of" in piece for piece in tensors.pieces.values()) else ""
            differences[name] = Difference(name, kind, cause, times, factor)
    return differences


def tensors_of(
    name: str, parallel: Side, reference: Side, moved: Side | None, scale: float,
    before: Callable[[str, tuple[int, ...]], torch.Tensor | None] | None = None,
    substitute: Callable[[str], torch.Tensor | None] | None = None,
    is_sure: Callable[[str, tuple[int, ...]], torch.Tensor] | None = None,
) -> tuple[Tensors | None, str]:  # fmt: skip
    """A parameter's tensors, or None with words on what is missing; without words nothing is."""
    piece, ranks = reference.of(name)[0], parallel.of(name)
    present = {rank: part for rank, part in ranks.items() if part is not None}
    if piece is None:
        has_gradient = any(part["norm"] for part in present.values())
        return None, "only the ranks have a gradient" if has_gradient else ""
    shape = tuple(piece["shape"])
    process, _ = reference.full(name, shape)
    assert process is not None, f"one process holds {name} in pieces"
    nudged = moved.full(name, shape)[0] if moved is not None and moved.of(name).get(0) is not None else None
    spread = 0.0 if nudged is None else norm(nudged.double() - process.double())
    if substitute is not None:
        replacement = substitute(name)
        process = process if replacement is None else replacement
    if len(present) < len(ranks) or not ranks:
        if not norm(process) and not present:
            return None, ""
        missing = [rank for rank in ranks if rank not in present]
        return None, f"no gradient on rank{'s'[: len(missing) > 1]} {', '.join(map(str, missing))}" if ranks else (
            "no rank has it"
        )
    tensor, differing = parallel.full(name, shape)
    if tensor is None:
        shapes = sorted({tuple(part.get("of", part)["local"]) for part in ranks.values()})
        shape = tuple(piece.get("of", piece)["shape"])
        return None, f"the ranks' shapes {', '.join(map(str, shapes))} do not make {shape}"
    dtypes = {tensor.dtype, process.dtype}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    tensor, process = tensor.double(), process.double()
    weight = None if before is None else before(name, shape)
    size = norm(process)
    if weight is not None:
        size = norm(weight)
        tensor, process = tensor - weight.double(), process - weight.double()
    if is_sure is not None:
        tensor, process = tensor * is_sure(name, shape), process * is_sure(name, shape)
    # Two roundings of each number, and of a thousandth of all gradients for one that is almost nothing. In 16 bits the
    # measured spread is large, so that this much would hide a factor.
    part = math.sqrt(math.prod(shape) / math.prod(piece["of"]["shape"])) if "of" in piece else 1.0  # of a norm
    floor = (2.0 if eps < 1e-5 else 0.25) * eps * size + 1e-3 * eps * scale * part
    unit = max(spread, floor, 1e-300)
    norms = None
    if "of" in piece and weight is None and substitute is None:
        norms = pieces.norm(present, shape), piece["norm"]
    return Tensors(tensor, process, unit, present, parallel.folder, differing, weight, norms), ""
