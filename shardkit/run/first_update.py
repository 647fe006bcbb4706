"""Check that the first update changes the weights."""

from __future__ import annotations

import torch

from ..errors import TrainingError
from ..parallel.world import World
from ..strategies import Strategy


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
