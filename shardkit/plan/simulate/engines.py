"""The engines on fake tensors, and what other tools' training loops do differently."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import override

from ...config.schema import RunConfig
from ...parallel.world import World
from ...strategies import EngineFactory, Strategy
from ...strategies.ddp import DDP, Wrapped, own_or_models
from ...strategies.fsdp import FSDP
from ...strategies.single import Single
from ...strategies.unused import UnusedParameters
from ...tasks.base import Task
from ...tasks.hf_causal_lm import HFCausalLM
from ...tasks.hf_masked_lm import HFMaskedLM
from .compat import unset_fake_temporarily

_FIRST_BUCKET_MB = 1.0


@dataclass(frozen=True)
class LoopTraits:
    """How a training loop that is planned differs from shardkit's own; the defaults are shardkit's.

    Attributes:
        bucket_views: ddp's gradients are views of its buckets (`gradient_as_bucket_view`); other loops keep both.
        tail_unit: FSDP2 has units of its own for the embedding, and for the last norm with the head.
        frozen: the type of a model's frozen weights beside adapters, whatever `precision.mode` is.
        embeddings_decay: embeddings are in the optimizer's group with weight decay, which decides how ZeRO cuts it up.
        fp32_adapters: ZeRO-3 computes with adapters in fp32, and casts the input of each to it.
        bnb_layers: a base in 4 bits is bitsandbytes' own, and its adapters are peft's for it.
        keeps_cache: a transformers model copies every layer's keys and values, and holds them until its forward ends.
    """

    bucket_views: bool = True
    tail_unit: bool = False
    frozen: str | None = None
    embeddings_decay: bool = False
    fp32_adapters: bool = False
    keeps_cache: bool = False
    bnb_layers: bool = False

    def engine(self) -> EngineFactory:
        """A factory of the engines that work on fake tensors, for this loop."""
        return partial(_planned_engine, self)

    def change_task(self, task: Task) -> None:
        """Let the task build its transformers model as this loop does."""
        if not isinstance(task, (HFCausalLM, HFMaskedLM)):
            return
        if self.keeps_cache and hasattr(task.hf.config, "use_cache"):
            task.hf.config.use_cache = True  # transformers' own default
        if self.frozen is not None and task.adapter is not None:
            task.adapter.frozen_dtype = getattr(torch, self.frozen)
        if self.bnb_layers and task.adapter is not None:
            task.adapter.use_bnb_layers()

    def change_model(self, model: nn.Module) -> nn.Module:
        """Give adapters the type that they have in this loop. Returns the model.

        An adapter that is added after `zero.Init` stays in fp32: DeepSpeed does not cast it.
        """
        if self.fp32_adapters:
            for param in model.parameters():
                if param.requires_grad and hasattr(param, "ds_tensor"):
                    param.ds_tensor.data = param.ds_tensor.float()
                    param.data = param.float()
        return model


SHARDKIT = LoopTraits()


def _planned_engine(loop: LoopTraits, config: RunConfig, world: World) -> Strategy:
    name = config.parallel.strategy
    if name == "single":
        return Single(config, world)
    if name == "ddp":
        return PlannedDDP(config, world, loop)
    if name in ("fsdp", "hsdp"):
        return PlannedFSDP(config, world, loop)
    from .zero import PlannedZeRO  # imports DeepSpeed

    return PlannedZeRO(config, world)


class PlannedDDP(DDP):
    """The ddp engine without torch's C++ reducer, which refuses fake tensors."""

    def __init__(self, config: RunConfig, world: World, loop: LoopTraits) -> None:
        super().__init__(config, world)
        self._loop = loop

    @override
    def wrap(self, model: nn.Module, **options: Any) -> Wrapped:
        return cast(Wrapped, StandInDDP(model, **options, bucket_views=self._loop.bucket_views))

    @override
    def reduce_unused(self) -> None:
        """Nothing: a trace assumes that every parameter gets a gradient."""


class PlannedFSDP(FSDP):
    """The fsdp and hsdp engines on fake tensors, with the units of the loop that is planned."""

    def __init__(self, config: RunConfig, world: World, loop: LoopTraits) -> None:
        super().__init__(config, world)
        self._loop = loop

    @override
    def make_mesh(self) -> DeviceMesh:
        with unset_fake_temporarily():  # a mesh needs real rank numbers
            return super().make_mesh()

    @override
    def skipped(self, unused: UnusedParameters) -> list[nn.Parameter]:
        """Nothing: a trace does not know which parameters other ranks use, and assumes that they use all."""
        return []

    @override
    def shard_rest(self, model: nn.Module, options: dict[str, Any]) -> None:
        if self._loop.tail_unit:
            shard_tail(model, self.reshards, options)
        super().shard_rest(model, options)


def shard_tail(model: nn.Module, reshards: bool, options: dict[str, Any]) -> None:
    """Shard the ends of a transformers model as Accelerate 1.15 does (`fsdp2_prepare_model`).

    The embedding becomes a unit that is resharded as blocks are. The last norm and the head become one unit that stays
    gathered; a tied embedding belongs to it. A model without an embedding is left as it is.
    """
    embedding, head = (getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
    if embedding is None:
        return
    tied = head is not None and head.weight is embedding.weight
    if not tied and not isinstance(embedding, FSDPModule):
        fully_shard(embedding, reshard_after_forward=reshards, **options)
    tail = [_last_norm(model), *([embedding] if tied else []), head]
    units = [module for module in tail if module is not None and not isinstance(module, FSDPModule)]
    if units:
        fully_shard(units, reshard_after_forward=False, **options)


def _last_norm(model: nn.Module) -> nn.Module | None:
    """The last norm among the base model's own children; a model with adapters hides them from Accelerate."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    has_adapter = any(".lora_" in name for name, _ in model.named_parameters())
    if base is None or has_adapter:
        return None
    return next((child for child in reversed([*base.children()]) if "Norm" in type(child).__name__), None)


class StandInDDP(nn.Module):
    """Takes the arguments that the ddp strategy passes to `DistributedDataParallel`; every parameter gets a gradient.

    Gradient buckets of `bucket_cap_mb` MiB (the first: 1 MiB) are allocated with the wrapper and live as long as it.
    A finished gradient is copied into its bucket and becomes a view of it, unless `bucket_views` is off; a full bucket
    goes to the hook.

    In other tools' loops DDP first sends all values in copies of 250 MiB, and until the second forward has one bucket
    for all gradients. That decides which segments torch's allocator holds.
    """

    __getattr__ = own_or_models

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[torch.device] | None = None,
        bucket_cap_mb: float = 25.0,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        bucket_views: bool = True,
    ) -> None:
        super().__init__()
        assert gradient_as_bucket_view
        self._bucket_views = bucket_views
        self.module = module
        self._sync = True
        self._hook: Callable[[Any, Any], Any] | None = None
        self._params = [p for p in module.parameters() if p.requires_grad]
        self._cap = bucket_cap_mb * 2**20
        self._rebuilds, self._reduced = not bucket_views and not find_unused_parameters, False
        if not bucket_views:
            _send_copies([*module.parameters(), *module.buffers()])
        self._bucket_and_start: dict[int, tuple[_Bucket, int]] = {}
        first_cap = math.inf if self._rebuilds else _FIRST_BUCKET_MB * 2**20
        self._buckets = list(self._make_buckets(first_cap))
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _make_buckets(self, first_cap: float) -> Iterator[_Bucket]:
        for members in _by_size(self._params[::-1], first_cap, self._cap):
            total = sum(p.numel() for p in members)
            bucket = _Bucket(torch.empty(total, dtype=members[0].dtype, device=members[0].device))
            start = 0
            for member in members:
                self._bucket_and_start[id(member)] = bucket, start
                start += member.numel()
            bucket.waits_for = bucket.missing = len(members)
            yield bucket

    def _rebuild(self) -> None:
        self._rebuilds = False
        self._bucket_and_start.clear()
        self._buckets.clear()
        self._buckets = list(self._make_buckets(_FIRST_BUCKET_MB * 2**20))

    def _ready(self, param: nn.Parameter) -> None:
        if not self._sync:
            return
        bucket, start = self._bucket_and_start[id(param)]
        view = bucket.flat[start : start + param.numel()].view_as(param)
        assert param.grad is not None
        if param.grad.untyped_storage() is not view.untyped_storage():
            view.copy_(param.grad)
            if self._bucket_views:
                param.grad = view
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.missing = bucket.waits_for
            self._reduced = True
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
        if self._rebuilds and self._reduced:
            self._rebuild()
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


_SENT_AT_ONCE = 250 * 2**20


def _send_copies(values: Sequence[torch.Tensor]) -> None:
    """Copy all values as DDP does to send rank 0's: two copies exist at a time."""
    sent: deque[torch.Tensor] = deque(maxlen=2)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        by_dtype.setdefault(value.dtype, []).append(value)
    for group in _by_size([value for alike in by_dtype.values() for value in alike], _SENT_AT_ONCE, _SENT_AT_ONCE):
        sent.append(torch.cat([value.detach().flatten() for value in group]))


class _Bucket:
    """The bucket that a communication hook receives."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.waits_for = self.missing = 0

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self.flat = tensor
