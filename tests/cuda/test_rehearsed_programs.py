"""Random programs: a card of 1.01 × the rehearsed need runs them, one of 0.98 × does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.programs import draw
from tests.cuda.rehearsals import linked_cache, rehearsed
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_cache(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("seed", [2, 7])
def test_a_random_program_needs_what_its_rehearsal_says(seed: int, cache: Path, tmp_path: Path) -> None:
    program = draw(seed)
    (tmp_path / "drawn.py").write_text(program.text)

    def on_card(n_bytes: float = 0) -> tuple[int, dict[str, Any]]:
        memory = ["--gpu-memory", f"{int(n_bytes / 2**20)}MiB"] if n_bytes else []
        done, verdict = rehearsed(cache, tmp_path, *program.options, *memory, command=[sys.executable, "drawn.py"])
        return done.returncode, verdict

    code, plenty = on_card()
    assert code == 0, (program.drawn, plenty)
    need = plenty["needed"]
    code, verdict = on_card(1.01 * need)
    assert code == 0, (program.drawn, verdict)
    tensors = max(rank["peak_allocated"] + rank["outside_estimate"] for rank in plenty["ranks"])
    smaller = [on_card(0.98 * need), on_card(0.98 * tensors)]  # the first may do if the allocator gives its cache back
    refused = [code == 4 or (code == 7 and "of its cache back" in verdict["reason"]) for code, verdict in smaller]
    assert any(refused), (program.drawn, smaller)
