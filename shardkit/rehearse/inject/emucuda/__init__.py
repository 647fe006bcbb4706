"""The emulated CUDA of this environment; tests/emulated_cuda/README.md of shardkit's sources describes it.

`EMUCUDA=1` turns it on: `sitecustomize` or a `.pth` file calls `preload` when Python starts, torch calls `attach` when
it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = Path(__file__).parent / "lib"
_CUDA_HOME = Path(__file__).parent / "cuda"


def enabled() -> bool:
    return os.environ.get("EMUCUDA", "0") not in ("", "0")


def computing() -> bool:
    """Whether operators compute; with EMUCUDA_COMPUTE=0 torch's own CUDA code runs over kernels that do nothing."""
    return os.environ.get("EMUCUDA_COMPUTE", "1") not in ("", "0")


def preload() -> None:
    """Load the emulated libraries before torch does.

    torch finds its CUDA libraries by an RPATH, before any search path; but it takes one loaded under the same name.
    """
    if not enabled():
        return
    for line in (LIBRARIES / "preload").read_text().splitlines():
        mode, name = line.split()
        if mode == "always" or not computing():
            ctypes.CDLL(str(LIBRARIES / name), ctypes.RTLD_GLOBAL)
    if _CUDA_HOME.is_dir():
        os.environ.setdefault("CUDA_HOME", str(_CUDA_HOME))  # DeepSpeed compiles its optimizers against it
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(LIBRARIES))  # Triton links its launcher against it


def attach() -> None:
    """Replace torch's kernels; an entry point of `torch.backends`, called when torch has been imported."""
    if enabled():
        ctypes.CDLL(str(LIBRARIES / ("libemucuda_operators.so" if computing() else "libemucuda_no_compute.so")))
    if folder := os.environ.get("SHARDKIT_COMPUTED"):  # each process that initialises CUDA makes a file there
        import torch

        torch.cuda._lazy_call(lambda: Path(folder, str(os.getpid())).touch())  # type: ignore[no-untyped-call]


def _runtime() -> ctypes.CDLL:
    if not enabled():
        raise RuntimeError("CUDA is not emulated in this process: set EMUCUDA=1 before Python starts")
    runtime = ctypes.CDLL(str(next(LIBRARIES.glob("libcudart.so.*"))))
    runtime.emucuda_counter_name.restype = ctypes.c_char_p
    runtime.emucuda_counter_value.restype = ctypes.c_ulonglong
    runtime.emucuda_peak_memory.restype = ctypes.c_size_t
    return runtime


def counts() -> dict[str, int]:
    """How often this process has called the runtime and the driver so far, by kind of call.

    Nanoseconds of processor time that only the emulation takes: `computing_ns` for what a GPU would compute,
    `bookkeeping_ns`, `streams_ns` of the streams' threads; and `emulating_here_ns`, of the calling thread.
    """
    runtime = _runtime()
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


def peak_memory(device: int = 0) -> int:
    """Most bytes that this process held of a device, with everything that is rounded up."""
    return int(_runtime().emucuda_peak_memory(device))


def operators() -> tuple[set[str], set[str]]:
    """Names of the CUDA operators that the CPU's kernels stand for, and of those that have no CPU kernel.

    The second are not emulated, unless a file in native/ops does it by hand.
    """
    library = ctypes.CDLL(str(LIBRARIES / "libemucuda_operators.so"))

    def names_from(symbol: str) -> set[str]:
        function = getattr(library, symbol)
        function.restype = ctypes.c_char_p
        return set(function().decode().split())

    return names_from("emucuda_replaced_operators"), names_from("emucuda_operators_without_cpu_kernel")
