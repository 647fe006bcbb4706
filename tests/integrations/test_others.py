"""Lightning and peft, which no other test needs, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ["lightning", "pytorch-lightning", "lightning-utilities", "torchmetrics", "peft"]
TESTS = [
    "tests/integrations/test_lightning.py",
    "tests/integrations/test_transformers.py",
    "tests/docs/test_integrations.py",
]


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_lightning_and_peft_are_watched(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *PACKAGES]
    subprocess.run(command, check=True)
    path = os.pathsep.join([str(tmp_path), str(REPO)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "slow or not slow", "-k", "lightning or adapter",
         "-p", "no:cacheprovider", *TESTS],
        cwd=REPO, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]
