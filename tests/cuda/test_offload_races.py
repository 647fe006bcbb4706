"""Offload and prefetch with copies that come late and new memory that is poisoned: nothing is read before it is there.

What the suite would say if a wait, a `record_stream` or a device were wrong: each is broken on purpose, and shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda import broken, gpu_ranks, pools
from tests.cuda.parity import HALF, LATE, PATHS
from tests.cuda.verdict import EXACT, EXACT_WEIGHTS, problems
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.deepspeed, pytest.mark.timeout(900), needs_emulation]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("races")


@pytest.fixture(scope="module")
def wanted(root: Path) -> dict[str, Any]:
    return pools.reference(root)


def test_late_copies_and_poisoned_memory_change_nothing(root: Path, wanted: dict[str, Any]) -> None:
    found = pools.run(PATHS, root, root / "late.jsonl", **LATE)
    assert [f"{case}: {p}" for case in PATHS for p in problems(case, found[case], wanted)] == []


@pytest.mark.release
def test_nor_a_bit_in_half_precision(root: Path, wanted: dict[str, Any]) -> None:
    late = pools.run(HALF, root, root / "half_late.jsonl", **LATE)
    assert [f"{case}: {p}" for case in HALF for p in problems(case, late[case], wanted)] == []
    plain = pools.run(HALF, root, root / "half.jsonl")
    for case in HALF:  # the limits of half precision would hide much
        assert (late[case]["losses"], late[case]["weights"]) == (plain[case]["losses"], plain[case]["weights"]), case


@pytest.fixture(scope="module")
def outcomes(root: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """What the checks see of the product as it is, and of each broken one."""
    found: dict[str, Any] = gpu_ranks(1, "tests.cuda.broken:outcomes", env=LATE, root=str(root), wanted=wanted)[0]
    return found


def test_the_product_as_it_is(outcomes: dict[str, Any]) -> None:
    found = outcomes["nothing"]
    assert found["loss"] <= EXACT and found["weights"] <= EXACT_WEIGHTS
    assert found["elsewhere"] == 0 and found["grown"] == 0
    assert found["in half"] == outcomes["a leak"]["in half"] != [], "which changes no number"


@pytest.mark.parametrize("wait", ["no wait for what comes back", "no wait before memory is let go"])
def test_a_missing_wait_is_caught(wait: str, outcomes: dict[str, Any]) -> None:
    assert not outcomes[wait]["weights"] <= EXACT_WEIGHTS
    assert outcomes[wait]["in half"] != outcomes["nothing"]["in half"]


def test_a_copy_that_nobody_waits_for_writes_to_nobody_elses_memory() -> None:
    """And without `record_stream` it does, which shows that this test would see it."""
    much_later = {"EMUCUDA_COPY_DELAY_US": "400000"}
    assert gpu_ranks(1, "tests.cuda.broken:overwritten", env=much_later, recorded=True) == [0]
    assert gpu_ranks(1, "tests.cuda.broken:overwritten", env=much_later, recorded=False)[0] > 0


def test_a_wrong_device_is_caught(outcomes: dict[str, Any]) -> None:
    found = outcomes["another device"]
    assert found["elsewhere"] > 0 or "same device" in found["error"]


def test_a_leaked_segment_is_caught(outcomes: dict[str, Any]) -> None:
    assert outcomes["a leak"]["grown"] >= broken.LEAK


def test_each_thing_broken_is_looked_at(outcomes: dict[str, Any]) -> None:
    assert set(outcomes) == {"nothing", *broken.BREAKS}
