"""The ledger's rows where ranks share sequences, layers or experts: each category is what the rank's tensors take."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit.memory.probe import local_tensors
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.parallel.context_runs import completed, hf
from tests.ranks import run_ranks

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FSDP = {
    "parallel.strategy": "fsdp",
    "train.max_steps": 2,
    "train.eval_samples": 0,
    "train.eval_every": None,
    "train.grad_accum_steps": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "fsdp": hf("qwen3", head_dim=8),
    "cp 2": {**hf("qwen3", head_dim=8), "parallel.cp": 2},
    "tp 2": {**hf("qwen3", head_dim=8), "parallel.tp": 2},
    "tp 4": {**hf("llama", num_key_value_heads=4), "parallel.tp": 4},
    "ep 2": {**hf("qwen3_moe", **EXPERTS), "parallel.ep": 2},
    "ep 4": {**hf("qwen3_moe", **EXPERTS), "parallel.ep": 4},
}


def _bytes(tensors: Any) -> int:
    return sum(local.nbytes for tensor in tensors for local in local_tensors(tensor))


def counted(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Case → (this rank's bytes by category, a plain sum, at the end of step 2; the ledger's rows, on rank 0; bytes of
    tensors beyond the state after the step)."""
    results = {}
    for name, settings in cases.items():
        with tempfile.TemporaryDirectory() as folder, start(None, completed({**FSDP, **settings}, folder, 1)) as job:
            trainer, plain = Trainer(job), dict[str, int]()
            take = job.strategy.step

            def step(request: Any, job: Any = job, take: Any = take, plain: Any = plain) -> Any:
                params = [*job.strategy.model.parameters()]
                plain |= {"params": _bytes(params), "grads": _bytes(param.grad for param in params)}
                states = [state for by_key in job.optimizer.state.values() for state in by_key.values()]
                plain["optimizer"] = _bytes(states)
                return take(request)

            job.strategy.step = step  # type: ignore[method-assign]
            steps = iter(trainer.steps())
            list(steps)
            gc.collect()
            state = [local for _, tensor in job.strategy.state_tensors() for local in local_tensors(tensor)]
            every = [tensor.untyped_storage() for tensor in gc.get_objects() if type(tensor) is torch.Tensor]
            beyond = {storage.data_ptr(): storage.nbytes() for storage in every}
            for local in state:
                beyond.pop(local.untyped_storage().data_ptr(), None)
            rows = [{kind: b.total for kind, b in (row.state or {}).items()} for row in job.ledger.last_rows]
            results[name] = plain, rows, sum(beyond.values())
        gc.collect()
        dist.barrier()
    return results


@pytest.mark.slow
@pytest.mark.dist
def test_each_category_of_a_row_is_what_the_ranks_own_tensors_take() -> None:
    by_rank = run_ranks(4, "tests.memory.test_shared:counted", cases=CASES)
    for name in CASES:
        rows = by_rank[0][name][1]
        assert len(rows) == 4
        for rank, results in enumerate(by_rank):
            plain, _, beyond = results[name]
            assert {kind: rows[rank][kind] for kind in plain} == plain, (name, rank)
            assert min(plain.values()) > 0
            # The buffers of a layer's exchange or reduction, 12 KiB and more here, do not outlive it.
            assert beyond < 8192, (name, rank)
