"""Rehearsals, as far as no build of CUDA is needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest.mock import patch

from shardkit.rehearse.build import INJECT


def injected(name: str) -> Any:
    """A module that rehearsed programs load."""
    with patch.object(sys, "path", [str(INJECT), *sys.path]):
        return importlib.import_module(name)
