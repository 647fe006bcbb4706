"""The verdict of a proof: its kinds, exit codes and words."""

from __future__ import annotations

from dataclasses import dataclass, field

SAME, NOT_SAME, ROWS, FAILED, REFUSED, CANNOT_TELL = "same", "not the same", "rows", "failed", "refused", "cannot tell"
EXIT_CODES = {SAME: 0, NOT_SAME: 4, ROWS: 9, FAILED: 8, REFUSED: 2, CANNOT_TELL: 7}
ALLOWED = 16.0
"""How many times the distance of one ulp is still rounding."""
WORDS = (
    "factor", "sign", "shard", "not summed", "copies differ", "clip norm", "other tensors", "missing gradient",
    "micro-batches", "rows", "saved", "leak", "losses", "other",
)  # fmt: skip
"""The short codes of a diagnosis."""


@dataclass(frozen=True)
class ProofVerdict:
    kind: str
    headline: str  # one line
    lines: tuple[str, ...] = ()  # what was found, in the order of a step
    reasons: tuple[str, ...] = ()  # the words of the diagnosis, or why it is not known and what would tell
    notes: tuple[str, ...] = ()
    word: str | None = None  # of WORDS
    parameter: str | None = None  # nearest to the cause
    factor: float | None = None
    weights: dict[str, dict[str, float]] | None = field(default=None)
    step: int = 0  # whose gradients these are: the first that differs, else the last
    gradients: dict[str, dict[str, object]] | None = None  # name → its distance in `times` of rounding, and the cause

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.kind]

    def text(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([self.headline, *self.lines, *(f"=> {reason}" for reason in self.reasons), *notes])

    def as_json(self) -> dict[str, object]:
        return {
            "verdict": self.kind, "exit_code": self.exit_code, "word": self.word, "parameter": self.parameter,
            "factor": self.factor, "weights": self.weights, "reasons": [*self.reasons], "headline": self.headline,
            "lines": [*self.lines], "notes": [*self.notes], "step": self.step, "gradients": self.gradients,
            "allowed": ALLOWED,
        }  # fmt: skip
