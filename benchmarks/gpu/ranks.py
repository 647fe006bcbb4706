"""Predicted against measured peaks of several ranks, at full size, on emulated cards of one machine.

ranks.txt had the list before anything was measured, and every case stays in it.
"""

from __future__ import annotations

from .accuracy import Setting, cases_of, listed
from .cases import Cases

DRY_SETTINGS = ("debug, 2 ranks, ddp, fp32, none",)


def cases(dry: bool) -> Cases:
    names = DRY_SETTINGS if dry else listed("ranks")
    return cases_of(map(Setting, names), names)
