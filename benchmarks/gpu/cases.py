"""What a part of the benchmark consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""What a case found out, as it is written to JSON; `outcome` says how it went."""


@dataclass(frozen=True)
class Where:
    """What a case is run with.

    Attributes:
        dry: on the CPU with tiny sizes.
        card: short name of the GPU (`shardkit.hardware.cards`).
        host_memory: bytes of host memory that a case may count on.
        folder: for files that are of no use afterwards.
        predicted: what `Case.predict` found, here or elsewhere.
        earlier: what this case kept when it was interrupted; `ended` is "host memory" if that ran out.
        keep: writes down what was found so far.
    """

    dry: bool
    card: str
    host_memory: int
    folder: Path
    predicted: Found = field(default_factory=dict)
    earlier: Found = field(default_factory=dict)
    keep: Callable[[Found], None] = lambda found: None


@dataclass(frozen=True)
class Case:
    """One row or cell; both functions run in fresh processes.

    Attributes:
        predict: what the planner says; needs no GPU.
        predicted_as: the case whose prediction counts, if it is another one's.
    """

    measure: Callable[[Where], Found]
    predict: Callable[[Where], Found] | None = None
    predicted_as: str | None = None


Cases = dict[str, Case]
