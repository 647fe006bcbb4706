"""Random programs: a card of 1.01 × the rehearsed need runs them, one of 0.98 × does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.programs import draw, sharpness
from tests.cuda.rehearsals import linked_cache
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_cache(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("seed", [2, 7])
def test_a_random_program_needs_what_its_rehearsal_says(seed: int, cache: Path, tmp_path: Path) -> None:
    program = draw(seed)
    assert sharpness(program, cache, tmp_path) in ("sharp", "sharp without its cache"), program.drawn
