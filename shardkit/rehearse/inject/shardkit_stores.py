"""Ends a wait for a key of a store that only a pretended rank would write.

A rank that waits says so in the store, and counts how often it has looked. Once all live ranks wait, each for a key
that is not there, nobody is left to write one.
"""

from __future__ import annotations

import datetime
import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shardkit_pretended import Meeting, PretendedRankError  # type: ignore[import-not-found]
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

PATIENCE_S = 5.0
"""How long all live ranks must have waited: another thread may write."""
LOOKS = 2
"""How often each of them must have looked meanwhile, the first time perhaps before all waited: a rank that gets no
processor may have its key and not know it."""
POLL_S = 0.05
_WAITING, _LOOKED = "shardkit/waiting/", "shardkit/looked/"


def attach(live: Sequence[int]) -> None:
    """Let every read of a key that blocks look whether anybody can still write it."""
    store: Any = Store
    if len(live) < int(os.environ.get("WORLD_SIZE", "1")):
        store.get = _looking(store.get, live)
        store.wait = _looking(store.wait, live)
        store.multi_get = _looking(store.multi_get, live)


def _looking(original: Callable[..., Any], live: Sequence[int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(store: Any, keys: Any, *timeout: datetime.timedelta) -> Any:
        names = [keys] if isinstance(keys, str) else list(keys)
        root = _root(store)
        # `dist.TCPStore` is the stand-in of shardkit_pretended by now.
        if isinstance(root, torch._C._distributed_c10d.TCPStore) and not store.check(names):
            _await(store, root, names, timeout[0] if timeout else store.timeout, live)
        return original(store, keys, *timeout)

    return read


def _root(store: Any) -> Any:
    """The store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _await(store: Any, root: Any, keys: Sequence[str], timeout: datetime.timedelta, live: Sequence[int]) -> None:
    """Wait for keys until they are there, or the store's time is over, which its own read then says."""
    began, own_rank = time.monotonic(), os.environ["RANK"]
    all_wait_since: float | None = None
    looks_then: list[int] = []
    root.set(_WAITING + own_rank, "")
    try:
        while not store.check(list(keys)) and time.monotonic() - began < timeout.total_seconds():
            root.add(_LOOKED + own_rank, 1)
            if not root.check([f"{_WAITING}{rank}" for rank in live]):
                all_wait_since = None
            elif all_wait_since is None:
                all_wait_since, looks_then = time.monotonic(), _looks(root, live)
            is_over = all_wait_since is not None and time.monotonic() - all_wait_since > PATIENCE_S
            if is_over and not isinstance(store, Meeting) and _have_looked(root, live, looks_then):
                raise PretendedRankError(_words(next(key for key in keys if not store.check([key])), live))
            time.sleep(POLL_S)
    finally:
        root.delete_key(_WAITING + own_rank)


def _looks(root: Any, live: Sequence[int]) -> list[int]:
    """How often each live rank has looked for its keys in vain so far."""
    return [root.add(f"{_LOOKED}{rank}", 0) for rank in live]


def _have_looked(root: Any, live: Sequence[int], looks_then: Sequence[int]) -> bool:
    return all(now - then >= LOOKS for now, then in zip(_looks(root, live), looks_then, strict=True))


def _words(key: str, live: Sequence[int]) -> str:
    """What is missing; a key that ends in the number of a pretended rank is likely that rank's."""
    cause = f"rank {os.environ['RANK']} waits for the key {key!r} of the store, which no live rank writes"
    number = re.search(r"(\d+)\D*$", key)
    writer = int(number[1]) if number else -1
    if writer in live or not 0 <= writer < int(os.environ["WORLD_SIZE"]):
        return f"{cause}: a pretended rank would; let the one that does live (--live)"
    named = ",".join(map(str, sorted({*live, writer})))
    return f"{cause}: by its name rank {writer}, which is pretended, would; let it live: --live {named}"
