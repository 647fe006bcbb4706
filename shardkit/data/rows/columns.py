"""Choose the columns of a data set, and give a row's values the same form whatever its file format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from ...errors import DataError

Kind = Literal["text", "messages", "prompt"]
TOOLS = "tools"
"""The optional column with the tools that a conversation may call."""
_NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "text": ("text",),
}


class RowError(ValueError):
    """A row that cannot be used; the message says why."""


@dataclass(frozen=True)
class Columns:
    """Which column holds what: kind "text" reads `text`, "messages" `messages`, "prompt" `prompt` and `completion`.

    Conversations and prompts also read `tools` if any row has this column.
    """

    kind: Kind
    names: dict[str, str]

    @property
    def read(self) -> list[str]:
        return list(self.names.values())

    def values(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row's values by use ("messages", "tools", …), without null members of objects; see `plain`.

        Raises:
            RowError: a value holds a number that is not finite, or is nested too deeply.
        """
        values = {}
        for use, name in self.names.items():
            try:
                values[use] = plain(row.get(name))
            except RecursionError:
                raise RowError(f"column {name} is nested too deeply") from None
            except ValueError as error:
                raise RowError(f"column {name} holds {error}") from None
        return values


def plain(value: Any) -> Any:
    """The value without the members of its objects that are null, at any depth; nulls in lists stay.

    Arrow and parquet give every object the members of all others, filled with nulls, so that a null and a missing
    member are the same there. They are the same in JSON lines too: tokens must not depend on the file's format.

    Raises:
        ValueError: it holds a number that is not finite, which no JSON text has.
    """
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items() if member is not None}
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the number {value}")
    return value


def names_to_find(named: Mapping[Any, str]) -> set[str]:
    """The names of all columns that decide how rows are read; `named`: data.columns."""
    usual_names = {name for names in _NAMES.values() for name in names}
    return {TOOLS, *(named.values() or usual_names)}


def choose_columns(present: Sequence[str], named: Mapping[Any, str], source: str) -> Columns:
    """The columns to read: `named` (data.columns), else those with a usual name.

    Args:
        present: the columns that any row has.

    Raises:
        DataError: a named column is absent, or none has a usual name; names the columns that are there.
    """
    for use, name in named.items():
        if name not in present:
            close = get_close_matches(name, present, n=3)
            fix = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(present) or 'no columns'}"
            raise DataError(f"data.columns.{use}={name}: {source} has no such column", fix)
    chosen: dict[str, str] = dict(named)
    if not chosen:
        for use, names in _NAMES.items():
            chosen.update((use, name) for name in names[::-1] if name in present)
    tools = {TOOLS: TOOLS} if TOOLS in present else {}
    if "messages" in chosen:
        return Columns("messages", {"messages": chosen["messages"], **tools})
    if "prompt" in chosen and "completion" in chosen:
        return Columns("prompt", {"prompt": chosen["prompt"], "completion": chosen["completion"], **tools})
    if "text" in chosen:
        return Columns("text", {"text": chosen["text"]})
    raise DataError(
        f"{source} has the columns {', '.join(present) or '(none)'}: none of them is known to hold text",
        "name them: 'data.columns={text: NAME}', 'data.columns={messages: NAME}' or "
        "'data.columns={prompt: NAME, completion: NAME}'",
    )
