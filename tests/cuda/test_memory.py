"""A plan and a traced step, held against CUDA's own code and torch's allocator on a card that computes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit.config.load import load_config
from shardkit.hardware.cards import GPUS
from shardkit.memory import read_jsonl
from shardkit.parallel.draws import record
from shardkit.plan.client import Planner
from shardkit.plan.search import trial
from shardkit.plan.target import choose_target
from tests.emulated_cuda import call, emulated_card, needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation]


LLAMA = (
    'model.hf={"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, '
    '"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024}'
)


def planned_peak(settings: list[str]) -> dict[str, int]:
    config = load_config(None, settings).config
    with Planner(choose_target(config, 1, gpu="h100", expandable=True)) as planner:
        peak = planner.predict(config).peak
    return {"allocated": peak.allocated, "reserved": peak.reserved}


def test_a_plan_refuses_mixed_dtypes_where_cuda_does() -> None:
    by_cuda = call(refused, EMUCUDA_COMPUTE="0")
    assert {"convolution", "linear", "layer norm", "attention"} <= set(by_cuda) and "one dtype" not in by_cuda
    assert call(refused_by_a_plan, EMUCUDA="0") == by_cuda


@pytest.mark.parametrize("card", ["h100", "rtx4090", "t4"])
def test_a_plan_takes_the_attention_that_torch_chooses(card: str) -> None:
    """Heads of an odd width keep whole attention weights in fp32."""
    sm = ".".join(map(str, GPUS[card].capability))
    by_torch = call(chosen, EMUCUDA_COMPUTE="0", EMUCUDA_SM=sm)
    assert set(by_torch.values()) >= {"efficient", "math"}
    assert call(chosen_by_a_plan, card, EMUCUDA="0") == by_torch


@pytest.mark.parametrize("settings", [
    ("precision.mode=fp32",),
    ("precision.mode=fp32", "activation.policy=full"),
    (LLAMA, "precision.mode=fp32", "train.grad_accum_steps=2"),
    ("precision.mode=fp32", "activation.policy=full", "model.n_layers=9"),
], ids=["odd widths", "odd widths, blocks again", "shared keys", "segments"])  # fmt: skip
def test_a_plan_is_the_allocators_to_the_page(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("d_model=424", "n_heads=4", "n_layers=3", "vocab_size=512", "max_seq_len=1024")
    size = [f"model.{one}" for one in sizes]
    model = ["task.name=hf_causal_lm"] if LLAMA in settings else size
    given = [*model, "train.micro_batch_size=4", "train.seq_len=1024", "parallel.strategy=single", *settings]
    plan = call(planned_peak, given, EMUCUDA="0")
    for name, value in emulated_card(GPUS["h100"]).items():
        monkeypatch.setenv(name, value)
    ran = trial.run_trial(None, given, 1, tmp_path / "run", steps=3)
    assert ran.outcome == "ok", ran.message
    assert plan["allocated"] == ran.peak
    assert abs(plan["reserved"] - (ran.reserved or 0)) <= 20 << 20


def draw_in_bf16() -> int:
    """Bytes by which the host's memory grows while two tensors of 128 MiB of a card are drawn.

    Two: glibc maps each chunk until it has freed one.
    """
    shape, process = torch.Size((8192, 8192)), psutil.Process()
    recipe = record(shape, lambda tensor: nn.init.normal_(tensor))
    outs = [torch.empty(shape.numel(), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    before = process.memory_info().rss
    for out in outs:
        recipe.fill(0, out)
    return int(process.memory_info().rss - before)


def test_drawing_for_a_card_keeps_nothing_on_the_host() -> None:
    """glibc before 2.38 hardly used the chunks again that torch converted: the host held as much as the card."""
    assert call(draw_in_bf16, EMUCUDA_COMPUTE="0", EMUCUDA_SKIP_ABOVE="256K") < 32 << 20


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_the_traced_peak_is_the_allocators(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that a trace first sees as gradients are not counted twice; cuBLAS's workspaces have a category.

    The second step, in which DDP makes its buckets anew, takes no more: NCCL's watchdog held the old ones for 0.1 s.
    """
    monkeypatch.setattr(trial, "TRACED", 3)
    for name, value in emulated_card(GPUS["h100"]).items():
        monkeypatch.setenv(name, value)
    settings = [f"parallel.strategy={strategy}", "model.preset=124m", "train.seq_len=128", "train.micro_batch_size=2"]
    ran = trial.run_trial(None, settings, 1, tmp_path / "run", steps=4)
    assert ran.outcome == "ok", ran.message
    peak = json.loads((tmp_path / "run" / "trace" / "rank0.json").read_text())["peak"]
    rows = {step: row for step, (row,) in read_jsonl(tmp_path / "run" / "memory.jsonl")}
    second, by_allocator = (
        max(rows[step].phases[phase].peak_allocated or 0 for phase in ("forward", "backward", "update"))
        for step in (2, 3)
    )
    assert second == by_allocator
    assert peak["bytes"] == pytest.approx(by_allocator, rel=1e-3)
    assert sum(peak["categories"].values()) == peak["bytes"]
    assert peak["categories"].get("unattributed", 0) < 0.001 * peak["bytes"]


@pytest.mark.parametrize("settings", [
    ("parallel.strategy=zero2", "parallel.offload_optimizer=cpu"),
    ("parallel.strategy=zero3", "activation.policy=full"),
], ids=["zero2 + offload", "zero3"])  # fmt: skip
def test_buffers_that_deepspeed_keeps_are_traced(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are there before the traced step begins, and may peak before it uses them."""
    for name, value in emulated_card(GPUS["h100"]).items():
        monkeypatch.setenv(name, value)
    size = ["model.preset=124m", "model.n_layers=1", "train.seq_len=128", "train.micro_batch_size=1"]
    ran = trial.run_trial(None, [*settings, *size], 1, tmp_path / "run", steps=3)
    assert ran.outcome == "ok", ran.message
    trace = json.loads((tmp_path / "run" / "trace" / "rank0.json").read_text())
    for phase in (trace["peak"], trace["phases"]["forward"]):
        buffers, n_embedding = phase["categories"]["communication"], 50257 * 768
        assert buffers >= 2 * n_embedding
    assert trace["peak"]["categories"].get("unattributed", 0) < 0.02 * trace["peak"]["bytes"]


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


def operators() -> dict[str, Callable[[], Any]]:
    def fp32(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cuda")

    def bf16(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

    rows = torch.zeros(2, dtype=torch.long, device="cuda")
    heads = (1, 2, 8, 16)
    return {
        "convolution": lambda: F.conv2d(fp32(2, 4, 8, 8), bf16(4, 4, 3, 3)),
        "convolution with bias": lambda: F.conv2d(fp32(2, 4, 8, 8), bf16(4, 4, 3, 3), bf16(4)),
        "transposed convolution": lambda: F.conv_transpose2d(bf16(2, 4, 8, 8), fp32(4, 4, 3, 3)),
        "linear": lambda: F.linear(fp32(2, 4), bf16(4, 4)),
        "linear with bias": lambda: F.linear(fp32(2, 3, 4), bf16(4, 4), bf16(4)),
        "bias": lambda: torch.addmm(fp32(4), bf16(2, 4), bf16(4, 4)),
        "batched product": lambda: torch.bmm(fp32(2, 3, 4), bf16(2, 4, 3)),
        "matrix and vector": lambda: torch.mv(fp32(4, 4), bf16(4)),
        "layer norm": lambda: F.layer_norm(fp32(2, 4), (4,), bf16(4), bf16(4)),
        "layer norm in fp32": lambda: F.layer_norm(bf16(2, 4), (4,), fp32(4), fp32(4)),
        "group norm": lambda: F.group_norm(fp32(2, 4, 8, 8), 2, bf16(4), bf16(4)),
        "rms norm": lambda: F.rms_norm(fp32(2, 4), (4,), bf16(4)),
        "attention": lambda: F.scaled_dot_product_attention(bf16(*heads), fp32(*heads), fp32(*heads)),
        "written rows": lambda: fp32(4, 4).index_put_((rows,), bf16(2, 4)),
        "added rows": lambda: fp32(4, 4).index_add_(0, rows, bf16(2, 4)),
        "copied rows": lambda: fp32(4, 4).index_copy(0, rows, bf16(2, 4)),
        "sum": lambda: fp32(4) + bf16(4),
        "error": lambda: F.mse_loss(fp32(2, 4), bf16(2, 4)),
        "one dtype": lambda: F.layer_norm(F.linear(bf16(2, 4), bf16(4, 4), bf16(4)), (4,), bf16(4), bf16(4)),
    }


def refused() -> list[str]:
    found = []
    for name, operator in operators().items():
        try:
            operator()
        except RuntimeError:
            found.append(name)
    return found


def refused_by_a_plan() -> list[str]:
    from shardkit.hardware.cards import GPUS
    from shardkit.plan.simulate import shim
    from shardkit.plan.simulate.fakes import Fakes

    shim.install(GPUS["h100"])
    with Fakes():
        return refused()
