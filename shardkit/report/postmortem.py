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


def show(rank: int, record: Mapping[str, Any]) -> Markup:
    """One rank's post-mortem."""
    plain = [(key, entry) for key, entry in _flat(record) if key != "schema"]
    risk = ": the host's memory was almost used up" if record.get("kind") == "host-risk" else ""
    parts = [
        heading(f"Rank {rank}{risk}"),
        table(["", ""], [[words(_name(key)), replace(cell(key, entry), numeric=False)] for key, entry in plain]),
    ]
    for key, entry in record.items():
        if isinstance(entry, list) and entry and all(isinstance(entry, dict) for entry in entry):
            parts += [heading(_name(key)), _list(entry[:TENSORS])]
        elif isinstance(entry, dict | list) and entry and not _is_flat(entry):
            parts.append(folded(_name(key), json.dumps(entry, indent=1, ensure_ascii=False)))
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


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Plain values, and the values of objects that hold only plain values."""
    for key, entry in record.items():
        if _is_flat(entry):
            yield from ((f"{key}: {inner}", plain) for inner, plain in entry.items())
        elif not isinstance(entry, dict | list):
            yield key, entry


def _is_flat(value: Any) -> bool:
    return isinstance(value, dict) and not any(isinstance(inner, dict | list) for inner in value.values())


def _list(entries: Sequence[Mapping[str, Any]]) -> Markup:
    keys = list(dict.fromkeys(key for entry in entries for key in entry))
    return table([_name(key) for key in keys], [[cell(key, entry.get(key)) for key in keys] for entry in entries])


def _name(key: str) -> str:
    return key.replace("_", " ")
