"""Memory accounting: read counters, gather every rank on rank 0, show.

Around any training loop:

    from shardkit.memory import MemoryLedger
    ledger = MemoryLedger.from_env()
    with ledger.watch(model, optimizer, path="memory.jsonl"):
        train()
    print(ledger.table())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ledger import MemoryLedger as MemoryLedger
    from .rows import RankRow as RankRow
    from .rows import summary as summary
    from .table import read_jsonl as read_jsonl
    from .table import render_table as render_table
    from .table import write_jsonl as write_jsonl

_PUBLIC = {
    "MemoryLedger": ".ledger",
    "RankRow": ".rows",
    "TensorTracker": ".tracing.tracker",
    "read_jsonl": ".table",
    "render_table": ".table",
    "summary": ".rows",
    "write_jsonl": ".table",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    """Load a public name on first use: code that must not wait for torch imports modules of this package."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
