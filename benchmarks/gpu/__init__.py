"""Measurements that need a GPU: `python -m benchmarks gpu`, in parts that can be interrupted (docs/gpu.md)."""

from __future__ import annotations

from importlib import import_module

from .cases import Cases

PARTS = ("mfu", "accuracy", "rehearsed")


def part_cases(part: str, dry: bool) -> Cases:
    """The cases of a part in the order of their runs, the most informative first.

    Args:
        dry: tiny, fewer of each kind.
    """
    cases: Cases = import_module(f".{part}", __name__).cases(dry)
    return cases


def main() -> None:
    """The command line."""
    from .command import main as command

    command()
