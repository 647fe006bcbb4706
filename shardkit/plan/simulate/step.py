"""Take the real training step for a trace: the config's model, wrapping and optimizer, by engines on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate
from typing_extensions import override

from ...config.load import resolve_batch
from ...config.schema import SHARDING, RunConfig
from ...errors import ConfigError, NotPlannedError
from ...memory.probe import Phases
from ...memory.tracing.traced_step import Tracing
from ...parallel.blocks import find_blocks, n_values, packable_values
from ...parallel.optim import make_optimizer
from ...parallel.precision import map_tensors, to_device
from ...parallel.weights import Weights
from ...parallel.world import World
from ...strategies import Strategy
from ...strategies.base import StepRequest
from ...strategies.build import EngineFactory, make_strategy, parallelize
from ...strategies.ddp import DDP, Wrapped, own_or_models
from ...strategies.fsdp import FSDP
from ...strategies.reach import UnusedParameters
from ...strategies.single import Single
from ...strategies.step import train_step
from ...tasks.base import Batch, Task
from ...tasks.load import Prompts
from .compat import unset_fake_temporarily

# The engines on fake tensors.

_FIRST_BUCKET_MB = 1.0


def planned_engine(config: RunConfig, world: World) -> Strategy:
    """The engine of `parallel.strategy` as it works on fake tensors; passed to `make_strategy` as its factory."""
    name = config.parallel.strategy
    if name in SHARDING and SHARDING[name].stage:
        from ...strategies.zero.engine import ZeRO

        # DeepSpeedCPUAdam is a C++ op that reads real memory, so it is not compiled; see `compat.deepspeed_alone`.
        class PlannedZeRO(ZeRO):
            @staticmethod
            @override
            def prepare_cpu_adam(world: World) -> None: ...

        return PlannedZeRO(config, world)
    engines: dict[str, EngineFactory] = {"single": Single, "ddp": PlannedDDP, "fsdp": PlannedFSDP, "hsdp": PlannedFSDP}
    if name not in engines:
        raise NotPlannedError(f"no plan has parallel.strategy={name}", "shardkit rehearse -- COMMAND runs it")
    return engines[name](config, world)


class PlannedDDP(DDP):
    """The ddp engine without torch's C++ reducer, which refuses fake tensors."""

    @override
    def wrap(self, model: nn.Module, **options: Any) -> Wrapped:
        return cast(Wrapped, StandInDDP(model, **options))

    @override
    def reduce_unused(self) -> None:
        """Nothing: a trace assumes that every parameter gets a gradient."""


class PlannedFSDP(FSDP):
    """The fsdp and hsdp engines on fake tensors."""

    @override
    def make_mesh(self) -> DeviceMesh:
        with unset_fake_temporarily():  # a mesh needs real rank numbers
            return super().make_mesh()

    @override
    def skipped(self, unused: UnusedParameters) -> list[nn.Parameter]:
        """Nothing: a trace does not know which parameters other ranks use, and assumes that they use all."""
        return []


class StandInDDP(nn.Module):
    """Takes the arguments that the ddp strategy passes to `DistributedDataParallel`; every parameter gets a gradient.

    Gradient buckets of `bucket_cap_mb` MiB (the first: 1 MiB) are allocated with the wrapper and live as long as it.
    A finished gradient is copied into its bucket and becomes a view of it; a full bucket goes to the hook.
    """

    __getattr__ = own_or_models

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[torch.device] | None = None,
        bucket_cap_mb: float = 25.0,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        assert gradient_as_bucket_view
        self.module = module
        self._sync = True
        self._hook: Callable[[Any, Any], Any] | None = None
        self._params = [p for p in module.parameters() if p.requires_grad]
        self._cap = bucket_cap_mb * 2**20
        self._bucket_and_start: dict[int, tuple[_Bucket, int]] = {}
        self._buckets = list(self._make_buckets())
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _make_buckets(self) -> Iterator[_Bucket]:
        for members in _by_size(self._params[::-1], _FIRST_BUCKET_MB * 2**20, self._cap):
            total = sum(p.numel() for p in members)
            bucket = _Bucket(torch.empty(total, dtype=members[0].dtype, device=members[0].device))
            start = 0
            for member in members:
                self._bucket_and_start[id(member)] = bucket, start
                start += member.numel()
            bucket.waits_for = bucket.missing = len(members)
            yield bucket

    def _ready(self, param: nn.Parameter) -> None:
        if not self._sync:
            return
        bucket, start = self._bucket_and_start[id(param)]
        view = bucket.flat[start : start + param.numel()].view_as(param)
        assert param.grad is not None
        if param.grad.untyped_storage() is not view.untyped_storage():
            view.copy_(param.grad)
            param.grad = view
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.missing = bucket.waits_for
            if self._hook is None:
                dist.all_reduce(bucket.flat)
            else:
                self._hook(None, bucket).wait()

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        self._hook = hook

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._sync, before = False, self._sync
        try:
            yield
        finally:
            self._sync = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _by_size(tensors: Sequence[torch.Tensor], first_cap: float, cap: float) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype; a group ends once it has `cap` bytes (the first group: `first_cap`)."""
    members: list[torch.Tensor] = []
    limit = first_cap
    for index, tensor in enumerate(tensors):
        members.append(tensor)
        full = sum(t.numel() * t.element_size() for t in members) >= limit
        if full or index + 1 == len(tensors) or tensors[index + 1].dtype != tensor.dtype:
            yield members
            members, limit = [], cap


class _Bucket:
    """The bucket that a communication hook receives."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.waits_for = self.missing = 0

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self.flat = tensor


@contextmanager
def wrapped(config: RunConfig, world: World, task: Task, weights: Weights) -> Iterator[Strategy]:
    """The task's model, wrapped as a run does it, on fake tensors."""
    blocks = getattr(task, "block_classes", ())
    strategy = make_strategy(config, world, planned_engine)
    try:
        parallelize(
            config, world, strategy, task.build_model,
            lambda model: make_optimizer(config.optim, model, blocks),
            weights, blocks, getattr(task, "attention_classes", ()),
        )  # fmt: skip
        yield strategy
    finally:
        strategy.teardown()


def take_step(
    config: RunConfig, world: World, task: Task, batch: Batch, n_targets: float, strategy: Strategy, phases: Phases
) -> None:
    """Take one optimizer step as in training; each micro-batch is `batch`, which has `n_targets` targets."""
    accum = resolve_batch(config, world.size)
    blocks = enumerate(find_blocks(strategy.model, getattr(task, "block_classes", ())))
    train_step(
        strategy, phases, [(batch, False)] * accum, getattr(task, "plan_loss", task.loss),
        n_targets * accum * world.loss_size, world.loss_size, world.device,
        StepRequest(config, {str(index): block for index, block in blocks}),
    )  # fmt: skip


def take_evaluation(
    config: RunConfig, world: World, task: Task, batch: Batch, prompts: Prompts | None, strategy: Strategy,
    tracing: Tracing,
) -> None:  # fmt: skip
    """Take a micro-batch of an evaluation, and a token of each sample, as a run does."""
    model, device = strategy.model, world.device
    model.eval()
    alone = nullcontext() if world.context is None else world.context.whole_sequences()
    with torch.no_grad(), strategy.evaluating():
        with tracing.phase("evaluate"):
            getattr(task, "plan_loss", task.loss)(model, to_device(batch, device))
        if prompts is not None:
            rows, width = prompts.batch(config.train, world.loss_size)
            # A run keeps no keys and values of earlier tokens: each is a forward over prompt and answer, of one shape.
            with tracing.phase("sample"), alone:
                tokens = torch.zeros(rows, width, dtype=torch.long)
                last_positions = torch.zeros(rows, dtype=torch.long, device=device)
                task.next_logits(model, tokens.to(device), last_positions).float().cpu()  # type: ignore[attr-defined]
    model.train()


def count_model(strategy: Strategy, task: Task) -> dict[str, int]:
    """{"n_params": parameters of the wrapped model, "n_blocks": repeated blocks, "n_recurrent": LSTMs and the like,
    "n_packable", "n_packable_experts": see `packable_values`}."""
    blocks = find_blocks(strategy.model, getattr(task, "block_classes", ()))
    in_linear, in_experts = packable_values(blocks)
    recurrent = sum(isinstance(module, nn.RNNBase) for module in strategy.model.modules())
    return {
        "n_params": sum(n_values(name, param) for name, param in strategy.model.named_parameters()),
        "n_blocks": len(blocks), "n_recurrent": recurrent,
        "n_packable": in_linear, "n_packable_experts": in_experts,
    }  # fmt: skip


def sample_batch(task: Task, config: RunConfig, n_samples: int | None = None) -> Batch:
    """A batch on the CPU: the task's `plan_batch`, or the first samples of its training data."""
    size = config.train.micro_batch_size if n_samples is None else n_samples
    make = getattr(task, "plan_batch", None)
    if make is not None:
        return make(size)
    data = task.dataset("train")
    name = config.task.factory or config.task.name
    if data is not None and not hasattr(data, "__len__"):
        cause = f"dataset('train') of task {name} is a {type(data).__name__} without len()"
        raise ConfigError(cause, "return one of map style, with len() and integer indices")
    if not data:
        fix = "return samples from dataset('train'), or give the task plan_batch(n)"
        raise ConfigError(f"task {name} has no training data to plan with", fix)
    samples = [data[index % len(data)] for index in range(size)]
    return getattr(task, "collate", default_collate)(samples)


def on_fake(batch: Batch) -> Batch:
    """The batch as fake tensors on the CPU; called inside a `FakeTensorMode`."""
    return map_tensors(batch, lambda t: torch.empty(t.shape, dtype=t.dtype))
