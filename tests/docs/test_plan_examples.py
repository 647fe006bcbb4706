"""The examples of `shardkit plan` in README.md and docs/plan.md are what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.commands import python_m

REPO = Path(__file__).resolve().parents[2]
EXAMPLE = re.compile(r"^```bash\nshardkit (plan - [^`]*?)\n```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> dict[str, list[str]]:
    """Command → the texts that a page shows below it; searches, whose speeds are those of a machine, are left out."""
    found: dict[str, list[str]] = {}
    for page in ("README.md", "docs/plan.md"):
        for command, shown in EXAMPLE.findall((REPO / page).read_text(encoding="utf-8")):
            if "--auto" not in command:
                found.setdefault(command.replace("\\\n", " "), []).append(shown)
    return found


@pytest.mark.slow
def test_a_plan_prints_what_the_pages_show(tmp_path: Path) -> None:
    commands = examples()
    assert sum(map(len, commands.values())) >= 2
    for command, texts in commands.items():
        words = shlex.split(command)
        printed = python_m(
            "shardkit.cli", *words, cwd=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path)}, code=None
        ).stdout
        for text in texts:
            rest = [" ".join(line.split()) for line in printed.splitlines() if line]
            for part in text.split("…\n"):  # lines between two marks of omission follow each other
                lines = [" ".join(line.split()) for line in part.splitlines() if line]
                starts = [at for at in range(len(rest)) if rest[at : at + len(lines)] == lines]
                assert starts, f"{lines}\nare not, or not in this order, in\n{printed}"
                rest = rest[starts[0] + len(lines) :]
