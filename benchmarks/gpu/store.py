"""benchmarks/results/gpu_PART.json: every result is on disk as soon as it is known, and its case is not run again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shardkit.errors import ConfigError

from ..common import REPO, environment, write_json
from .cases import Figures

CODE = ("shardkit", "launch", "benchmarks/gpu")


def code_digest() -> str:
    """A digest of the sources that affect the figures: the same for a commit and for a copy of it without git."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((REPO / folder).rglob("*.py")):
            if path.name != "tables.py":  # it changes no figure
                digest.update(path.relative_to(REPO).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def kind(held: dict[str, Any]) -> str:
    """The kind of a file's results."""
    return "a dry run" if held["dry_run"] else "measurements"


def _cards(environment: dict[str, Any]) -> list[str]:
    """Name and memory of each card, without the driver's version: a patch does not make it another card."""
    return [described.rpartition(",")[0] for described in environment["gpus"]]


class Store:
    """The results of one part.

    Args:
        commit: the checkout's commit, if there is no git.

    Raises:
        ConfigError: the file holds the other kind of results.
    """

    def __init__(self, part: str, folder: Path, dry: bool, card: str, commit: str | None = None) -> None:
        self.path = folder / f"gpu_{part}.json"
        self._stamp: dict[str, Any] = {"card": card, "code": code_digest(), "environment": environment()}
        if commit is not None:
            self._stamp["environment"]["commit"] = commit
        self._all: dict[str, Any] = {"part": part, "dry_run": dry, "cases": {}}
        expected = kind(self._all)
        if self.path.exists():
            self._all = json.loads(self.path.read_text())
        if kind(self._all) != expected:
            raise ConfigError(
                f"{self.path} holds {kind(self._all)}", f"pass another folder for {expected} (--out), or delete it"
            )

    def figures(self, case: str, what: str) -> Figures | None:
        """The result of an earlier call; `None` if its code, card or versions were different."""
        held: Figures | None = self._all["cases"].get(case, {}).get(what)
        if held is None or any(held[key] != self._stamp[key] for key in ("card", "code")) or not held["complete"]:
            return None
        here, there = self._stamp["environment"], held["environment"]
        same_versions = all(here[key] == there[key] for key in ("torch", "deepspeed")) and _cards(here) == _cards(there)
        return held if what == "predicted" or same_versions else None

    def put(self, case: str, what: str, figures: Figures) -> None:
        """Write a result with its origin; the file is complete at any moment."""
        self._all["cases"].setdefault(case, {})[what] = {"complete": True, **figures, **self._stamp}
        write_json(self.path, self._all)
