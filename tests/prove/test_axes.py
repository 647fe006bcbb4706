"""`shardkit prove` on training whose layers, experts and sequences ranks share, with rows of different lengths,
accumulated and clipped: the same as one process."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.context_runs import ACCUM, GLOBAL_BATCH, MODELS, OPTIMIZERS, SEQ, documents
from tests.parallel.expert_runs import BALANCED, hf
from tests.prove.test_proof import run_prove

TP, EP, CP = ("parallel.tp", 2), ("parallel.ep", 2), ("parallel.cp", 2)
CASES = {
    "tp2": (2, [TP], 1, "sgd"), "tp2 x fsdp2": (4, [TP], 2, "adamw"), "tp2 x cp2": (4, [TP, CP], 1, "adamw"),
    "ep2": (2, [EP], 2, "adamw"), "ep2 x fsdp2": (4, [EP], 4, "sgd"), "ep2 x cp2": (4, [EP, CP], 2, "adamw"),
    "balanced fsdp2": (2, [], 2, "adamw"), "balanced ep2": (2, [EP], 2, "sgd"),
}  # fmt: skip
"""Name → (ranks, axes, ranks with rows of their own, optimizer). Balanced: with the routers' load-balancing loss."""


TRAIN = ("-m", "shardkit.train")
OWN_BALANCE = """
import types
from shardkit.models import balance
balance.dist = types.SimpleNamespace(is_initialized=lambda: False)
from shardkit.train import main
main()
"""
"""shardkit.train whose ranks each take the load-balancing loss of their own rows."""


def prove(folder: Path, name: str, *program: str) -> tuple[int, dict[str, Any], str]:
    """Prove a case, trained by `program` on its ranks and by shardkit.train in one process."""
    world, axes, data_ranks, optimizer = CASES[name]
    balanced = "balanced" in name
    model = MODELS["qwen3"]
    if balanced or EP in axes:
        model = hf("mixtral", vocab_size=512, **(BALANCED if balanced else {}))
    given = {
        **model, **OPTIMIZERS[optimizer], **documents(folder, pairs=True),
        "train.max_norm": 0.5, "train.max_steps": 8, "train.seq_len": SEQ, "train.grad_accum_steps": ACCUM,
        "train.eval_samples": 0, "optim.schedule": "constant", "run.device": "cpu", "run.dir": str(folder / "run"),
    }  # fmt: skip

    def train(n: int, rows_on: int, program: Sequence[str], **more: object) -> list[str]:
        settings = given | {"train.micro_batch_size": GLOBAL_BATCH // ACCUM // rows_on} | more
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n)]
        return [*torchrun, *program, *words]

    against = train(1, 1, TRAIN, **{"parallel.strategy": "single"})
    command = train(world, data_ranks, program, **{"parallel.strategy": "fsdp", **dict(axes)})
    return run_prove(folder, command, "--against", shlex.join(against))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_training_that_splits_more_than_rows_is_proven(tmp_path: Path, name: str) -> None:
    exit_code, _, output = prove(tmp_path, name, *TRAIN)
    assert exit_code == 0, output


@pytest.mark.release
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_balance_losses_of_each_ranks_own_rows_are_not_proven(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_BALANCE)
    exit_code, verdict, output = prove(tmp_path, "balanced fsdp2", "own.py")
    assert exit_code == 7 and "rows of a batch act on each other" in verdict["reasons"][0], output
