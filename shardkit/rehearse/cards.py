"""The memory of each card that was in use by whatever processes: what the emulated driver's account says."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

CARDS = "cards"
"""The account's files among the records, one a machine: `cards.0` (native/account.h has the layout)."""
_MAX_CARDS, _MAX_PROCESSES = 64, 1024
_CARD = struct.Struct("=2Q")
_PROCESS = struct.Struct(f"={1 + 2 * _MAX_CARDS}Q")


@dataclass(frozen=True)
class CardUse:
    """A card when most of it was in use."""

    machine: int
    number: int  # on its machine, whatever CUDA_VISIBLE_DEVICES says
    peak: int  # bytes of all processes, with their contexts
    held: dict[int, int]  # process → bytes that it held then


def read_cards(folder: Path) -> tuple[CardUse, ...]:
    """The cards that processes used, from the records of a rehearsal."""
    uses = []
    for path in sorted(folder.glob(f"{CARDS}.*")):
        content = path.read_bytes()
        start = _MAX_CARDS * _CARD.size
        processes = [_PROCESS.unpack_from(content, start + index * _PROCESS.size) for index in range(_MAX_PROCESSES)]
        for number in range(_MAX_CARDS):
            _, peak = _CARD.unpack_from(content, number * _CARD.size)
            held = {row[0]: row[1 + _MAX_CARDS + number] for row in processes if row[1 + _MAX_CARDS + number]}
            if peak:
                uses.append(CardUse(int(path.suffix[1:]), number, peak, held))
    return tuple(uses)
