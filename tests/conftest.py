"""What holds for every test: it leaves nothing behind. And which tests stay together when `make test` runs several at a
time: those of a file, which share what it has set up, and those of Slurm, of which this machine has one cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import order, ranks, touched, zero_ops
from tests.guard import MARK, nothing_left

# Workers side by side share the cores: two threads each would wait for one another at every operator.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ[MARK] = str(os.getpid())
# Containers often set it. Each of the suite's hundreds of processes would then compile the sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
zero_ops.set_folder()
# On a busy machine drawing examples may take long, which says nothing of what is tested.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")
SLOW_HOST = 2.5
"""How much longer than its time limit a slow test may take, and its ranks: hosts of CI differ by so much in a day."""


def pytest_addoption(parser: pytest.Parser) -> None:
    order.add_option(parser)
    touched.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    order.draw_seed(config)
    if config.option.budget_s is not None:
        config.pluginmanager.register(touched.Budget(config.option.budget_s))


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.option.order_seed
    return None if seed is None else f"order of the tests: --order-seed {seed}"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus and config.option.order_seed is not None:  # -q leaves the header out
        terminalreporter.write_line(f"repeat this order with --order-seed {config.option.order_seed}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    touched.keep_touched(config, items)
    order.sort(items, config.option.order_seed)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            limit = item.get_closest_marker("timeout")
            seconds = float(config.getini("timeout")) if limit is None else limit.args[0]
            item.add_marker(pytest.mark.timeout(SLOW_HOST * seconds), append=False)


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules, which start ranks too
def pytest_runtest_setup(item: pytest.Item) -> None:
    ranks.patience = SLOW_HOST if item.get_closest_marker("slow") is not None else 1.0


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["order_seed"] = node.config.option.order_seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Half as many again as cores: a fourth of the time, tests wait for a process to start or to end."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + (cores + 1) // 2


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist one test runs after the other
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by number of tests, the longest would come last

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/slurm" if file.startswith("tests/slurm/") else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """Fails a test that leaves something behind (tests/guard.py)."""
    with nothing_left():
        yield
