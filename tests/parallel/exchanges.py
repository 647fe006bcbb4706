"""The messages that ranks send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def messages() -> Iterator[list[str]]:
    """The collectives that are called inside, and what is sent to one rank."""
    called: list[str] = []

    def noted(name: str, run: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return run(*args, **kwargs)

        return noting

    names = ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "isend")
    with patch.multiple(dist, **{name: noted(name, getattr(dist, name)) for name in names}):
        yield called
