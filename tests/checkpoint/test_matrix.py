"""Saved under one strategy at one world size, loaded under another: the same state, the same losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint import cases
from tests.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]
TOLERANCE = 1e-5

# Every case once or more as source and as target, never at the same world size.
COVERING: dict[str, tuple[str, ...]] = {
    "single@1": ("zero3@2", "hsdp@4", "zero3+optimizer@3"),
    "zero3+optimizer@1": ("ddp@2", "zero1@3"),
    "ddp@2": ("hsdp@4", "zero3+optimizer@1"),
    "zero1@2": ("single@1", "zero3@3"),
    "fsdp@3": ("zero2@2", "single@1"),
    "zero2@3": ("fsdp@2", "hsdp@4"),
    "zero3@3": ("ddp@2", "fsdp@2"),
    "zero3+optimizer@3": ("zero2@2", "zero3@2"),
    "ddp@3": ("zero3@2",),
    "hsdp@4": ("zero3+optimizer@3", "zero1@3", "single@1", "ddp@2"),
}
BF16: dict[str, tuple[str, ...]] = {
    "ddp@2": ("zero1@3", "zero3@3"),
    "zero1@2": ("fsdp@3",),
    "zero2@3": ("ddp@2", "zero3@2"),
    "zero3@3": ("zero2@2", "ddp@2"),
    "zero3+optimizer@3": ("zero1@2",),
    "fsdp@3": ("zero3+optimizer@2",),
}


def full() -> dict[str, tuple[str, ...]]:
    everything = tuple(f"{case}@{world}" for case in cases.CASES for world in cases.worlds(case))
    return dict.fromkeys(everything, everything)


def by_world(names: set[str]) -> dict[int, list[str]]:
    worlds: dict[int, list[str]] = {}
    for name in sorted(names):
        case, _, world = name.partition("@")
        worlds.setdefault(int(world), []).append(case)
    return worlds


def check(
    matrix: dict[str, tuple[str, ...]], root: Path, mode: str, compare: Callable[[str, list[float]], None]
) -> None:
    """Save every source once, then load all of them, one pool of ranks for each world size."""
    extra = {"precision.mode": mode}
    for world, names in by_world({source for sources in matrix.values() for source in sources}).items():
        run_ranks(world, "tests.checkpoint.cases:save_all", timeout=1200, names=names, root=str(root), **extra)
    for world, targets in by_world(set(matrix)).items():
        pairs = [(source, target) for target in targets for source in matrix[f"{target}@{world}"]]
        results = run_ranks(
            world, "tests.checkpoint.cases:load_all", timeout=3000, pairs=pairs, root=str(root), **extra
        )
        for rank, result in enumerate(results):
            for (source, target), (differing, losses) in result.items():
                where = f"{source} → {target}@{world}, rank {rank}"
                assert not differing, f"{where}: not what was saved: {differing}"
                compare(where, losses)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the uninterrupted single run, after the step at which the others are saved."""
    root = str(tmp_path_factory.mktemp("single"))
    return list(run_ranks(1, "tests.checkpoint.cases:save_all", names=["single"], root=root)[0]["single"])


def near(wanted: list[float]) -> Callable[[str, list[float]], None]:
    def compare(where: str, losses: list[float]) -> None:
        for step, (loss, want) in enumerate(zip(losses, wanted, strict=True)):
            assert abs(loss - want) <= TOLERANCE, f"{where}, step {step}: {loss} instead of {want}"

    return compare


def anything(where: str, losses: list[float]) -> None:
    """bf16 losses of two strategies differ by their rounding; the state must not."""
    assert all(0 < loss < 4 for loss in losses), where


def test_the_run_goes_on_learning(single: list[float]) -> None:
    assert single[0] - single[-1] > 0.1, "if nothing moves, a lost optimizer state shows nowhere"


@pytest.mark.timeout(900)
def test_any_strategy_and_world_size_to_any_other(tmp_path: Path, single: list[float]) -> None:
    check(COVERING, tmp_path, "fp32", near(single))


@pytest.mark.timeout(900)
def test_bf16_masters_and_moments_are_kept_to_the_bit(tmp_path: Path) -> None:
    check(BF16, tmp_path, "bf16", anything)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_full_matrix(tmp_path: Path, single: list[float]) -> None:
    check(full(), tmp_path, "fp32", near(single))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_full_matrix_in_bf16(tmp_path: Path) -> None:
    check(full(), tmp_path, "bf16", anything)
