"""What predicted step times rest on: counted work, measured or typical speeds, and what runs beside what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.config.load import load_config
from shardkit.plan.client import Planner
from shardkit.plan.model.cost import Segment, TimeEstimate, repeated, speeds_of, step_time, waits
from shardkit.plan.target import Target, choose_target

H100 = choose_target(load_config(None, []).config, 8, gpu="h100")


def time_of(planner: Planner, *overrides: str) -> TimeEstimate:
    sizes = ("model.vocab_size=512", "model.d_model=64", "model.n_layers=4", "train.seq_len=64", "train.max_norm=null")
    return planner.predict(load_config(None, [*sizes, *overrides]).config, timed=True).time


@pytest.fixture(scope="module")
def planner() -> Iterator[Planner]:
    with Planner(H100) as planner:
        yield planner


@pytest.mark.slow
def test_flops_are_those_of_the_model(planner: Planner) -> None:
    time = time_of(planner, "train.micro_batch_size=4", "model.loss_chunk_size=0")
    tokens = 4 * 64
    matrices = 12 * 4 * 64**2 + 512 * 64  # blocks and head
    attention = 2 * 4 * 64 * 64  # QKᵀ and PV of 4 layers, each token against 64 others
    unmasked = 6 * tokens * matrices + 3 * 2 * tokens * attention / 2
    assert time.flops == pytest.approx(unmasked, rel=0.15)  # flash attention's backward computes QKᵀ again
    assert time.flops >= 6 * tokens * matrices
    assert time.targets == 8 * tokens
    assert sum(time.parts.values()) == pytest.approx(time.seconds)


def test_checkpointing_costs_recomputation_and_sharding_costs_collectives(planner: Planner) -> None:
    plain = time_of(planner, "parallel.strategy=fsdp")
    full = time_of(planner, "parallel.strategy=fsdp", "activation.policy=full")
    assert plain.parts["recompute"] == 0 < full.parts["recompute"]
    assert full.flops > 1.15 * plain.flops
    assert full.seconds > plain.seconds
    ddp = time_of(planner, "parallel.strategy=ddp")
    assert plain.parts["links"] > ddp.parts["links"]


@pytest.mark.slow
def test_offload_costs_the_hosts_memory_bandwidth(planner: Planner) -> None:
    here = time_of(planner, "parallel.strategy=zero2")
    offloaded = time_of(planner, "parallel.strategy=zero2", "parallel.offload_optimizer=cpu")
    assert offloaded.parts["host"] > 10 * here.parts["host"]


@pytest.mark.slow
def test_every_micro_batch_counts(planner: Planner) -> None:
    one, three, nine = (time_of(planner, f"train.grad_accum_steps={n}") for n in (1, 3, 9))
    assert nine.flops == pytest.approx(9 * one.flops, rel=0.01)
    assert nine.targets == 9 * one.targets
    assert nine.seconds - three.seconds == pytest.approx(3 * (three.seconds - one.seconds), rel=0.1)


def test_a_step_is_as_long_as_its_longest_lane_on_a_gpu_and_their_sum_on_a_cpu() -> None:
    segment = Segment("backward", compute=3.0, recompute=1.0, dispatch=2.0, links=5.0, copies=1.0, host=0.5)
    segment.collectives = 10
    assert sum(waits(segment, overlap=False).values()) == pytest.approx(12.5)
    segment.exchanges = 7.0
    assert waits(segment, overlap=True)["exchanges"] == waits(segment, overlap=False)["exchanges"] == 7.0
    segment.exchanges = 0.0
    found = waits(segment, overlap=True)
    assert sum(found.values()) == pytest.approx(5.5)  # links, with the kernels behind them, and the host
    assert found["links"] == pytest.approx(1.0)
    segment.links = 2.0
    assert waits(segment, overlap=True)["links"] == pytest.approx(0.2)  # one collective of ten cannot hide


def test_middle_micro_batches_stand_for_the_rest() -> None:
    traced = [
        Segment(phase, compute=at, sent=10 * at) for at, phase in enumerate(["forward", "backward"] * 3 + ["update"], 1)
    ]
    assert [s.compute for s in repeated(traced, 5)] == [1, 2, 3, 4, 3, 4, 3, 4, 5, 6, 7]
    assert repeated(traced, 3) == traced
    step = step_time(traced, 5, 100.0, False, True)
    assert 10 * step.seconds == step.sent == 10 * (1 + 2 + 3 * (3 + 4) + 5 + 6 + 7)


def test_measured_speeds_replace_typical_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    typical = speeds_of(H100)
    assert not typical.measured
    constants = {
        "device": H100.gpu.device_name if H100.gpu else "", "world_size": 8, "operator_s": 7e-6, "collective_s": 3e-5,
        "matmul_flops_by_dtype": {"fp32": 4e13, "bf16": 7e14}, "memory_bytes_per_s": 3e12, "host_bytes_per_s": 4e10,
        "copy_bytes_per_s": [5e10, 4e10], "all_reduce": [[1024, 1e7], [2**20, 1e10], [2**28, 4e11]],
        "all_gather": [[2**28, 3e11]], "reduce_scatter": [[2**28, 2e11]],
        "all_to_all": [[2**28, 1e11]], "all_to_all_ranks": 4,
    }  # fmt: skip
    path = tmp_path / "shardkit" / "calibration.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"h100 x 8": constants}))
    found = speeds_of(H100)
    assert found.measured
    assert (found.matmul["bf16"], found.matmul["fp16"]) == (7e14, typical.matmul["fp16"])
    assert found.copies == 4e10  # the slowest rank's
    assert found.collective_seconds("reduce_scatter", 2**28, 8, 1) == pytest.approx(2**28 * 7 / 8 / 2e11)
    assert found.collective_seconds("all_to_all", 2**28, 2, 1) == pytest.approx(2**28 / 2 / 1e11)
    assert found.collective_seconds("all_to_all", 2**28, 16, 2) > 0.9 * 2**28 / typical.network
    halfway = found.collective_seconds("all_reduce", 2**24, 8, 1)  # between 1e10 and 4e11 in logarithms
    assert halfway == pytest.approx(2**24 * 2 * 7 / 8 / (1e10 * 4e11) ** 0.5)
    tiny = [found.collective_seconds("all_reduce", n, 8, 1) for n in (4, 1024)]
    assert tiny[0] == tiny[1]
    assert found.collective_seconds("all_reduce", 2**28, 16, 2) > found.collective_seconds("all_reduce", 2**28, 8, 1)


def test_cpu_ranks_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert speeds_of(Target(1, None, 1)).matmul["fp32"] >= speeds_of(Target(64, None, 64)).matmul["fp32"]
    assert not speeds_of(Target(2, None, 2)).overlap
