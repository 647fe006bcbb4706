"""A model of experts in bf16 and in fp32: the routers' gradients under an engine."""

from __future__ import annotations

from typing import Any

import torch

from shardkit.run.block_calls import plain
from shardkit.run.job import start
from shardkit.tasks.load import load_task
from tests.parallel.expert_runs import ROWS, SEQ, assembled, batch, hf


def router_gradients(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of the routers' weights in a first step, by name."""
    full = {
        **hf("mixtral"), "run.device": "cpu", "train.seq_len": SEQ, "train.max_norm": None, **settings,
    }  # fmt: skip
    gradients: dict[str, torch.Tensor] = {}
    with start(None, full) as job:
        task: Any = load_task(job.config)
        job.wrap(task.build_model, init_parameter=task.init_parameter, block_classes=task.block_classes)
        strategy, take = job.strategy, job.strategy.step

        def step(request: Any) -> Any:
            named = {plain(name): strategy.gradient(p) for name, p in strategy.model.named_parameters()}
            routers = {name: grad for name, grad in named.items() if ".gate.weight" in name}
            gradients.update({name: grad.float() for name, grad in assembled(routers).items()})  # type: ignore[arg-type]
            return take(request)

        strategy.step = step  # type: ignore[method-assign]
        rows = {key: rows[job.world.data_rank :: job.world.data_size] for key, rows in batch(0).items()}
        job.step([rows], task.loss, lambda piece: int((piece["targets"] != -100).sum()))
    assert gradients
    return gradients


def by_case(cases: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, torch.Tensor]]:
    world = torch.distributed.get_world_size()
    return {
        name: router_gradients({"train.micro_batch_size": ROWS // world, **settings})
        for name, settings in cases.items()
    }
