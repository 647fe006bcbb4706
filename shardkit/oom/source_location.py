"""Where in the code something happened: the module that ran and the line, found afterwards in stack frames."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
from torch import nn

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# FSDP2's own files are torch's; of shardkit, the parts that watch.
_OTHERS = (
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(_PACKAGE, part) + os.sep for part in ("memory", "oom", "tracing")),
)
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def innermost(frame: FrameType | None) -> str:
    """`FILE:LINE in FUNCTION` of the innermost frame outside torch and this package; empty if there is none."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OTHERS):
            return _line(frame, frame.f_lineno)
        frame = frame.f_back
    return ""


def raised_at(error: BaseException) -> str | None:
    """The same for an exception: the deepest of its traceback's frames outside torch and this package."""
    found = None
    for trace in _traces(error):
        if not trace.tb_frame.f_code.co_filename.startswith(_OTHERS):
            found = _line(trace.tb_frame, trace.tb_lineno)
    return found


def module_of(error: BaseException, model: nn.Module | None) -> str | None:
    """Name of the innermost module of `model` whose forward an exception came from, "" for the model itself.

    Read from the exception's traceback: nothing has to be noted while all goes well. In backward that is a module whose
    forward is computed again, or whose parameters FSDP2 gathers; else `None`.
    """
    names = {} if model is None else {id(module): plain_name(name) for name, module in model.named_modules()}
    found, inside = None, False
    for trace in _traces(error):
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):  # an engine that is a module itself also has methods that run no forward
            inside = inside or trace.tb_frame.f_code.co_name in ("_call_impl", "forward")
            found = names.get(id(owner), found) if inside else found
        elif type(owner).__name__ == "FSDPParamGroup":
            fqn = getattr(owner, "_module_fqn", None)
            found = plain_name(fqn) if isinstance(fqn, str) else found
    return found


def plain_name(name: str) -> str:
    """A module's name without what wrappers add to it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _line(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
