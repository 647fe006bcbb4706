"""Run a program unchanged and write torch's peaks of GPU memory at its end: `-m benchmarks.gpu.recorded PROGRAM ARGS`.

`RECORDED_PEAKS` names the file.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    began = time.monotonic()
    out = Path(os.environ.pop("RECORDED_PEAKS"))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    import torch

    torch.cuda.synchronize()
    peaks = {
        "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"], "used_by_process": used_by_process(),
        "reserved_at_end": torch.cuda.memory_reserved(), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    out.write_text(json.dumps(peaks))


def used_by_process() -> int | None:
    """Bytes of the GPU that the driver counts for this process, with its context; `None` where it does not tell."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip() == str(os.getpid()) and mebibytes.strip().isdigit():
            return int(mebibytes) << 20
    return None


if __name__ == "__main__":
    main()
