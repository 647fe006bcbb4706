"""`--assume 'train.py:88=512'`: a user's number in place of values that nobody computed, where a line reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from ..errors import LaunchError
from .verdict import FAILED, GIVEN, NOT_KNOWN, Verdict


@dataclass(frozen=True)
class AssumedNumber:
    """A number for a program's line: each integer that it reads, and how many values it finds true or distinct."""

    path: str  # of the file, or its last parts
    line: int  # from 1
    number: int

    def is_at(self, source_line: str) -> bool:
        """Whether it is for a line, `PATH:LINE: TEXT`."""
        path, line, *_ = [*source_line.split(":", 2), "", ""]
        return line == str(self.line) and f"/{path}".endswith(f"/{self.path}")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}={self.number}"


def parse_assumed(texts: Iterable[str]) -> tuple[AssumedNumber, ...]:
    """The numbers that `--assume` gives."""
    numbers: dict[tuple[str, int], AssumedNumber] = {}
    for text in texts:
        match = re.fullmatch(r"(?:\./)?([^:=]+):([1-9][0-9]{0,8})\s*=\s*([0-9]{1,18})", text.strip())
        if match is None:
            raise LaunchError(f"--assume {text!r} is no line with a number", "--assume 'train.py:88=512'")
        assumed = AssumedNumber(match[1], int(match[2]), int(match[3]))
        if numbers.setdefault((assumed.path, assumed.line), assumed) != assumed:
            raise LaunchError(f"--assume gives {assumed.path}:{assumed.line} two numbers", "give the larger one")
    return tuple(numbers.values())


def as_variable(numbers: Sequence[AssumedNumber]) -> str:
    """For `shardkit_assumed`, inside of the program."""
    return json.dumps([astuple(number) for number in numbers])


def unused(numbers: Sequence[AssumedNumber], verdict: Verdict) -> list[str]:
    """A note on each number that no line asked for, of a program that came to its end."""
    if verdict.kind in (FAILED, NOT_KNOWN) or verdict.at_least:
        return []
    source_lines = [assumption.source_line for assumption in verdict.assumptions if assumption.kind == GIVEN]
    return [
        f"--assume {number}: that line read nothing that nobody computed"
        for number in numbers
        if not any(map(number.is_at, source_lines))
    ]
