"""A rank's out-of-memory post-mortem, field by field: the whole file is shown, whatever it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from markupsafe import Markup

from .html.page import Cell, folded, heading, n_bytes, table, words

_BYTES = re.compile(
    r"bytes|request|alloc|reserved|fragment|limit|free|missing|total|rss|peak|saving|capacity|memory|staging|in_use"
)
_COUNT = re.compile(r"retries|ooms|count|rank|step")
TENSORS = 25


def show(rank: int, found: Mapping[str, Any]) -> Markup:
    """One rank's post-mortem."""
    plain = [(key, value) for key, value in _flat(found) if key != "schema"]
    risk = ": the host's memory was almost used up" if found.get("kind") == "host-risk" else ""
    parts = [
        heading(f"Rank {rank}{risk}"),
        table(["", ""], [[words(_name(key)), replace(cell(key, value), numeric=False)] for key, value in plain]),
    ]
    for key, value in found.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            parts += [heading(_name(key)), _list(value[:TENSORS])]
        elif isinstance(value, dict | list) and value and not _is_flat(value):
            parts.append(folded(_name(key), json.dumps(value, indent=1, ensure_ascii=False)))
    return Markup("\n").join(parts)


def cell(key: str, value: Any) -> Cell:
    """A value formatted by its name: sizes in GiB, times as dates, everything else unchanged."""
    if isinstance(value, int) and not isinstance(value, bool) and _BYTES.search(key) and not _COUNT.search(key):
        return n_bytes(value)
    if key == "time" and isinstance(value, float) and 0 <= value < 2**32:
        return words(datetime.fromtimestamp(value, timezone.utc).isoformat(timespec="seconds"))
    if isinstance(value, float):
        return Cell(f"{value:.4g}", value)
    return words("–" if value is None else value)


def _flat(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Plain values, and the values of objects that hold only plain values."""
    for key, value in found.items():
        if _is_flat(value):
            yield from ((f"{key}: {inner}", plain) for inner, plain in value.items())
        elif not isinstance(value, dict | list):
            yield key, value


def _is_flat(value: Any) -> bool:
    return isinstance(value, dict) and not any(isinstance(inner, dict | list) for inner in value.values())


def _list(entries: Sequence[Mapping[str, Any]]) -> Markup:
    keys = list(dict.fromkeys(key for entry in entries for key in entry))
    return table([_name(key) for key in keys], [[cell(key, entry.get(key)) for key in keys] for entry in entries])


def _name(key: str) -> str:
    return key.replace("_", " ")
