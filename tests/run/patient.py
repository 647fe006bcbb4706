"""`python -m tests.run.patient` is `python -m shardkit.train` with minutes for the plan of the run.

A planning process has the lowest priority, and others may want all cores.
"""

from __future__ import annotations

import runpy

from shardkit.run import planning

if __name__ == "__main__":
    planning.LIMIT_S = 250.0
    runpy.run_module("shardkit.train", run_name="__main__", alter_sys=True)
