"""A few damaged files of each cheap format; `python -m tests.fuzzed_files` reads many of all formats."""

from __future__ import annotations

import pytest

from .fuzzed_files import fuzz

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damaged_files_are_taken_or_refused_within_limits() -> None:
    counts, broken = fuzz(
        range(4), ["tokenizer.json", "Parquet", "Arrow", "PNG", "chat template", ".pt", "safetensors"]
    )
    assert not broken
    assert sum(counts.values()) == 28 and sum(n for (_, end), n in counts.items() if end == "refused") > 7


@pytest.mark.parametrize("seed", [71, 157, 241])
def test_an_arrow_file_with_damaged_offsets_is_refused(seed: int) -> None:
    """pyarrow followed the offsets, and Python ended with a SystemError."""
    counts, broken = fuzz(range(seed, seed + 1), ["Arrow"])
    assert not broken and counts == {("Arrow", "refused"): 1}
