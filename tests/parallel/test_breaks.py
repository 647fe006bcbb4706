"""Errors that are put into context parallelism are found by name, by the comparer of `shardkit prove`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.test_draws import STEPS
from tests.parallel.breaks import BREAKS, Broken
from tests.parallel.context_runs import documents, hf
from tests.ranks import run_ranks
from tests.strategies.graphs.pool import Pool
from tests.strategies.graphs.proof import first_difference

SINKS = hf("gpt_oss", head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
FOUND = {
    "": "",
    "positions": "37 of 37: another direction",
    "targets": "37 of 37: another direction",
    "documents": "37 of 37: another direction",
    "window": "37 of 37: another direction",
    "gradient": "=> model.layers.1.input_layernorm.weight: x0.5: divided by 2, the number of ranks",
    "sinks": "zero in 2 of 4 of dimension 0 (model.layers.0.self_attn.sinks, model.layers.1.self_attn.sinks)",
    "loss": "=> 37 gradients are 2 times one process's: multiplied by 2, the number of ranks",
}
"""Error → words of the verdict on the first step; of none, nothing."""


@pytest.mark.dist
def test_documents_that_are_merged_leak() -> None:
    *others, _ = run_ranks(2, "tests.parallel.breaks:leaking", name="documents")[0]
    assert max(others) > 1e-6


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_an_error_of_split_sequences_is_found_by_name(tmp_path: Path) -> None:
    assert FOUND.keys() == {"", *BREAKS}
    data = documents(tmp_path, pairs=False)
    base: dict[str, Any] = {
        **data, **SINKS, "data.packing": "padding_free", "optim.name": "sgd", "optim.lr": 0.1, "run.device": "cpu",
        "optim.weight_decay": 0.0, "train.max_norm": None, "train.max_steps": STEPS, "train.seq_len": 24,
        "train.global_batch_size": 8, "train.micro_batch_size": 4, "train.eval_samples": 0, "run.overwrite": True,
        "memory.plan": False, "logging.tensorboard": False, "logging.level": "error",
    }  # fmt: skip
    found = {}
    with Pool(2, 60) as two, Pool(1, 60) as one:
        for name in FOUND:
            folder = tmp_path / (name or "right")
            ranks = {**base, "parallel.strategy": "ddp", "parallel.cp": 2, "run.dir": str(folder / "run")}
            process = {**base, "parallel.strategy": "single", "run.dir": str(folder / "alone")}
            reports = two.run(Broken(ranks, folder / "ranks", name=name))
            for moved in (False, True):
                reports += one.run(Broken(process, folder / "process", folder / "ranks", moved))
            assert all(report is not None and not report.error for report in reports), (name, reports)
            found[name] = first_difference(folder / "ranks", folder / "process", STEPS, 2)
    for name, words in FOUND.items():
        step, verdict = found[name]
        assert step == (1 if name else 0) and words in verdict, (name, found[name])
