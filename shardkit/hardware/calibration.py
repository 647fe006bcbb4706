"""Constants that `shardkit doctor --calibrate` measured on this machine, kept for planning; imports no torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import cache_dir, write_whole

Constants = dict[str, Any]
"""Figures of one device in a world of one size; docs/launch.md lists them."""


def path() -> Path:
    return cache_dir() / "calibration.json"


def cpu_name() -> str:
    """The device name of ranks that compute on CPUs."""
    return f"cpu ({os.uname().machine})"


def load() -> dict[str, Constants]:
    """All saved constants, by "device x world size"; empty before the first calibration."""
    try:
        stored = json.loads(path().read_text())
        return {name: dict(constants) for name, constants in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        fix = "delete it, and run shardkit doctor --calibrate again"
        raise ConfigError(f"{path()} cannot be read: {error}", fix) from error


def find(device: str, world_size: int) -> Constants | None:
    """A device's constants at the nearest world size; a job of several ranks prefers those measured with several.
    `device`: a name from `torch.cuda.get_device_name`, or `cpu_name()`."""

    def distance(constants: Constants) -> tuple[bool, float]:
        measured = int(constants["world_size"])
        return world_size > 1 and measured == 1, abs(math.log(measured / world_size))

    same = [constants for constants in load().values() if constants.get("device") == device]
    return min(same, key=distance, default=None)


def save(constants: Constants) -> None:
    """Save constants beside those of other devices and world sizes."""
    calibrations = {**load(), f"{constants['device']} x {constants['world_size']}": constants}
    path().parent.mkdir(parents=True, exist_ok=True)
    write_whole(path(), json.dumps(calibrations, indent=1) + "\n")
