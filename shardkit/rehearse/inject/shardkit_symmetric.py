"""Symmetric memory among pretended ranks: asynchronous tensor parallelism lays its workspaces there.

Ranks tell each other where their memory lies, in a collective, which the emulated NCCL answers for pretended ones; then
they wait for each other in the store, where no pretended rank would come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from shardkit_pretended import PretendedRankError, Team  # type: ignore[import-not-found]
from torch.distributed import distributed_c10d as c10d

MOST_MEETINGS = 256
"""In which a workspace is made for a group, or one that is larger: torch numbers them for each process."""
_OPEN: set[str] = set()


def attach() -> None:
    """Let ranks of a group with pretended ranks make symmetric memory by themselves."""
    memory = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    if memory is not None:
        memory.empty_strided_p2p = _opening(memory.empty_strided_p2p)
        memory.rendezvous = _opening(memory.rendezvous)


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        for name in (*args, *kwargs.values()):
            if isinstance(name, str) and name not in _OPEN:
                _open(name)
        return original(*args, **kwargs)

    return make


def _open(name: str) -> None:
    """Let no wait for a group's pretended ranks begin."""
    distributed: Any = c10d  # torch's names for groups have a type of their own
    group = distributed._resolve_process_group(name)
    team = Team.of(group)
    _OPEN.add(name)
    if team is None:
        return
    backend = group._get_backend(torch.device("cuda"))
    if not hasattr(backend.options, "use_pg_for_symm_mem_rendezvous"):
        pretended = next(rank for index, rank in enumerate(team.ranks) if index not in team.live)
        raise PretendedRankError(
            f"rank {team.ranks[team.rank]} makes symmetric memory with rank {pretended}, which is pretended: torch "
            f"{torch.__version__} looks for that rank's memory; let every rank of its group live, or take torch 2.13"
        )
    store = c10d._get_process_group_store(group)
    for number in range(MOST_MEETINGS):
        store.set(f"CUDASymmetricMemory/{number}/last_member", "")
