"""Every time that a run reports, against kernels of a given duration: the host leads, follows, or waits for data."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shardkit.hardware import speed
from shardkit.hardware.cards import gpu_peak_flops
from shardkit.memory.rows import RankRow, summary
from tests.cuda import durations
from tests.emulated_cuda import call, needs_emulation, start
from tests.timing import measured_again

pytestmark = [pytest.mark.gpu, needs_emulation]

EXACT = 0.02


def on_card(folder: str, args: dict[str, float]) -> dict[str, Any]:
    return durations.trained(folder, **args)


def trained(folder: Any, kernel_us: int, **args: float) -> dict[str, Any]:
    env = {"EMUCUDA_KERNEL_US": str(kernel_us), "EMUCUDA_NAME": durations.DEVICE}
    return call(on_card, str(folder / "run"), args, **env)


def settled(found: dict[str, Any]) -> list[tuple[dict[str, float], float, float]]:
    """(record, seconds of its kernels, seconds between the host's launches of its update and the one before)."""
    busy = [n * found["kernel_s"] for n in found["launched"]]
    return list(zip(found["records"][1:], busy, found["updated_s"], strict=True))[1:]  # step 2 has the first's checks


def phases_of(found: dict[str, Any], accum: int = 1) -> list[dict[str, tuple[float, float]]]:
    """Of each step the seconds of a phase's kernels, and those in which the host launched them."""
    steps = []
    for step in range(len(found["records"])):
        held = {}
        for phase, runs in found["phases"].items():
            each = len(runs) // len(found["records"])
            kernels, seconds = map(sum, zip(*runs[each * step : each * (step + 1)], strict=True))
            held[phase] = (kernels * found["kernel_s"], seconds)
        steps.append(held)
    assert [len(found["phases"][phase]) for phase in held] == [accum * len(steps), accum * len(steps), len(steps)]
    return steps


@measured_again
def test_the_device_decides_while_the_host_leads(tmp_path: Any) -> None:
    accum = 2
    found = trained(tmp_path, 1000, accum=accum)
    for (record, busy, _), phases in zip(settled(found), phases_of(found, accum)[2:], strict=True):
        for phase, (seconds, _) in phases.items():
            assert record[f"{phase}_s"] == pytest.approx(seconds, rel=EXACT), phase
        assert sum(record[f"{phase}_s"] for phase in phases) == pytest.approx(busy, rel=EXACT)
        assert record["step_time_s"] == pytest.approx(busy, rel=EXACT)
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / busy, rel=EXACT)
        assert record["data_wait_s"] < EXACT * busy, "the device has work while the host reads data"
    peak = gpu_peak_flops(durations.DEVICE, "fp32")
    assert peak is not None
    for mfu, (record, busy, _) in zip(found["mfu"][2:], settled(found), strict=True):
        assert mfu / 100 == pytest.approx(2e12 * record["tokens"] / busy / peak, rel=EXACT)
    for gather in found["gathers"][3:]:
        (row,) = gather["ranks"]
        assert row["busy_s"] == pytest.approx(phases["forward"][0], rel=EXACT)
        assert row["step_time_s"] == pytest.approx(settled(found)[-1][1], rel=EXACT)


@measured_again
def test_the_host_decides_where_the_device_is_faster(tmp_path: Any) -> None:
    host_s = 0.3
    found = trained(tmp_path, 1, host_s=host_s)
    records, _, between = zip(*settled(found)[:-1], strict=True)
    for phase in durations.PHASES:
        took = sum(step[phase][1] for step in phases_of(found)[2:-1])
        assert took > len(records) * host_s
        assert sum(record[f"{phase}_s"] for record in records) == pytest.approx(took, rel=EXACT), phase
    assert sum(record["step_time_s"] for record in records) == pytest.approx(sum(between), rel=EXACT)
    assert sum(record["data_wait_s"] for record in records) < EXACT * sum(between)
    for gather in found["gathers"][3:]:
        (row,) = gather["ranks"]
        assert host_s <= row["busy_s"] < row["step_time_s"]


@measured_again
def test_only_the_time_that_data_cost_the_device_is_waiting_for_data(tmp_path: Any) -> None:
    fetch_s = 2.0
    found = trained(tmp_path, 1000, fetch_s=fetch_s)
    for record, busy, _ in settled(found):
        assert sum(record[f"{phase}_s"] for phase in durations.PHASES) == pytest.approx(busy, rel=EXACT)
        if record["step"] in durations.SLOW_BATCHES:
            assert record["data_wait_s"] > fetch_s / 4
            # The rest of the step's time is the device's work: the host launches ahead of it again.
            assert record["data_wait_s"] + busy == pytest.approx(record["step_time_s"], rel=EXACT)
        else:
            assert record["data_wait_s"] < EXACT * busy
            assert record["step_time_s"] == pytest.approx(busy, rel=EXACT)


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
@measured_again
def test_a_card_that_is_slower_is_named(strategy: str, tmp_path: Any) -> None:
    kernel_us = [1000, 2000]
    ranks = [
        start(durations.one_of_ranks, str(tmp_path), rank, strategy, EMUCUDA_KERNEL_US=str(each), EMUCUDA_DEVICES="2")
        for rank, each in enumerate(kernel_us)
    ]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    found = json.loads(outputs[0][0].splitlines()[-1])
    for gather in found["gathers"][3:]:
        rows = [RankRow.from_json(row) for row in gather["ranks"]]
        assert [slow.name.partition("@")[0] for slow in summary(rows).stragglers] == ["1"]
        # Its own kernels; an engine's copies between gathered parameters and the network's buffers count as waiting.
        own = found["phases"]["forward"][-1][0] * kernel_us[1] / 1e6
        assert rows[1].busy_s == pytest.approx(own, rel=EXACT if strategy == "ddp" else 0.1)


def speeds() -> list[float]:
    device = torch.device("cuda", 0)
    return [speed.operator_seconds(device), *(speed.matmul_flops(device, kind) for kind in ("bf16", "fp32"))]


def test_calibration_finds_the_durations() -> None:
    kernel_us, product_us = 200_000, 400_000
    env = {"EMUCUDA_KERNEL_US": str(kernel_us), "EMUCUDA_GEMM_US": str(product_us)}
    operator, *products = call(speeds, EMUCUDA_COMPUTE="0", **env)
    assert operator == pytest.approx(kernel_us / 1e6, rel=EXACT)
    assert products == pytest.approx([2 * 8192**3 / (product_us / 1e6)] * 2, rel=EXACT)


@pytest.mark.parametrize(
    ("task", "args", "durations_us"),
    [
        ("Products", {}, {"EMUCUDA_GEMM_US": "40000", "EMUCUDA_KERNEL_US": "20"}),
        ("Task", {"extra": durations.EXTRA}, {"EMUCUDA_KERNEL_US": "1000"}),
    ],
)
@measured_again
def test_a_calibrated_plan_knows_how_long_a_step_takes(
    task: str, args: dict[str, int], durations_us: dict[str, str], tmp_path: Any
) -> None:
    """Where products decide, and where small operators do. A plan knows nothing of a host that falls behind.

    It counts a norm of several tensors as the three kernels that it is; an update of them, which may be more, as one.
    """
    env = {"EMUCUDA_NAME": durations.DEVICE, "EMUCUDA_MEMORY": "80G", "EMUCUDA_COMPUTE": "0", **durations_us}
    env["XDG_CACHE_HOME"] = str(tmp_path)
    planned, times = call(durations.calibrated, str(tmp_path / "run"), task, args, **env)
    for took in times[2:-1]:
        assert took == pytest.approx(planned, rel=EXACT)
