"""Counts what the emulated GPU told the program without having computed it, by the program's line."""

from __future__ import annotations

import atexit
import ctypes
import json
import linecache
import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

ASSUMPTIONS = ("any", "all", "one", "positions", "zeros", "unequal", "given")
"""In the order of `Assumption` in native/ops/assumptions.h; docs/rehearse.md has a row for each, and for "printed"."""
TYPES = {15: "bf16", 23: "fp8", 24: "fp8"}
"""Of c10::ScalarType, those that not every card has."""
INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen", os.path.dirname(__file__))
"""Parts of the paths of files that are not the program's."""
_NOT_COMPUTED = "values that were not computed"
"""What the emulated GPU's refusals to be read say (native/ops/control.cpp)."""
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_int)
_Ask = ctypes.CFUNCTYPE(ctypes.c_longlong)
_NONE = -1


class Assumed:
    """The assumptions that this process made, and the types of tensors that it used."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, int]] = Counter()
        self._library: ctypes.CDLL | None = None
        self._callback, self._ask = _Callback(self._tell), _Ask(self._bound)
        self._bounds = {
            (path, line): number for path, line, number in json.loads(os.environ.get("SHARDKIT_REHEARSAL_ASSUME", "[]"))
        }

    def attach(self, library: str) -> None:
        """Listen to the emulated GPU, which is loaded by now."""
        self._library = ctypes.CDLL(library)
        self._library.emucuda_types_seen.restype = ctypes.c_ulonglong
        self._library.emucuda_on_assumption(self._callback)
        if self._bounds:
            self._library.emucuda_on_unknown(self._ask)
        atexit.register(self._detach)

    def _detach(self) -> None:
        if self._library is not None:
            self._library.emucuda_on_assumption(None)
            self._library.emucuda_on_unknown(None)

    def let_print(self, torch: Any) -> None:
        """Let torch write a tensor whose numbers nobody computed as `tensor(...)`, as it writes one without memory."""
        write = torch._tensor_str._tensor_str

        def tensor_str(tensor: Any, indent: int) -> str:
            try:
                return str(write(tensor, indent))
            except RuntimeError as error:
                if _NOT_COMPUTED not in str(error):
                    raise
                self._count("printed", sys._getframe(1))
                return "..."

        torch._tensor_str._tensor_str = tensor_str

    def _tell(self, number: int) -> None:
        try:
            frame: FrameType | None = sys._getframe(1)
        except ValueError:  # a thread of autograd's
            frame = None
        self._count(ASSUMPTIONS[number], frame)

    def _bound(self) -> int:
        """The user's number for the program's line, where it reads what nobody computed."""
        try:
            filename, line = program_line(sys._getframe(1))
        except ValueError:  # a thread of autograd's
            return _NONE
        parts = filename.split("/")
        paths = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((self._bounds[path, line] for path in paths if (path, line) in self._bounds), _NONE)

    def _count(self, name: str, frame: FrameType | None) -> None:
        filename, line = program_line(frame)
        self.counts[name, filename, line] += 1

    def as_json(self) -> list[dict[str, str | int]]:
        """A row for each assumption and line, the most frequent first."""
        rows: list[dict[str, str | int]] = []
        for (name, filename, line), count in self.counts.most_common():
            text = linecache.getline(filename, line).strip()
            source_line = f"{filename}:{line}: {text}" if line else filename or "in backward"
            rows.append({"assumption": name, "count": count, "source_line": source_line})
        return rows

    def types(self) -> list[str]:
        seen = int(self._library.emucuda_types_seen()) if self._library else 0
        return sorted({name for bit, name in TYPES.items() if seen >> bit & 1})


def program_line(frame: FrameType | None) -> tuple[str, int]:
    """File and line of the innermost frame that no installed library holds, else of the innermost."""
    innermost = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in INSTALLED):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return innermost
