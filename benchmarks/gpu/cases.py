"""The cases that a part of the benchmark consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .nursery import Helpers

Figures = dict[str, Any]
"""A case's result as it is written to JSON; `outcome` says how the case ended."""


@dataclass(frozen=True)
class Where:
    """The surroundings of a case.

    Attributes:
        dry: with tiny sizes; on the CPU, unless `emulated`.
        card: short name of the GPU (`shardkit.hardware.cards`).
        host_memory: bytes of host memory that a case may count on.
        folder: for temporary files.
        emulated: on emulated cards that compute nothing (tests/emulated_cuda).
        predicted: the result of `Case.predict`, here or elsewhere.
        earlier: the result that this case kept when it was interrupted; `ended` is "host memory" if that ran out.
        keep: stores the result so far.
        helpers: processes that serve one case after the other.
    """

    dry: bool
    card: str
    host_memory: int
    folder: Path
    emulated: bool = False
    predicted: Figures = field(default_factory=dict)
    earlier: Figures = field(default_factory=dict)
    keep: Callable[[Figures], None] = lambda figures: None
    helpers: Helpers | None = None

    @property
    def on_cpu(self) -> bool:
        return self.dry and not self.emulated


@dataclass(frozen=True)
class Case:
    """One row or cell; both functions run in processes of their own.

    Attributes:
        predict: asks the planner; needs no GPU.
        predicted_as: the case whose prediction counts, if it is another case.
    """

    measure: Callable[[Where], Figures]
    predict: Callable[[Where], Figures] | None = None
    predicted_as: str | None = None


Cases = dict[str, Case]
