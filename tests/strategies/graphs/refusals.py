"""The closed list of reasons for which a random graph may be refused; a refusal with another reason is a defect."""

from __future__ import annotations

import re

REASONS: dict[str, str] = {
    "a block that a rank skips": r"calls \S+ where rank \d+ calls \S+|is at the end of forward where|"
    r"calls \S+ where rank \d+ is at the end of forward",
    "parameters that ranks use differently": r"the loss of rank \d+ depends on \d+ parameters that rank \d+'s does not",
    "a second backward under selective_op": r"selective_op: backward reached \S+ a second time",
    "parameters updated more often than others": r"the checkpoint says \d+ for \S+ and \d+ for \S+, but ZeRO",
    "a part of a block used outside of it": r"is used where it is not gathered",
    "parameters without a gradient": r"\d+ of \d+ parameters got no gradient in (the first|this) step",
}
"""Reason → a pattern of its message."""


def reason(message: str) -> str | None:
    """The reason in the list that a refusal gives; None if it is not there."""
    return next((name for name, pattern in REASONS.items() if re.search(pattern, message)), None)
