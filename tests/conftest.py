"""What holds for every test: it leaves nothing behind. And which tests stay together when `make test` runs several at a
time: those of a file, which share what it has set up, and those of Slurm, of which this machine has one cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.guard import MARK, nothing_left

# Workers side by side share the cores: two threads each would wait for one another at every operator.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ[MARK] = str(os.getpid())


LONG = [
    "tests/slurm", "tests/plan/test_plan.py", "tests/launch/test_launcher.py", "tests/run/test_directory.py",
    "tests/run/test_train.py", "tests/checkpoint/test_resume.py", "tests/strategies/test_foreign.py",
    "tests/plan/test_world.py", "tests/report/test_browser.py", "tests/checkpoint/formats/test_hostile.py",
    "tests/run/test_gradients.py", "tests/run/test_watching.py", "tests/run/test_watchdog.py",
    "tests/test_libraries.py",
    "tests/strategies/test_parity.py", "tests/strategies/test_precision.py", "tests/checkpoint/test_faults.py",
    "tests/plan/test_auto.py", "tests/plan/test_cost.py", "tests/launch/test_slurm.py", "tests/cli/test_foreign.py",
    "tests/docs",
    "tests/checkpoint/test_matrix.py", "tests/faults/test_memory.py", "tests/checkpoint/formats/test_bad_input.py",
    "tests/config/test_load.py", "tests/checkpoint/test_manage.py", "tests/strategies/test_features.py",
    "tests/activation/test_strategies.py", "tests/launch/test_doctor.py", "tests/tasks/test_models.py",
]  # fmt: skip
"""Folders and files that take more than 8 s, the longest first (docs/log.md has the times): started early, they leave
short ones for the end, and the workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG)))


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist one test runs after the other
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by number of tests, the longest would come last

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/slurm" if file.startswith("tests/slurm/") else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """Fails a test that leaves something behind (tests/guard.py)."""
    with nothing_left():
        yield
