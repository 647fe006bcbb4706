"""A rank that stops reporting is named."""

from __future__ import annotations

import time

import pytest

from shardkit.errors import TrainingError
from shardkit.launch.failures.failure import Failure
from shardkit.memory import MemoryLedger
from shardkit.memory import ledger as ledgers
from tests.ranks import run_ranks


def gather_until_one_leaves() -> tuple[str, str] | None:
    """Rank 2 reports at step 4 and then leaves; what rank 0 is told at step 8, which rank 1 has reached."""
    import gc

    import torch.distributed as dist

    ledgers.SETTLE_S = 0.0
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    ledger = MemoryLedger("cpu", group, rank, dist.get_world_size(), host=f"node{rank}")
    ledger.gather(4)
    if rank == 2:
        dist.destroy_process_group(group)
        del ledger, group
        gc.collect()
        return None
    store = group.get_group_store()
    if rank == 0:
        while int(store.get("shardkit/memory/1")) < 8:
            time.sleep(0.01)
    try:
        ledger.gather(8)
    except TrainingError as error:
        store.wait(["rank 1 has sent"])  # else it would lose rank 0 meanwhile
        return error.cause, error.fix
    store.set("rank 1 has sent", "")
    return None


@pytest.mark.dist
def test_a_rank_that_stops_reporting_is_named_with_its_last_step() -> None:
    told, *others = run_ranks(3, "tests.memory.test_exchange:gather_until_one_leaves")
    assert others == [None, None]
    cause, fix = told
    assert cause.startswith("memory was not gathered at step 8; did not report: rank 2@node2 (last at step 4): ")
    assert "\n" not in cause and "GLHF" not in cause
    assert "logs" in fix
    # A consequence: the launcher names the rank that died first, where it knows.
    assert Failure(rank=0, exit_code=1, message=cause, is_error=True).lost_peer
