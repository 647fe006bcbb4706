"""The emulated CUDA of this environment; tests/emulated_cuda/README.md of shardkit's sources describes it.

`EMUCUDA=1` turns it on: `sitecustomize` or a `.pth` file calls `preload` when Python starts, torch calls `attach` when
it is imported.
"""

from __future__ import annotations

import ctypes
import os
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
