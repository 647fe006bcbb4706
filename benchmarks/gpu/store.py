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
_NOT_MEASURED_WITH = ("tables.py", "wheels.py")  # they change no figure
SPEEDS = ("tokens_per_s", "step_s", "start_s", "wall_s", "flops", "best_flops", "peak_flops", "time_ratios")
"""Keys of results that an emulated card cannot have."""


def code_digest() -> str:
    """A digest of the sources that affect the figures: the same for a commit and for a copy of it without git."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((REPO / folder).rglob("*.py")):
            if path.name not in _NOT_MEASURED_WITH:
                digest.update(path.relative_to(REPO).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def kind(held: dict[str, Any]) -> str:
    """The kind of a file's results."""
    if held["dry_run"]:
        return "a dry run on an emulated card" if held.get("emulated") else "a dry run"
    return "an emulated card's results" if held.get("emulated") else "measurements"


def without_speeds(node: Any) -> Any:
    """A result, or a part of one, without the keys of `SPEEDS` at any depth."""
    if isinstance(node, dict):
        return {key: without_speeds(value) for key, value in node.items() if key not in SPEEDS}
    return [without_speeds(value) for value in node] if isinstance(node, list) else node


def first_speed(node: Any, where: str = "") -> str | None:
    """The place of the first speed in a result or a group of results, `None` if there is none."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        place = f"{where}/{key}" if where else str(key)
        if key in SPEEDS and value is not None:
            return place
        if (deeper := first_speed(value, place)) is not None:
            return deeper
    return None


def _cards(environment: dict[str, Any]) -> list[str]:
    """Name and memory of each card, without the driver's version: a patch does not make it another card."""
    return [described.rpartition(",")[0] for described in environment["gpus"]]


class Store:
    """The results of one part.

    Args:
        host_memory: available bytes; plans for more memory are made again.
        commit: the checkout's commit, if there is no git.
        emulated: the emulated card, described as nvidia-smi does; `None`: results of a real one, or of a dry run.
        keep_plans: predictions of other code count as well.

    Raises:
        ConfigError: the file holds another kind of results: measurements, a dry run, or those of an emulated card.
    """

    def __init__(
        self, part: str, folder: Path, dry: bool, card: str, host_memory: int, commit: str | None = None,
        emulated: str | None = None, keep_plans: bool = False,
    ) -> None:  # fmt: skip
        self._keep_plans = keep_plans
        self._host_memory = host_memory
        self.path = folder / f"gpu_{part}.json"
        self._stamp: dict[str, Any] = {"card": card, "code": code_digest(), "environment": environment()}
        if commit is not None:
            self._stamp["environment"]["commit"] = commit
        if emulated is not None:
            self._stamp["environment"]["gpus"] = [emulated]
        self._all: dict[str, Any] = {"part": part, "dry_run": dry, "emulated": emulated is not None, "cases": {}}
        names = kind(self._all)
        if self.path.exists():
            self._all = json.loads(self.path.read_text())
        if kind(self._all) != names:
            raise ConfigError(
                f"{self.path} holds {kind(self._all)}", f"pass another folder for {names} (--out), or delete the file"
            )

    def figures(self, case: str, what: str) -> Figures | None:
        """The result of an earlier call, complete or not; `None` if its code, card or versions were different."""
        held: Figures | None = self._all["cases"].get(case, {}).get(what)
        if held is None or held["card"] != self._stamp["card"]:
            return None
        if held["code"] != self._stamp["code"] and not (self._keep_plans and what == "predicted"):
            return None
        if held.get("host_limit", 0) > self._host_memory:
            return None
        if what == "measured":
            here, there = self._stamp["environment"], held["environment"]
            if any(here[key] != there[key] for key in ("torch", "deepspeed")) or _cards(here) != _cards(there):
                return None
        return held

    def complete(self, case: str, what: str) -> bool:
        held = self.figures(case, what)
        return held is not None and bool(held["complete"])

    def put(self, case: str, what: str, figures: Figures, complete: bool) -> None:
        """Write a result with its origin; the file is complete at any moment, and has no speed of an emulated card."""
        if self._all.get("emulated"):
            figures = without_speeds(figures)
        self._all["cases"].setdefault(case, {})[what] = {"complete": complete, **figures, **self._stamp}
        write_json(self.path, self._all)
