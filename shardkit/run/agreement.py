"""What the ranks tell each other once per step: one small reduction, made of named parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..parallel.world import World

OnSums = Callable[[Sequence[float]], None]


class Reduction:
    """One gloo all-reduce of float64 over all ranks, made of named parts. Whoever adds a part is told its sums.

    Every rank adds the same parts in the same order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: dict[str, tuple[list[float], OnSums]] = {}
        self._end: Callable[[], list[float]] | None = None

    @property
    def has_begun(self) -> bool:
        return self._end is not None

    def add(self, name: str, values: Sequence[float], on_sums: OnSums) -> None:
        """Send `values` with the reduction; `on_sums` gets their sums over all ranks.

        Raises:
            ValueError: there is a part of this name, or the reduction is under way.
        """
        if self.has_begun or name in self._parts:
            raise ValueError(f"part {name!r} of a reduction was added twice, or too late")
        self._parts[name] = list(values), on_sums

    def begin(self) -> None:
        """Start the all-reduce. No other collective of the control group may come before `wait` or `finish`."""
        self._end = self._world.begin_sum([value for values, _ in self._parts.values() for value in values])

    def wait(self) -> list[float]:
        """Wait for the sums of all parts, in one list; tells nobody."""
        assert self._end is not None
        return self._end()

    def finish(self) -> None:
        """Wait for the sums, and tell each part its own, in the order of `add`. A part may raise.

        The parts are let go: one that belongs to the owner of this would keep the owner alive, with the data of a step.
        """
        sums = iter(self.wait())
        parts, self._parts = self._parts, {}
        for values, on_sums in parts.values():
            on_sums([next(sums) for _ in values])
