"""DistributedDataParallel without its C++ reducer, which reads real data: same buckets, reduced at the same moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...strategies.ddp import own_or_models

_FIRST_BUCKET_MB = 1.0
_views = True


@contextmanager
def bucket_views(on: bool) -> Iterator[None]:
    """Whether gradients become views of their buckets (`gradient_as_bucket_view`); other tools' loops keep both."""
    global _views
    before, _views = _views, on
    try:
        yield
    finally:
        _views = before


class StandInDDP(nn.Module):
    """Takes the arguments that the ddp strategy passes to `DistributedDataParallel`; every parameter gets a gradient.

    Gradient buckets of `bucket_cap_mb` MiB (the first: 1 MiB) are allocated with the wrapper and live as long as it.
    A finished gradient is copied into its bucket and becomes a view of it, unless `bucket_views` is off; a full bucket
    goes to the hook.
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
        params = [p for p in module.parameters() if p.requires_grad]
        self._place: dict[int, tuple[_Bucket, int]] = {}
        self._buckets = list(self._make_buckets(params[::-1], bucket_cap_mb * 2**20))
        for param in params:
            param.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _make_buckets(self, params: Sequence[nn.Parameter], cap: float) -> Iterator[_Bucket]:
        limit = _FIRST_BUCKET_MB * 2**20
        members: list[nn.Parameter] = []
        for index, param in enumerate(params):
            members.append(param)
            full = sum(p.numel() * p.element_size() for p in members) >= limit
            other_type = index + 1 < len(params) and params[index + 1].dtype != param.dtype
            if full or other_type or index + 1 == len(params):
                bucket = _Bucket(torch.empty(sum(p.numel() for p in members), dtype=param.dtype, device=param.device))
                start = 0
                for member in members:
                    self._place[id(member)] = bucket, start
                    start += member.numel()
                bucket.waits_for = bucket.missing = len(members)
                yield bucket
                members, limit = [], cap

    def _ready(self, param: nn.Parameter) -> None:
        if not self._sync:
            return
        bucket, start = self._place[id(param)]
        view = bucket.flat[start : start + param.numel()].view_as(param)
        assert param.grad is not None
        if param.grad.untyped_storage() is not view.untyped_storage():
            view.copy_(param.grad)
            if _views:
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


class _Bucket:
    """The bucket that a communication hook receives."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.waits_for = self.missing = 0

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self.flat = tensor
