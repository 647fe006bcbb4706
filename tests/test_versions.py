"""The core of the suite on the oldest and the newest versions of the libraries that are supported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import environments
from tests.environments import check_versions, python_with, run_tests, versions

pytestmark = [pytest.mark.release, pytest.mark.covers(*environments.LIBRARIES), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=[0, 1], ids=["oldest", "newest"])
def python(request: pytest.FixtureRequest) -> Path:
    """Of an environment of their own."""
    interpreter = python_with(versions(request.param))
    check_versions(interpreter, versions(request.param))
    return interpreter


@pytest.mark.parametrize("part", ["NAMES", "ACCELERATE", "SHIM", "CORE", "PACKED"], ids=str.lower)
def test_passes_on_supported_versions(python: Path, part: str) -> None:
    run_tests(python, getattr(environments, part))
