"""Whether the norm of ZeRO's gradients is finite, known on the device."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from ...config.libraries import Private
from .state import GROUP_NORMS, IS_INVALID, MASK, offloaded, stage_of


class FiniteNorms:
    """Computes on the device, before the update's kernels run, whether the norm of the gradients is finite.

    DeepSpeed replaces a group's norm that is not finite by -1, and up to 0.19.6 uses the -1 like any norm when it
    combines groups: it takes the step. In stages 1 and 2 on a GPU each -1 is copied from pageable memory, and 0.19.8
    reads the total norm back: the host waits twice for each group. There the norms stay as they are; nothing is read.

    Attributes:
        bad: 1 if a norm of this step was not finite, else 0.
    """

    def __init__(self, zero: Any, device: torch.device) -> None:
        self.bad = torch.zeros((), device=device)
        self._bad_on_host = False
        self._of_groups = stage_of(zero) == 3 or bool(offloaded(zero))
        if self._of_groups:
            for name in GROUP_NORMS:
                setattr(zero, name, self._noting_group(getattr(zero, name)))
            return
        zero.get_grad_norm_direct = _inside(zero.get_grad_norm_direct, MASK, lambda norm, device=None, val=-1.0: None)
        zero.unscale_and_clip_grads = _inside(zero.unscale_and_clip_grads, IS_INVALID, lambda norm: False)
        zero.scaled_global_norm = self._noting_total(zero.scaled_global_norm)

    def _noting_total(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            norm = compute(*args, **kwargs)
            # inf · 0 and NaN · 0 are NaN, which differs from 0. Two kernels only: this runs in every step.
            torch.mul(norm, 0, out=self.bad).ne_(0)
            return norm

        return noted

    def _noting_group(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            group_norm = compute(*args, **kwargs)
            norm = torch.as_tensor(group_norm)
            bad = (norm.sqrt() * 0).ne_(0)
            if norm.device == self.bad.device:
                torch.maximum(self.bad, bad.float(), out=self.bad)
            elif bad:
                self._bad_on_host = True
                self.bad.fill_(1.0)
            return group_norm

        return noted

    def forget(self) -> None:
        """Forget the norms of the last step, before those of the next one are computed."""
        if self._of_groups:
            self._bad_on_host = False
            self.bad.zero_()

    def checked(self, norm: torch.Tensor) -> torch.Tensor:
        """DeepSpeed's norm over all groups; not finite if one group's norm was not."""
        if not self._of_groups:
            return norm
        if norm.device != self.bad.device:
            return torch.full_like(norm, math.inf) if self._bad_on_host else norm
        return norm.masked_fill(self.bad > 0, math.inf)


def _inside(method: Callable[..., Any], name: Private, instead: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with a function of its module replaced by `instead` while the method runs.

    Raises:
        NameGone: the installed release should have that function, and has not.
    """
    module, _, function = name.path.rpartition(".")
    if not name.needed():  # an older release, without that function
        return method
    name.find()  # raises if a newer release has renamed it

    def replaced(*args: Any, **kwargs: Any) -> Any:
        names = vars(sys.modules[module])
        original, names[function] = names[function], instead
        try:
            return method(*args, **kwargs)
        finally:
            names[function] = original

    return replaced
