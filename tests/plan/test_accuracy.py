"""Predictions are borne out by real processes: what torch's allocator gave out, engine by engine."""

from __future__ import annotations

import re

import pytest

from benchmarks.plan_accuracy import cases, compare

CASES = {
    "one process": [
        "transformer single@1 fp32 none adamw", "llama single@1 fp32 full adamw", "llama single@1 fp32 packed adamw",
        "cnn single@1 fp32 full adamw", "swinir single@1 bf16 full adamw", "lora single@1 bf16 full adamw",
    ],
    "several": [
        "transformer ddp@2 bf16 full adamw", "transformer fsdp@2 bf16 full adamw",
        "transformer zero1@2 bf16 none adamw", "transformer zero2@2+offload bf16 none adamw",
        "transformer zero3@2+offload_all bf16 none adamw", "llama zero3@2 fp32 full adamw",
    ],
    "adapters": [
        "lora fsdp@2 bf16 full adamw", "lora hsdp@4 bf16 full adamw", "lora zero2@2 bf16 full adamw",
        "lora zero3@2 bf16 full adamw",
    ],
    "4 bits": [
        "qlora fsdp@2 bf16 full adamw", "qlora zero2@2 bf16 full adamw", "qlora zero3@2 bf16 full adamw",
        "qlora-double zero1@2 bf16 full adamw", "qlora-double zero3@2+offload_all bf16 full adamw",
    ],
}  # fmt: skip
"""Further ones, lora under ddp and zero1 among them, are in the recorded table alone."""
_SMALLER = {"256": "128", "704": "384", "8192": "4096"}
"""Widths and vocabulary, by those of the recorded table: bf16 is slow on a CPU without instructions for it."""


def smaller(word: str) -> str:
    if not word.startswith(("model.d_model", "model.vocab_size", "model.hf=")):
        return word
    return re.sub(r'((?:d_model|vocab_size|hidden_size|intermediate_size)"?[=:] ?)(\d+)',
                  lambda match: match[1] + _SMALLER[match[2]], word)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", CASES)
def test_peaks_and_residents_are_those_of_real_runs(group: str) -> None:
    known = cases()
    rows = compare({name: (known[name][0], [smaller(word) for word in known[name][1]]) for name in CASES[group]})
    for name, row in rows.items():
        assert abs(row["error"]) <= 0.01, (name, row)
        # The plan holds the step's batch to the end: 8 KiB of ids, 12 if packed. Pictures are more.
        beyond = row["resident_predicted"] - row["resident_measured"]
        assert name.startswith(("cnn", "swinir")) or abs(beyond) <= 16 * 2**10, (name, row)
