"""The core of the suite on the newest torch, DeepSpeed and transformers that are supported: their own environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments import CORE, LIBRARIES, NAMES, SHIM, check_versions, python_with, run_tests, versions

pytestmark = [pytest.mark.release, pytest.mark.covers(*LIBRARIES), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def python() -> Path:
    interpreter = python_with(versions(1))
    check_versions(interpreter, versions(1))
    return interpreter


@pytest.mark.parametrize("files", [NAMES, SHIM, CORE], ids=["names", "shim", "core"])
def test_passes_on_the_newest_supported_versions(python: Path, files: list[str]) -> None:
    run_tests(python, files)
