"""What a rehearsed program would have done to the machine's files, from the upper parts of its overlays."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import gib, printable

SHOWN = 5
"""Paths that a line names of each kind; further ones are counted."""
PASSING = ("/tmp/", "/run/", "/var/tmp/")
"""Folders of temporary files: new ones there are not told, unless they are in the program's own."""


@dataclass(frozen=True)
class Write:
    """One path that the program wrote to."""

    path: str
    kind: str  # `new`, `replaced` (it was there before) or `deleted`
    n_bytes: int = 0


def summary(folder: Path) -> list[str]:
    """Lines on what was written and is thrown away; none where the writes were real."""
    layout = folder / "overlays.json"
    if not layout.exists():
        return []
    writes = list(_writes(folder, json.loads(layout.read_text())["overlays"]))
    lines = []
    for kind, words in (("replaced", "would have been overwritten"), ("deleted", "would have been deleted")):
        if paths := [write.path for write in writes if write.kind == kind]:
            lines.append(f"{words}: {_listed(paths)}")
    new = sorted((write for write in writes if write.kind == "new"), key=lambda write: -write.n_bytes)
    if new:
        size = gib(sum(write.n_bytes for write in new))
        lines.append(f"{len(new)} new files, {size}, went to an overlay: {_listed([write.path for write in new])}")
    return lines


def _listed(paths: list[str]) -> str:
    further = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return printable(", ".join(paths[:SHOWN])) + further


def _writes(folder: Path, overlays: list[str]) -> Iterator[Write]:
    program_folder = os.path.join(os.getcwd(), "")
    for number, lower in enumerate(overlays):
        upper = folder / "upper" / str(number)
        for parent, _, names in os.walk(upper):
            for name in names:
                path = Path(parent, name)
                status = path.lstat()
                original = os.path.join(lower, path.relative_to(upper))
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                    yield Write(original, "deleted")
                elif stat.S_ISREG(status.st_mode) and not name.endswith(".pyc"):
                    kind = "replaced" if os.path.lexists(original) else "new"
                    is_passing = original.startswith(PASSING) and not original.startswith(program_folder)
                    if kind == "replaced" or not is_passing:
                        yield Write(original, kind, status.st_blocks * 512)
