"""`shardkit.train` as rank 0 of two, of which the other never comes."""

from __future__ import annotations

import os
import sys

from shardkit.launch.local import processes
from shardkit.train import main

tie = processes.end_with_torchrun


def told(environ: dict[str, str]) -> None:
    tie(environ)
    print("joining", flush=True)


if __name__ == "__main__":
    os.environ |= {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    processes.end_with_torchrun = told
    sys.exit(main(["--config", "configs/ddp.yaml", *sys.argv[1:]]))
