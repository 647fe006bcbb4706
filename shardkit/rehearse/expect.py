"""`--expect 'peak < 70 GiB'`: a limit of the user's on a rehearsal's memory, for a project's CI."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import ConfigError, gib
from ..hardware.cards import parse_bytes
from .verdict import DOES_NOT_FIT, FITS, Verdict

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
    """The limit that `--expect` names."""
    match = re.fullmatch(r"\s*(\w+)\s*(<=?)\s*([^<>=]+?)\s*", text)
    if match is None or match[1] not in METRICS:
        raise ConfigError(f"--expect {text!r} is no limit", f"--expect 'peak < 70 GiB'; or {' or '.join(METRICS[1:])}")
    return Expectation(match[1], match[2] == "<=", parse_bytes(match[3], "--expect"), " ".join(text.split()))
