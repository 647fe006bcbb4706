"""Runs whose layers are split over ranks, and the same runs of one process: losses, gradients and weights."""

from __future__ import annotations

import gc
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from shardkit.parallel import tensor
from shardkit.parallel.world import World
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from shardkit.strategies import step as strategy_step
from shardkit.tasks.load import load_task
from tests.parallel.context_runs import SEQ, State, completed, summed, whole_weights


@dataclass
class Ran:
    steps: list[tuple[float, float]]  # (loss, norm)
    before: State  # the initial weights
    weights: State  # after the steps
    val_loss: float
    texts: list[str]
    gradients: list[State] = field(default_factory=list)  # of each step, before clipping
    drifted: list[str] = field(default_factory=list)  # parameters whose copies differ


def run(settings: dict[str, Any]) -> Ran:
    """Train by `settings` in this rank's world."""
    with tempfile.TemporaryDirectory() as folder:
        with start(None, completed(settings, folder)) as job:
            trainer = Trainer(job)
            strategy: Any = job.strategy
            before, gradients, step = whole_weights(strategy), [], strategy.step

            def recorded(request: Any) -> Any:
                named = {name: strategy.gradient(param) for name, param in strategy.model.named_parameters()}
                gradients.append({name.removeprefix("module."): _whole(grad) for name, grad in named.items()})
                return step(request)

            strategy.step = recorded
            records = list(trainer.steps())
            steps = [(record["loss"], record["grad_norm"]) for record in records]
            texts = [text["text"] for text in trainer.loop.texts]
            weights = whole_weights(strategy)
            drifted = [name for name, param in strategy.model.named_parameters() if not _equal_copies(job.world, param)]
            ran = Ran(steps, before, weights, records[-1]["val_loss"], texts, gradients, drifted)
        gc.collect()
        dist.barrier()
    return ran


def _whole(grad: Any) -> torch.Tensor:
    full: torch.Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return full.detach().clone()


def _equal_copies(world: Any, param: Any) -> bool:
    """Whether the ranks that share layers hold the same bits of a parameter that is whole on each."""
    if world.mesh is None:
        return True
    tp = world.mesh.mesh_dim_names[-1]
    if tp in param.device_mesh.mesh_dim_names and not param.placements[-1].is_replicate():
        return True
    local = param.to_local().detach()
    copies = [torch.empty_like(local) for _ in range(world.tp)]
    dist.all_gather(copies, local.contiguous(), group=world.mesh.get_group(tp))
    return all(torch.equal(copy, local) for copy in copies)


def runs(cases: dict[str, dict[str, Any]]) -> dict[str, Ran]:
    return {name: run(settings) for name, settings in cases.items()}


OF_LAYERS = {
    f"_c10d_functional::{name}": (name, 0)
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
}
OF_FSDP = {"c10d::_allgather_base_": ("all_gather", 0), "c10d::_reduce_scatter_base_": ("reduce_scatter", 1)}
"""Operator → the collective, and which of its arguments is the whole tensor."""


def collectives(
    cases: dict[str, dict[str, Any]], kinds: dict[str, tuple[str, int]] = OF_LAYERS
) -> dict[str, list[dict[tuple[str, int], int]]]:
    """How often a block's forward and backward run a collective on so many elements, by case."""
    found = {}
    for name, settings in cases.items():
        shallow, deep = (_collectives(settings, layers, kinds) for layers in (1, 2))
        found[name] = [dict(two - one) for one, two in zip(shallow, deep, strict=True)]
    return found


def _collectives(
    settings: dict[str, Any], layers: int, kinds: dict[str, tuple[str, int]]
) -> list[Counter[tuple[str, int]]]:
    counts = []
    with _of_depth(settings, layers) as (job, forward):
        loss = None
        for _ in ("forward", "backward"):
            with torch.profiler.profile(record_shapes=True) as profiler:
                if loss is None:
                    loss = forward()
                else:
                    job.strategy.backward(loss)
            events = [event for event in profiler.events() if event.name in kinds and not _is_taken_by_a_mode(event)]
            counts.append(Counter((kinds[e.name][0], math.prod(e.input_shapes[kinds[e.name][1]])) for e in events))
    return counts


def kept(cases: dict[str, dict[str, Any]]) -> dict[str, dict[int, int]]:
    """How many activations of so many elements a block keeps until backward, by case."""
    return {name: dict(_kept(settings, 2) - _kept(settings, 1)) for name, settings in cases.items()}


def _kept(settings: dict[str, Any], layers: int) -> Counter[int]:
    tensors: dict[int, torch.Tensor] = {}  # by storage: products keep views of what norms keep

    def pack(saved: Any) -> Any:
        local = saved.to_local() if isinstance(saved, DTensor) else saved
        if local.dim() > 2 or local.shape[0] == SEQ:  # no weight
            tensors[local.untyped_storage().data_ptr()] = local
        return saved

    with _of_depth(settings, layers) as (job, forward):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            loss = forward()
        sizes = Counter(tensor.numel() for tensor in tensors.values())
        job.strategy.backward(loss)
    return sizes


@contextmanager
def _of_depth(settings: dict[str, Any], layers: int) -> Iterator[tuple[Any, Callable[[], torch.Tensor]]]:
    """A job whose model has so many blocks, and a forward of one sequence."""
    depth = {"model.n_layers": layers}
    if "model.hf" in settings:
        depth = {"model.hf": {**settings["model.hf"], "num_hidden_layers": layers}}
    full = {"parallel.strategy": "fsdp", "run.device": "cpu", "train.seq_len": SEQ, **settings, **depth}
    with start(None, full) as job:
        task: Any = load_task(job.config)
        job.wrap(task.build_model, init_parameter=task.init_parameter, block_classes=task.block_classes)
        tokens = torch.arange(SEQ)[None] % 7 + 1
        yield job, lambda: task.loss(job.model, {"tokens": tokens, "targets": tokens.roll(-1, 1)})
    gc.collect()
    dist.barrier()


def _is_taken_by_a_mode(event: Any) -> bool:
    """Whether a dispatch mode (selective_op) got the call: it makes another inside, unless it has kept the result."""
    return any(child.name == "PythonDispatchMode" or _is_taken_by_a_mode(child) for child in event.cpu_children)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Own(nn.Module):
    """A user's own model, with the plan of docs/wide.md."""

    tp_plan: ClassVar[dict[str, str]] = {
        "embed": "embedding_rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.blocks = nn.Embedding(21, 16), nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def own_loop(strategy: str, tp: int) -> tuple[list[tuple[float, float]], State]:
    settings = {
        "parallel.strategy": strategy, "parallel.tp": tp, "run.device": "cpu",
        "optim.name": "sgd", "optim.lr": 0.5, "optim.weight_decay": 0.0, "train.max_norm": 0.5,
    }  # fmt: skip
    with start(None, settings) as job:
        job.wrap(Own)
        steps = []
        for number in range(4):
            rows = torch.randint(0, 20, (4, 13), generator=torch.Generator().manual_seed(number))
            rows = rows[job.world.data_rank :: job.world.data_size]
            result = job.step([(rows[:, :-1], rows[:, 1:])], summed, lambda batch: batch[1].numel())
            steps.append((result.loss, result.grad_norm))
            assert result.n_targets == 48
        return steps, whole_weights(job.strategy)


class _Untouched(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


def _local_rows(weight: Any) -> tuple[int, Any]:
    mesh = weight.device_mesh
    return mesh.get_local_rank() * weight.to_local().shape[0], mesh.get_group()


def _sum_of_all(gradients: Sequence[Any]) -> torch.Tensor:
    """The norm over all ranks, as if none held what another has."""
    square = nn.utils.get_total_norm([gradient.to_local() for gradient in gradients]).square()
    dist.all_reduce(square)
    return square.sqrt()


BREAKS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "norms": lambda: patch.dict(tensor._STYLES, {"replicated_with_grad_allreduce": _Untouched}),
    "ties": lambda: patch.object(tensor, "_retie", lambda *_: None),
    "first id": lambda: patch.object(tensor, "vocabulary_part", _local_rows),
    "split norms": lambda: patch.object(tensor, "_norms_of", lambda *_: []),
    "factor": lambda: patch.object(World, "loss_size", property(lambda world: world.size)),
    "clipping": lambda: patch.object(strategy_step, "_norm", _sum_of_all),
}
"""Error → what puts it in: each trains without any error of its own."""


def broken(cases: dict[str, dict[str, Any]]) -> dict[str, Ran]:
    rans = {}
    for name, settings in cases.items():
        with BREAKS[name.partition(" in ")[0]]():
            rans[name] = run(settings)
    return rans
