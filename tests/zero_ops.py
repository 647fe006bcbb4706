"""Ops of DeepSpeed, which are compiled at their first use; `python -m tests.zero_ops` compiles what tests need."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def set_folder() -> None:
    """Keep compiled ops in the virtual environment, as they belong to its torch; a folder that is set already stays."""
    if sys.prefix != sys.base_prefix:
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def leave_out_shm() -> None:
    """Leave out its shared-memory collectives: they take minutes to compile, and a killed build blocks all later ones.

    shardkit's own engine does the same (`shardkit.strategies.zero.engine`).
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> str:
    """Compile DeepSpeedCPUAdam, which takes longer than a test may; returns the compiler's first error, or ""."""
    set_folder()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from shardkit.strategies.zero import config

    return config._load(CPUAdamBuilder)


if __name__ == "__main__":
    sys.exit(main() or 0)
