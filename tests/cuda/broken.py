"""The product with one thing broken at a time, seen through the checks that the suite makes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from shardkit.activation import offload
from shardkit.run.job import start
from shardkit.strategies.single import Single
from tests.cuda.parity import Case
from tests.cuda.parity_ranks import distance, held, join, train, worst, wrap
from tests.cuda.steady import elsewhere, measure

CASE = Case("single@1", offload=True)
IN_HALF = replace(CASE, mode="bf16")
LEAK = 24 << 20


def outcomes(root: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """What each check sees: of the product as it is, and of every broken one."""
    join("nccl")
    out = {"nothing": seen(root, wanted)}
    for name, breaking in BREAKS.items():
        with breaking():
            out[name] = seen(root, wanted)
        torch.cuda.synchronize()
    return out


def seen(root: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Differences from the CPU's run, losses in half precision, bytes on other devices, growth from step to step."""
    nan = float("nan")
    found: dict[str, Any] = {
        "error": "", "elsewhere": -elsewhere(), "loss": nan, "weights": nan, "in half": [], "grown": 0
    }  # fmt: skip
    try:
        with start(None, CASE.settings()) as job:
            wrap(job, CASE)
            losses, _ = train(job, CASE)
            far = distance(torch.load(f"{root}/{CASE.wanted}.pt"), list(held(job)))
        found["loss"] = worst(losses, wanted["losses"][CASE.wanted])
        found["weights"] = (far["square"] / far["norm"]) ** 0.5
        with start(None, IN_HALF.settings()) as job:
            wrap(job, IN_HALF)
            found["in half"], _ = train(job, IN_HALF)
        with start(None, CASE.settings()) as job:
            memory = measure(job, CASE)["memory"]
        found["grown"] = memory[-1]["allocated"] - memory[0]["allocated"]
    except Exception as error:  # a check of another kind has caught it; the test says which it has to be
        found["error"] = repr(error)
    found["elsewhere"] += elsewhere()
    kept.clear()
    gc.collect()
    return found


def overwritten(recorded: bool) -> int:
    """Elements that a copy has written into memory which was somebody else's by then: nobody wanted it any more."""
    with nullcontext() if recorded else patch.object(torch.Tensor, "record_stream", lambda *_: None):
        return _overwritten()


def _overwritten() -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    blocks = [nn.Linear(256, 256, device=device) for _ in range(4)]
    offloader = offload.Offloader(device, 0, len(blocks))
    x = torch.randn(2048, 256, device=device, requires_grad=True)
    for index, block in enumerate(blocks):
        x = offloader.forward(index, block, block.forward, torch.tanh(x) if index else x)
    # The third block's backward starts the copies of the second, which this graph is dropped without.
    (_,) = torch.autograd.grad(x.sum(), [blocks[2].weight])
    del x, _
    fresh = [torch.zeros(2048, 256, device=device) for _ in range(12)]
    torch.cuda.synchronize()
    return int(sum(tensor.count_nonzero() for tensor in fresh))


def unwaited_storage(self: Any) -> torch.UntypedStorage:
    self.fetch()
    storage: torch.UntypedStorage = self.on_device.untyped_storage()
    return storage


def unwaited_leave(self: Any) -> None:
    for copy in self._live():
        copy.on_device = None


def no_wait_for_what_comes_back() -> AbstractContextManager[Any]:
    return patch.object(offload._Copy, "storage", unwaited_storage)


def no_wait_before_memory_is_let_go() -> AbstractContextManager[Any]:
    return patch.object(offload._Group, "leave", unwaited_leave)


@contextlib.contextmanager
def another_device() -> Iterator[None]:
    """Activations come back to the neighbour."""
    to_device = offload._Bus.to_device

    def astray(self: Any, host: torch.Tensor) -> Any:
        mine, self.device = self.device, torch.device("cuda", 1)
        try:
            return to_device(self, host)
        finally:
            self.device = mine

    with patch.object(offload._Bus, "to_device", astray):
        yield


kept: list[torch.Tensor] = []


def leaking_step(self: Single, max_norm: float | None, step: Callable[..., torch.Tensor] = Single.step) -> torch.Tensor:
    kept.append(torch.empty(LEAK, dtype=torch.uint8, device="cuda"))
    return step(self, max_norm)


def a_leak() -> AbstractContextManager[Any]:
    """Something of each step is kept."""
    return patch.object(Single, "step", leaking_step)


BREAKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no wait for what comes back": no_wait_for_what_comes_back,
    "no wait before memory is let go": no_wait_before_memory_is_let_go,
    "another device": another_device,
    "a leak": a_leak,
}
