"""The cases that a part of the benchmark consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""A case's result as it is written to JSON; `outcome` says how the case ended."""


@dataclass(frozen=True)
class Where:
    """The surroundings of a case.

    Attributes:
        dry: with tiny sizes, on the CPU.
        card: short name of the GPU (`shardkit.hardware.cards`).
        host_memory: bytes of host memory that a case may count on.
        folder: for temporary files.
        predicted: the result of `Case.predict`, here or elsewhere.
    """

    dry: bool
    card: str
    host_memory: int
    folder: Path
    predicted: Figures = field(default_factory=dict)


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
