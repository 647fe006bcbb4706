"""The attention that CUDA's own code chooses for some inputs, and the one that a plan's fake tensors take."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

WIDTHS = (36, 63, 64, 106, 250, 256, 264)
"""Of heads: multiples of 8, 4, 2 and 1, up to what flash attention takes and beyond."""
OTHERS = ("", "mask", "shared", "broadcast")
"""`shared`: two heads have one key (`enable_gqa`); `broadcast`: all have one."""


def inputs() -> Iterator[tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]]:
    """(name, query, key and value, other arguments)."""
    for dtype, width, other in product((torch.float32, torch.bfloat16, torch.float16), WIDTHS, OTHERS):
        query, key, value = (
            torch.empty(1, heads, 32, width, dtype=dtype, device="cuda", requires_grad=True)
            for heads in (4, *[{"shared": 2, "broadcast": 1}.get(other, 4)] * 2)
        )
        mask = torch.empty(1, 1, 32, 32, dtype=torch.bool, device="cuda") if other == "mask" else None
        given = {"attn_mask": mask, "enable_gqa": other == "shared", "is_causal": other != "mask"}
        yield f"{dtype} {width} {other}".strip(), (query, key, value), given


def chosen() -> dict[str, str]:
    found = {}
    for name, tensors, given in inputs():
        backend = SDPBackend(torch._fused_sdp_choice(*tensors, **given))
        planned_as = "EFFICIENT" if given["attn_mask"] is not None else "FLASH"
        found[name] = backend.name.replace("CUDNN", planned_as).removesuffix("_ATTENTION").lower()
    return found


class _Called(TorchDispatchMode):
    name = "math"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = func.overloadpacket.__name__
        if called.startswith("_scaled_dot_product"):
            self.name = called.removeprefix("_scaled_dot_product_").removesuffix("_attention")
        return func(*args, **(kwargs or {}))


def chosen_by_a_plan(card: str) -> dict[str, str]:
    from shardkit.hardware.cards import GPUS
    from shardkit.plan.simulate import shim
    from shardkit.plan.simulate.fakes import Fakes

    shim.install(GPUS[card])
    found = {}
    with Fakes():
        for name, tensors, given in inputs():
            with _Called() as called:
                F.scaled_dot_product_attention(*tensors, **given)
            found[name] = called.name
    return found
