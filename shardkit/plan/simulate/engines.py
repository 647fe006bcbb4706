"""The engines on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from ...config.schema import RunConfig
from ...config.strategy import SHARDING
from ...errors import NotPlannedError
from ...parallel.world import World
from ...strategies import EngineFactory, Strategy
from ...strategies.ddp import DDP, Wrapped, own_or_models
from ...strategies.fsdp import FSDP
from ...strategies.reach import UnusedParameters
from ...strategies.single import Single
from .compat import unset_fake_temporarily

_FIRST_BUCKET_MB = 1.0


def planned_engine(config: RunConfig, world: World) -> Strategy:
    """The engine of `parallel.strategy` as it works on fake tensors; passed to `make_strategy` as its factory."""
    name = config.parallel.strategy
    if name in SHARDING and SHARDING[name].stage:
        from ...strategies.zero.engine import ZeRO  # imports DeepSpeed

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
