"""Why a rank ended, by its stderr, for programs that leave no error file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...files import open_regular

_TAIL_BYTES = 1 << 18
_LINES = 20
_MOST_LINES = 200
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_BEGIN = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FATAL = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)
_WAITS = re.compile(r"torch/(distributed/|autograd/|nn/parallel/distributed\.py)")
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python3[\d.]*)/|^<")


def tail(path: Path) -> str:
    """The end of a rank's stderr, without torch's `[rank1]:` marks; empty if there is no file, or a link to another."""
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:  # the run may be a stranger's, and reports are shared
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return _PREFIX.sub("", file.read().decode(errors="replace"))
    except OSError:  # it is a link, is on another machine, or was deleted
        return ""


def last_traceback(text: str) -> tuple[str, str]:
    """(the exception's line, the last traceback with the ones that it was raised from); empty without a traceback."""
    lines = text.splitlines()
    begins = [index for index, line in enumerate(lines) if line == _BEGIN]
    if not begins:
        return "", ""
    chain = begins[-1:]
    for begin in reversed(begins[:-1]):
        if _last_line(lines[: chain[0]]) not in _CHAINED:
            break
        chain.insert(0, begin)
    first_line, last_begin = chain[0], chain[-1]
    end = next((i for i in range(last_begin + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), None)
    if end is None:  # cut short: the process died while it wrote
        return "", ""
    shown = lines[first_line : end + 1]
    if len(shown) > _MOST_LINES:
        shown = [*shown[: _MOST_LINES // 2], "  …", *shown[-_MOST_LINES // 2 :]]
    return lines[end], "\n".join(shown)


def _last_line(lines: list[str]) -> str:
    return next((line for line in reversed(lines) if line.strip()), "")


def stacks(text: str) -> str:
    """The stacks that Python wrote when a signal ended it (PYTHONFAULTHANDLER=1); empty if there is none."""
    headers = list(_FATAL.finditer(text))
    if not headers:
        return ""
    block = text[headers[-1].start() :].partition("\nExtension modules:")[0].rstrip()
    if not _FRAME.search(block):  # it died while Python was ending
        return ""
    return "\n".join(block.splitlines()[:_MOST_LINES])


def locate(stack: str) -> tuple[str, bool]:
    """Returns the line of the user's code that the current thread ran, and whether the thread waited for its peers."""
    current = stack.partition("Current thread")[2].partition("\n\n")[0] or stack
    frames = _FRAME.findall(current)
    user_frame = next((frame for frame in frames if not _LIBRARY.search(frame[0])), frames[0] if frames else None)
    location = "" if user_frame is None else f"{user_frame[0]}:{user_frame[1]} in {user_frame[2]}"
    return location, any(_WAITS.search(frame[0]) for frame in frames)


def last_lines(text: str) -> str:
    """The last lines of a rank that ended without a traceback."""
    return "\n".join(text.rstrip().splitlines()[-_LINES:])
