"""What CUDA takes and a trace of fake tensors does not show; a step that is repeated in the log."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardkit.memory.tracing import tracker
from shardkit.memory.tracing.events import EventLog, repeat_last_step

MIB = 2**20


@pytest.mark.parametrize(
    ("rows", "columns", "mib"), [(8192, 1024, 64), (8192, 4096, 132), (64, 1024, 0)], ids=["norm", "fc", "few rows"]
)
def test_a_sum_over_rows_has_the_buffer_that_torch_allocates(
    rows: int, columns: int, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator of torch's CUDA build gave these on a card of 132 multiprocessors."""
    card = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    matrix = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    assert tracker._columns_summed((matrix, [0], True), None) == mib * MIB
    assert tracker._columns_summed((matrix, [1], True), None) == 0
    assert tracker._columns_summed((matrix.t(), [0], True), None) == 0


def summed(recorded: bool) -> EventLog:
    """Two gradients and their sum in backward; then the sum is freed."""
    log = EventLog(phase="backward")
    one, other = (log.made("cuda:0", "aten::mm") for _ in range(2))
    for gradient in (one, other):
        log.changed(gradient, MIB)
    log.released()
    total = log.made("cuda:0", "aten::add")
    log.allocations[total].recorded = recorded
    log.changed(total, MIB)
    log.changed(one, -MIB)
    log.changed(other, -MIB)
    log.mark(module="next")
    log.changed(total, -MIB)
    log.accumulated_in_place()
    return log


def test_two_gradients_are_added_in_the_memory_of_the_first() -> None:
    log = summed(recorded=False)
    assert log.events == [(0, MIB), (1, MIB), (1, -MIB), (0, -MIB)]
    assert log.peak("cuda:0").n_bytes == 2 * MIB
    assert log.marks[-1] == (3, "backward", "next")
    assert log.releases == [2]


def test_a_sum_of_a_recomputed_forward_is_a_tensor_of_its_own() -> None:
    assert summed(recorded=True).peak("cuda:0").n_bytes == 3 * MIB


def test_each_thread_keeps_one_workspace_from_its_first_product_on() -> None:
    log = EventLog(product_workspace=32 * MIB)
    for phase in ("forward", "forward", "backward", "backward", "forward"):
        log.mark(phase)
        log.multiplied("cuda:0", "aten::mm")
    assert [change for _, change in log.events] == [32 * MIB, 32 * MIB]


def log_of(*steps: list[tuple[int, int]]) -> EventLog:
    """A log whose steps change the sizes of these storages; each ends with a mark."""
    log = EventLog()
    for step in steps:
        log.mark("forward")
        for index, n_bytes in step:
            while len(log.allocations) <= index:
                log.made("cuda:0", "aten::mm")
            log.changed(index, n_bytes)
        log.mark("between")
    return log


def test_what_a_step_leaves_takes_the_place_of_what_it_frees() -> None:
    log = log_of([(0, 8), (1, 4)], [(1, -4), (2, 2), (2, -2), (3, 4)])
    assert repeat_last_step(log, "between")
    assert log.events == [(0, 8), (1, 4), (1, -4), (4, 2), (4, -2), (5, 4), (5, -4), (2, 2), (2, -2), (3, 4)]
    assert [at for at, phase, _ in log.marks if phase == "between"] == [2, 6, 10]


@pytest.mark.parametrize("step", [[(2, 4)], [(1, -4)], [(1, -4), (2, 5)], [(1, 2)]], ids=str)
def test_a_step_that_would_not_repeat_itself_is_left_alone(step: list[tuple[int, int]]) -> None:
    log = log_of([(0, 8), (1, 4)], step)
    before = list(log.events)
    assert not repeat_last_step(log, "between")
    assert log.events == before
