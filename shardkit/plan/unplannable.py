"""Turns what fake tensors cannot do into one line of cause and one of fix."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ..errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_FIX = (
    "planning knows shapes, not values: give the task plan_loss(model, batch) that needs none, "
    "or plan_batch(n) if it is the data"
)


@contextmanager
def explained() -> Iterator[None]:
    """Raise ConfigError for operators and branches that fake tensors cannot go through.

    Raises:
        ConfigError: names the user's line that needs a tensor's value, or the operator that has no fake kernel.
    """
    try:
        yield
    except UnsupportedOperatorException as error:
        raise ConfigError(
            f"planning cannot follow the operator {error.func}{_at(error.__traceback__)}: it has no fake kernel",
            "register one with torch.library.register_fake",
        ) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(f"{error.func} needs the values of a tensor{_at(error.__traceback__)}", _FIX) from error


def refuse_value(frame: FrameType | None) -> None:
    """Refuse that code of the user's reads a tensor's value; libraries may, what they are told is a constant.

    Raises:
        ConfigError: the innermost frame outside the libraries belongs to neither them nor shardkit.
    """
    while frame is not None and (frame.f_code.co_name == "__torch_dispatch__" or _is_torch(frame.f_code.co_filename)):
        frame = frame.f_back
    if frame is not None and _is_users(frame.f_code.co_filename):
        raise ConfigError(
            f"the model needs the value of a tensor{_line(frame.f_code.co_filename, frame.f_lineno)}", _FIX
        )


def _at(trace: TracebackType | None) -> str:
    """Where the user's own code was, innermost."""
    found = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if _is_users(name):
            found = _line(name, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _line(name: str, number: int) -> str:
    text = linecache.getline(name, number).strip()
    return f" at {name}:{number}" + (f" ({text})" if text else "")


def _is_torch(name: str) -> bool:
    return name.startswith("<") or Path(name).is_relative_to(Path(sys.modules["torch"].__file__ or "").parent)


def _is_users(name: str) -> bool:
    return not (name.startswith(("<", *_LIBRARIES)) or Path(name).is_relative_to(_PACKAGE))
