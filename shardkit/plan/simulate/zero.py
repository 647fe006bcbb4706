"""The ZeRO engine on fake tensors; a module of its own because it imports DeepSpeed."""

from __future__ import annotations

from typing_extensions import override

from ...parallel.world import World
from ...strategies.zero.engine import ZeRO


class PlannedZeRO(ZeRO):
    """The ZeRO engine without DeepSpeedCPUAdam, a C++ op that reads real memory; see `compat.deepspeed_alone`."""

    @staticmethod
    @override
    def prepare_cpu_adam(world: World) -> None:
        """Compile nothing."""
