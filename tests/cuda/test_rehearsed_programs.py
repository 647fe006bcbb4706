"""Random programs: a card of 1.01 × the rehearsed need runs them, one of 0.98 × does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.programs import Program, draw
from tests.cuda.rehearsals import linked_cache, rehearsed
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_cache(tmp_path_factory.mktemp("cache"))


def sharpness(program: Program, cache: Path, folder: Path) -> str:
    """How the program ends on cards around its rehearsed need.

    Returns:
        `sharp`; `sharp without its cache` if a card of 0.98 x the need holds it as the allocator gives cached memory
        back, and one of 0.98 x its tensors does not; else what contradicts the verdict.
    """
    (folder / "drawn.py").write_text(program.text)

    def on_card(*memory: str) -> tuple[int, dict[str, Any]]:
        options = [*program.options, *(("--gpu-memory", *memory) if memory else ())]
        done, verdict = rehearsed(cache, folder, *options, command=[sys.executable, "drawn.py"])
        return done.returncode, verdict

    code, plenty = on_card()
    if code:
        return f"ended with {code}: {plenty.get('reason')}"
    need = plenty["needed"]
    tensors = max(rank["peak_allocated"] + rank["outside_estimate"] for rank in plenty["ranks"])
    outcomes = {}
    for name, n_bytes in (("1.01", 1.01 * need), ("0.98", 0.98 * need), ("tensors", 0.98 * tensors)):
        outcomes[name], verdict = on_card(f"{int(n_bytes / 2**20)}MiB")
        if name == "1.01" and outcomes[name]:
            return f"on 1.01 x {need} bytes ended with {outcomes[name]}: {verdict['reason']}"
        if outcomes[name] == 4:
            return "sharp" if name == "0.98" else "sharp without its cache"
        if outcomes[name] == 7 and "of its cache back" in verdict["reason"]:
            return "sharp without its cache"  # the card does not hold the estimate for NCCL, and the verdict says so
    return f"fits less than its tensors: {outcomes}"


@pytest.mark.parametrize("seed", [2, 7])
def test_a_random_program_needs_what_its_rehearsal_says(seed: int, cache: Path, tmp_path: Path) -> None:
    program = draw(seed)
    assert sharpness(program, cache, tmp_path) in ("sharp", "sharp without its cache"), program.drawn
