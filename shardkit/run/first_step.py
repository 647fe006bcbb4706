"""What only the first step shows: whether its update changes the weights, and how its code compiled."""

from __future__ import annotations

import logging

import torch

from ..config.libraries import is_first_rank
from ..errors import TrainingError
from ..parallel.compat import graph_breaks
from ..parallel.world import World
from ..strategies import Strategy

_LOG = logging.getLogger(__name__)


class FirstUpdate:
    """Refuses a training whose first update changes no parameter on any rank.

    Attributes:
        is_checked: whether there is nothing left to do.
    """

    def __init__(self, world: World, strategy: Strategy) -> None:
        self.is_checked = False
        self._world, self._strategy = world, strategy
        self._before: list[torch.Tensor] = []

    def look(self) -> None:
        """Remember the weights before an update."""
        if not self.is_checked:
            self._before = self._fingerprint()

    def check(self, lr: float) -> None:
        """Compare the weights after an update that was not skipped; collective the first time.

        Raises:
            TrainingError: no weight changed, though the learning rate is not 0.
        """
        if self.is_checked:
            return
        self.is_checked = True
        n_moved = sum(float(not torch.equal(a, b)) for a, b in zip(self._before, self._fingerprint(), strict=True))
        self._before = []
        if lr > 0 and self._world.sum([n_moved])[0] == 0:
            raise TrainingError(
                "no parameter changed in the first step, on any rank",
                "check that the loss depends on the model's parameters and that they require gradients",
            )

    def _fingerprint(self) -> list[torch.Tensor]:
        """The first elements of this rank's part of each weight."""
        return [s.local[:256].float().clone() for s in self._strategy.shards() if s.name.startswith("model.")]


def say_graph_breaks() -> None:
    """Warn if torch.compile could not make one graph of each unit: the pieces between breaks are slower."""
    breaks = graph_breaks()
    if breaks and is_first_rank():
        reasons = ", ".join(f"{reason} ({number})" for reason, number in breaks.items())
        _LOG.warning(
            "compile.enabled=true: torch.compile broke its graphs %d times in the first step: %s. The code between two "
            "breaks is compiled, the rest is not; TORCH_LOGS=graph_breaks names the lines",
            sum(breaks.values()), reasons,
        )  # fmt: skip
