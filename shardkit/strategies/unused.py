"""The parameters of FSDP2's units that a rank did not use in a step, while FSDP2 counts their gradients as zero."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..parallel import compat_fsdp

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13
"""Whether a gradient that a rank lacks can count as zero; else FSDP2 would mix it up with another parameter's."""


class UnusedParameters:
    """Counts, for each parameter of a sharded model, the reductions of a step to which this rank gave no gradient.

    Ranks that use different parameters of a unit must still reduce the same ones: FSDP2 packs the gradients of a unit
    into one buffer, without their names.

    Args:
        model: the sharded model; its units count missing gradients as zero from now on, where torch can.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._reductions: Counter[FSDPModule] = Counter()
        self._without: Counter[tuple[FSDPModule, str]] = Counter()
        self._step_is_over = False
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._gathered_once = False
        for unit in self._units:
            if REDUCES_UNUSED:
                unit.set_reduce_scatter_unused_params(True, recurse=False)
            count = torch.compiler.disable(partial(self._count, unit))  # type: ignore[no-untyped-call]
            compat_fsdp.before_reduction(unit, count)

    def _count(self, unit: FSDPModule, without_gradient: list[Any]) -> None:
        self.begin_step()
        self._reductions[unit] += 1
        for param in without_gradient:
            self._without[unit, self._names[id(param)]] += 1

    def names(self) -> list[str]:
        """The parameters that this rank did not use in the present step; between two steps, in the one that ended."""
        return sorted(name for (unit, name), count in self._without.items() if count == self._reductions[unit])

    def end_step(self) -> None:
        """Restart the count at the next reduction; until then `names` describes the step that has ended.

        The first step gathers the units that it did not use, on all ranks: FSDP2 reduces no zeros for a unit that was
        never gathered, and a rank that uses it later would reduce it alone.
        """
        self._step_is_over = True
        if not self._gathered_once:
            self._gathered_once = True
            for unit in self._units:
                if not compat_fsdp.was_gathered(unit):
                    unit.unshard()
                    unit.reshard()

    def begin_step(self) -> None:
        """Forget the step that has ended, if one has."""
        if self._step_is_over:
            self._reductions.clear()
            self._without.clear()
            self._step_is_over = False
