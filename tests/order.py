"""The order of the tests: the longest files first, or any order that a seed draws (`--order-seed`)."""

from __future__ import annotations

import random

import pytest

LONG = [
    "tests/slurm", "tests/plan/test_plan.py", "tests/launch/test_launcher.py",
    "tests/strategies/test_graphs.py", "tests/checkpoint/test_resume.py", "tests/run/test_directory.py",
    "tests/strategies/test_foreign.py", "tests/checkpoint/formats/test_hostile.py", "tests/run/test_evaluate.py",
    "tests/run/test_train.py", "tests/plan/test_world.py", "tests/report/test_page.py",
    "tests/integrations/test_watching.py", "tests/run/test_watchdog.py",
    "tests/test_libraries.py", "tests/run/test_gradients.py", "tests/strategies/test_precision.py",
    "tests/checkpoint/test_faults.py", "tests/plan/test_auto.py", "tests/plan/test_cost.py",
    "tests/launch/test_slurm.py", "tests/docs",
    "tests/checkpoint/test_matrix.py", "tests/faults/test_memory.py", "tests/strategies/test_parity.py",
    "tests/checkpoint/formats/test_bad_input.py", "tests/config/test_load.py", "tests/checkpoint/test_manage.py",
    "tests/activation/test_strategies.py", "tests/launch/test_doctor.py", "tests/tasks/test_models.py",
]  # fmt: skip
"""Folders and files that take more than 8 s, the longest first: started early, they leave
short ones for the end, and the workers end together."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed",
        metavar="N",
        help="run the files, and the tests of each, in the order that this number draws; `random` draws a number",
    )


def draw_seed(config: pytest.Config) -> None:
    """Replaces `--order-seed random` by a number; the workers of pytest-xdist are told theirs (`workerinput`)."""
    if hasattr(config, "workerinput"):
        config.option.order_seed = config.workerinput["order_seed"]
    elif config.option.order_seed == "random":
        config.option.order_seed = str(random.SystemRandom().randrange(10**6))


def sort(items: list[pytest.Item], seed: str | None) -> None:
    """Tests of one file stay together, as they share its fixtures."""
    if seed is None:
        items.sort(key=_length_rank)
        return
    draw = random.Random(seed)
    file_ranks = {path: draw.random() for path in sorted({str(item.path) for item in items})}
    test_ranks = {nodeid: draw.random() for nodeid in sorted(item.nodeid for item in items)}
    items.sort(key=lambda item: (file_ranks[str(item.path)], test_ranks[item.nodeid]))


def _length_rank(item: pytest.Item) -> int:
    return next((i for i, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))
