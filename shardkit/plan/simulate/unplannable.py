"""Turn failures of fake tensors into one line of cause and one line of fix."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from types import FrameType, TracebackType

from ...errors import ConfigError, ShardkitError
from .compat import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException

_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = tuple(
    str(path)
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    for path in (Path(sysconfig.get_path(name)), Path(sysconfig.get_path(name)).resolve())
)
_INSTALLED_ANYWHERE = ("torch", "deepspeed", "transformers")
"""Packages that are never the user's code, wherever they are installed, such as in a folder on PYTHONPATH."""
_FIX = (
    "planning knows shapes, not values: give the task plan_loss(model, batch) that needs none, "
    "or plan_batch(n) if it is the data"
)
_NO_FAKE = re.compile(r"There was no fake impl registered for <CustomOpDef\((.+?)\)>")
_CHANGE = "change the setting that the error names"


class Untraceable(ShardkitError):
    """The step failed on fake tensors for an unknown reason."""


@contextmanager
def explained() -> Iterator[None]:
    """Raise ConfigError for operators and branches that fake tensors do not support."""
    try:
        yield
    except UnsupportedOperatorException as error:
        raise _no_fake_kernel(str(error.func), _at(error.__traceback__)) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(f"{error.func} needs the values of a tensor{_at(error.__traceback__)}", _FIX) from error
    except ShardkitError:
        raise
    except (Exception, SystemExit) as error:
        at_line = _at(error.__traceback__)
        first_line = next(iter(str(error).strip().splitlines()), "")
        if custom := _NO_FAKE.match(first_line):
            raise _no_fake_kernel(custom[1], at_line) from error
        raise Untraceable(
            f"this step cannot be traced: {type(error).__name__}: {shorten(first_line, 200)}{at_line}",
            ("if it trains, give the task a plan_loss(model, batch) that avoids it" if at_line else _CHANGE)
            + "; SHARDKIT_DEBUG=1 shows the traceback",
        ) from error


def _no_fake_kernel(operator: str, at_line: str) -> ConfigError:
    return ConfigError(
        f"planning cannot follow the operator {operator}{at_line}: it has no fake kernel",
        "register one with torch.library.register_fake",
    )


def refuse_value(frame: FrameType | None) -> None:
    """Refuse to let the user's code read a tensor's value; libraries may read it and get a constant."""
    while frame is not None and (frame.f_code.co_name == "__torch_dispatch__" or _is_torch(frame.f_code.co_filename)):
        frame = frame.f_back
    if frame is not None and _is_users(frame.f_code.co_filename):
        at_line = _line(frame.f_code.co_filename, frame.f_lineno)
        raise ConfigError(f"the model needs the value of a tensor{at_line}", _FIX)


def of_deepspeed(frame: FrameType | None) -> bool:
    """Whether the code that called torch is DeepSpeed's."""
    while frame is not None and _is_torch(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and _is_of("deepspeed", frame.f_code.co_filename)


def constructor_reads(frame: FrameType | None) -> ConfigError:
    """The error of a constructor that reads a tensor's value and cannot be built with real ones."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    at_line = "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)
    return ConfigError(
        f"the model's constructor needs the value of a tensor{at_line}, and cannot be built on this machine's CPU",
        "compute what it reads from numbers instead of tensors, or make the model's constructor work on the CPU",
    )


def _at(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code."""
    at_line = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if _is_users(name):
            at_line = _line(name, trace.tb_lineno)
        trace = trace.tb_next
    return at_line


def _line(name: str, number: int) -> str:
    text = linecache.getline(name, number).strip()
    return f" at {name}:{number}" + (f" ({text})" if text else "")


def _is_torch(name: str) -> bool:
    return name.startswith("<") or _is_of("torch", name)


def _is_users(name: str) -> bool:
    if name.startswith(("<", *_LIBRARIES)) or Path(name).is_relative_to(_PACKAGE):
        return False
    return not any(_is_of(package, name) for package in _INSTALLED_ANYWHERE)


def _is_of(package: str, name: str) -> bool:
    module = sys.modules.get(package)
    return module is not None and Path(name).is_relative_to(Path(module.__file__ or "").parent)
