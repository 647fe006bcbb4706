"""The helper that every multi-process test leans on names the rank that failed first."""

from __future__ import annotations

import os

import pytest

from tests.ranks import RankError, run_ranks


def fail_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the culprit")
    dist.barrier()


def crash_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_first_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:[\s\S]*fail_on_rank_1[\s\S]*the culprit") as caught:
        run_ranks(2, "tests.test_ranks:fail_on_rank_1")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_crashed_rank_is_blamed_rather_than_its_peers() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 died without a result, exit code 7"):
        run_ranks(2, "tests.test_ranks:crash_on_rank_1")
