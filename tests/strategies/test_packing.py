"""Packed documents train as documents one by one, whatever the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.strategies.cases import assert_curve
from tests.tasks.adapters import write_models

EVERY = [(engine, packing) for engine in ("ddp", "fsdp", "zero2", "zero3") for packing in ("packed", "padding_free")]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mistral", "reference"])
def test_engines_keep_documents_apart(model: str) -> None:
    body = "tests.strategies.packed_cases:curves"
    (want,) = run_ranks(1, body, cases=[(model, "single", "none")])[0]
    assert want[0][0] - want[-1][0] > 0.01, "the loss must fall, or equal losses say nothing"
    cases = [(model, engine, packing) for engine, packing in EVERY]
    for found in run_ranks(2, body, cases=cases):
        for case, curve in zip(cases, found, strict=True):
            assert_curve(curve, want, case)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["packed", "padding_free"])
def test_a_run_of_packed_data_an_adapter_and_a_models_folder(packing: str, tmp_path: Path) -> None:
    write_models(tmp_path)
    (tmp_path / "texts").mkdir()
    for i in range(60):
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(["alpha", "beta", "gamma"][i % 3 :]) * (1 + i % 4))
    extra = {"data.path": str(tmp_path / "texts"), "data.packing": packing, "activation.policy": "full"}
    body, models = "tests.tasks.adapters:curves", ("llama", "phi3")
    run = {"root": str(tmp_path), **extra}
    (want,) = run_ranks(1, body, cases=[(model, "single") for model in models], **run)
    for found in run_ranks(2, body, cases=[(m, engine) for m in models for engine in ("fsdp", "zero3")], **run):
        for (model, engine), curve in found.items():
            assert_curve(curve, want[model, "single"], (model, engine))
