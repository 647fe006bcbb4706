"""Changes of a configuration that lower its memory, with the bytes that each one saves.

The savings are rules over counted bytes, not a plan: for state they are as exact as the count, for activations they are
estimates, and for a run that failed in the middle of a forward pass they are lower bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from ..config import capability
from ..config.load import as_override, resolve_batch
from ..config.schema import RunConfig
from ..errors import ConfigError, gib
from .advice_rules import Numbers, Used, outside, rules

__all__ = ["Advice", "Used", "advise"]


@dataclass(frozen=True)
class Advice:
    """One change.

    Attributes:
        change: settings as on the command line, `activation.policy=full`, separated by spaces; or an instruction.
        saving_bytes: bytes saved on the rank and memory in question; `None` if it helps by an unknown amount.
        cost: its price, in time or otherwise.
        why: the source of the saving.
        planned: the memory with this change, in words; empty if it was not planned.
        verdict: of the plan.
    """

    change: str
    saving_bytes: int | None
    cost: str
    why: str
    planned: str = ""
    verdict: str = ""

    @property
    def effect(self) -> str:
        """The plan's result, else the saving; empty if neither is known."""
        return self.planned or (f"saves {gib(self.saving_bytes)}" if self.saving_bytes else "")

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value or key not in ("planned", "verdict")}


def advise(config: RunConfig, world_size: int, local_world_size: int, device: str, used: Used) -> list[Advice]:
    """Changes that would lower the memory in use, the largest saving first; unknown savings come last.

    Changes that the capability table refuses, or that are set already, are left out.

    Args:
        device: "cpu" or "cuda".
    """
    n = Numbers(config, world_size, resolve_batch(config, world_size), device, used)
    advice = [Advice(*rule) for rule in outside(n)] if used.short_of == "device" else []
    for settings, saving, cost, reason in rules(n):
        if (saving is None or saving >= 1) and _allowed(config, settings, world_size, local_world_size, device):
            change = " ".join(f"{key}={as_override(value)}" for key, value in settings.items())
            advice.append(Advice(change, None if saving is None else round(saving), cost, reason))
    return sorted(advice, key=lambda advice: -(advice.saving_bytes or 0))


def _allowed(config: RunConfig, settings: Mapping[str, Any], world: int, local_world: int, device: str) -> bool:
    """Whether the changed configuration differs, is valid, and works on these ranks."""
    changed = config.model_dump()
    for key, value in settings.items():
        section, name, *inner = key.split(".")
        changed[section][name] = {inner[0]: value} if inner else value
    try:
        new = RunConfig.model_validate(changed)
        capability.check(new, device=device, world_size=world, local_world_size=local_world)
        resolve_batch(new, world)
    except (ConfigError, ValidationError):
        return False
    return new != config
