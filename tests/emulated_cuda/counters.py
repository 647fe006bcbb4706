"""The calls that this process makes of the emulated CUDA, as the emulation counts them (README.md)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator


def counts() -> dict[str, int]:
    """How often this process has called the runtime and the driver so far, by kind of call."""
    import emucuda

    runtime = ctypes.CDLL(str(next(emucuda.LIBRARIES.glob("libcudart.so.*"))))
    runtime.emucuda_counter_name.restype = ctypes.c_char_p
    runtime.emucuda_counter_value.restype = ctypes.c_ulonglong
    return {
        runtime.emucuda_counter_name(i).decode(): runtime.emucuda_counter_value(i)
        for i in range(runtime.emucuda_counter_number())
    }


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """`with counting() as made:`; after the block `made` has the calls made in it, those of other threads too."""
    before = counts()
    made: dict[str, int] = {}
    try:
        yield made
    finally:
        made.update({name: total - before[name] for name, total in counts().items()})
