"""What a rank counts is what it holds; rank 0 sees all of it, and names a rank that stops reporting."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.errors import ConfigError, TrainingError
from shardkit.launch.failures.failure import Failure
from shardkit.memory import MemoryLedger
from shardkit.memory import ledger as ledgers
from shardkit.memory.probe import HostProbe
from tests.ranks import RankError, run_ranks

MIB = 2**20


def use_briefly(n_bytes: int) -> None:
    """Make so many bytes resident, and give them back. Tensors may lie in pages that earlier tests left to the heap."""
    with mmap.mmap(-1, n_bytes) as pages:
        for offset in range(0, n_bytes, mmap.PAGESIZE):
            pages[offset] = 1


class Toy:
    """A strategy as the ledger sees one."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.asked = 0

    def state_tensors(self) -> Iterator[tuple[Any, torch.Tensor]]:
        self.asked += 1
        weight = self.model.weight
        yield "params", weight
        if weight.grad is not None:
            yield "grads", weight.grad
        for state in self.optimizer.state.values():
            yield "optimizer", state["momentum_buffer"]

    def step(self, ledger: MemoryLedger, step: int, due: bool | None = None) -> None:
        ledger.begin_step(step, due)
        with ledger.phase("forward"):
            loss = self.model(torch.ones(1, 8)).sum()
        with ledger.phase("backward"):
            loss.backward()
        ledger.sample_state(self)
        with ledger.phase("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        ledger.end_step(step, 0.25, 0.05)


def test_gradients_are_those_before_the_step_and_optimizer_state_that_after_it() -> None:
    ledger, toy = MemoryLedger("cpu"), Toy()
    toy.step(ledger, 1)
    rows = ledger.gather(1)
    assert {kind: n_bytes.device for kind, n_bytes in rows[0].state.items()} == {
        "params": 256, "quantized": 0, "master_params": 0, "grads": 256, "optimizer": 256, "buffers": 0
    }  # fmt: skip


def test_state_is_counted_only_when_a_gather_is_due() -> None:
    ledger, toy = MemoryLedger("cpu", interval=5), Toy()
    for step in range(1, 11):
        toy.step(ledger, step)
    assert toy.asked == len([1, "after 1", 2, 5, 10])
    toy.step(ledger, 11, due=True)
    toy.step(ledger, 15, due=False)
    assert toy.asked == len([1, "after 1", 2, 5, 10, 11])


def test_host_memory_is_read_at_edges_only_before_a_gather_and_no_peak_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = 0
    read = HostProbe.read

    def counted(probe: HostProbe) -> Any:
        nonlocal reads
        reads += 1
        return read(probe)

    monkeypatch.setattr(HostProbe, "read", counted)
    gc.collect()
    ledger = MemoryLedger("cpu", interval=10)
    if not ledger._host_probe.resettable:
        pytest.skip("VmHWM cannot be reset here")
    for step in range(1, 12):
        before = reads
        ledger.begin_step(step)
        for phase in ("forward", "backward", "update"):
            with ledger.phase(phase):
                use_briefly(32 * MIB if step == 7 and phase == "backward" else 1)
        assert (reads - before > 0) is (step in (1, 2, 10)), step
        ledger.end_step(step, 1.0)
        if ledger.due(step):
            rows = ledger.gather(step)
    # Of 32 MiB: the system may take a few pages of libraries back meanwhile.
    assert rows[0].host_mem.peak_rss - rows[0].host_mem.rss > 20 * 2**20
    assert max(phase.peak_rss - phase.rss for phase in rows[0].phases.values()) < 12 * 2**20


def test_phase_peaks_and_times_of_an_interval() -> None:
    gc.collect()  # what other tests left would be freed within a phase
    ledger = MemoryLedger("cpu")
    resident = ledger.row().host_mem.rss
    for size in (64, 192, 1):
        with ledger.phase("forward"):
            use_briefly(size * MIB)
        with ledger.phase("backward"):
            use_briefly(32 * MIB)
    for step, seconds in ((1, 0.2), (2, 0.4)):
        ledger.end_step(step, seconds, seconds / 4)
    rows = ledger.gather(2)
    row = rows[0]
    assert set(row.phases) == {"forward", "backward"}
    assert resident + 128 * MIB < row.phases["forward"].peak_rss < resident + 256 * MIB
    assert resident + 16 * MIB < row.phases["backward"].peak_rss < resident + 100 * MIB
    assert row.host_mem.peak_rss >= row.phases["forward"].peak_rss
    assert row.step_time_s == pytest.approx(0.3)
    assert row.data_wait_s == pytest.approx(0.075)
    again = ledger.gather(3)
    assert again[0].step_time_s is None
    assert again[0].host_mem.peak_rss >= row.host_mem.peak_rss


def test_cpu_rows_invent_no_device_counters() -> None:
    rows = MemoryLedger("cpu").gather(0)
    assert (rows[0].device_mem, rows[0].alloc_retries, rows[0].ooms) == (None, None, None)
    assert rows[0].host_mem.uss is not None
    assert rows[0].host_mem.limit > 0


def test_loops_written_for_the_former_name_of_the_update_go_on() -> None:
    ledger = MemoryLedger("cpu")
    with ledger.phase("step"):
        assert ledger.open_phase == "update"


def test_wrong_use_is_refused() -> None:
    ledger = MemoryLedger("cpu")
    with pytest.raises(ValueError, match="not one of init, wrap, forward, backward, update"):
        ledger.begin("evaluate")
    with pytest.raises(ConfigError, match="world_size=2 and no process group"):
        MemoryLedger("cpu", None, 0, 2)


def toy_rank(host: str | None) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    ledger = MemoryLedger("cpu", group, rank, world, rank, None if host is None else f"{host}{rank}")
    toy = Toy()
    block = torch.ones(rank * 128 * MIB // 4)
    toy.step(ledger, 1)
    rows = ledger.gather(1)
    del block
    if rows is None:
        return ledger.last_rows
    return [(row.name, row.state["grads"].device if row.state else None, row.host_mem.rss) for row in rows]


def test_rank_0_sees_every_rank() -> None:
    first, *others = run_ranks(3, "tests.memory.test_ledger:toy_rank", host="node")
    assert [(name, grads) for name, grads, _ in first] == [("0@node0", 256), ("1@node1", 256), ("2@node2", 256)]
    resident = [rss for _, _, rss in first]
    assert resident[1] - resident[0] > 100 * MIB
    assert resident[2] - resident[1] > 100 * MIB
    assert others == [[], []]


def collectives_of_a_gather() -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    ledger = MemoryLedger("cpu", dist.new_group(backend="gloo"), dist.get_rank(), dist.get_world_size())
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        ledger.gather(0)
    return sorted(event.key for event in prof.key_averages() for _ in range(event.count) if "gloo:" in event.key)


def gather_at_different_steps() -> None:
    rank = dist.get_rank()
    ledger = MemoryLedger("cpu", dist.group.WORLD, rank, dist.get_world_size(), host="node")
    ledger.gather(10 + rank)
    dist.barrier()


def test_a_gather_is_one_collective() -> None:
    assert run_ranks(2, "tests.memory.test_ledger:collectives_of_a_gather") == [["gloo:gather"]] * 2


def test_ranks_that_gather_at_different_steps_are_named() -> None:
    with pytest.raises(RankError, match="rank 1@node gathers memory at step 11, rank 0 at step 10"):
        run_ranks(2, "tests.memory.test_ledger:gather_at_different_steps")


def sharded_state() -> list[dict[str, int]]:
    """Rows of an FSDP2 model after a step: 3 layers of 10 × 6, so that 4 ranks do not divide the rows."""
    from torch.distributed.fsdp import fully_shard

    layers = [nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False), nn.Linear(6, 10, bias=False)]
    model = fully_shard(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ledger = MemoryLedger.from_env("cpu")
    with ledger.watch(model, optimizer):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return [{kind: n_bytes.device for kind, n_bytes in (row.state or {}).items()} for row in ledger.last_rows]


def test_fsdp2_state_is_the_padded_shard() -> None:
    rows, *_ = run_ranks(4, "tests.memory.test_ledger:sharded_state")
    # Sharded by rows: ceil(10/4) = 3 of 6 elements twice, ceil(6/4) = 2 of 10, each rank padded to that.
    params = 4 * (3 * 6 + 2 * 10 + 3 * 6)
    assert [row["params"] for row in rows] == [params] * 4
    # The last rank's part of the rows is 10 - 3·3 = 1 and 6 - 3·2 = 0.
    last = 4 * (1 * 6 + 0 + 1 * 6)
    assert [row["optimizer"] for row in rows] == [2 * n_bytes + 12 for n_bytes in [params] * 3 + [last]]


def gather_until_one_leaves() -> tuple[str, str] | None:
    """Rank 2 reports at step 4 and then leaves; what rank 0 is told at step 8, which rank 1 has reached."""
    import gc

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


def test_a_rank_that_stops_reporting_is_named_with_its_last_step() -> None:
    told, *others = run_ranks(3, "tests.memory.test_ledger:gather_until_one_leaves")
    assert others == [None, None]
    cause, fix = told
    assert cause.startswith("memory was not gathered at step 8; did not report: rank 2@node2 (last at step 4): ")
    assert "\n" not in cause and "GLHF" not in cause
    assert "logs" in fix
    # A consequence: the launcher names the rank that died first, where it knows.
    assert Failure(rank=0, exit_code=1, message=cause, is_error=True).lost_peer
