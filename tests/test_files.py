"""Output to a disk that is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import REPO

FULL = Path("/dev/full")
CODE = """
import logging, sys
from shardkit.files import outlive_full_disks
if sys.argv[1] == "outlive":
    outlive_full_disks()
for step in range(2000):
    print("a line for the log", flush=step % 2 == 0)
    print("another", file=sys.stderr)
logging.getLogger("x").warning("and a warning")
sys.exit(7)
"""


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("outlive", [True, False])
def test_a_process_outlives_a_full_disk_under_its_output(outlive: bool, unbuffered: bool) -> None:
    with FULL.open("wb") as full:
        argv = [sys.executable, *(["-u"] if unbuffered else []), "-c", CODE, "outlive" if outlive else "die"]
        done = subprocess.run(argv, stdout=full, stderr=full, cwd=REPO, timeout=60)
    assert (done.returncode == 7) == outlive


def test_output_that_fits_arrives_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        done = subprocess.run([sys.executable, "-c", CODE, "outlive"], stdout=file, stderr=file, cwd=REPO, timeout=60)
    assert done.returncode == 7
    assert path.read_text() == "a line for the log\nanother\n" * 2000 + "and a warning\n"
