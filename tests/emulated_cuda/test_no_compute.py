"""EMUCUDA_COMPUTE=0: torch's own CUDA code allocates and launches; nothing is computed, and memory is not touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.emulated_cuda import call, needs_emulation
from tests.emulated_cuda.counters import counting

pytestmark = [pytest.mark.gpu, needs_emulation]

MIB = 1 << 20


def step() -> dict[str, Any]:
    """A step of a model that would not fit on this machine."""
    layers = [nn.Linear(16384, 16384, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    with counting() as made:
        model(torch.zeros(4, 16384, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    return {"made": made, "parameters": parameters, "allocated": torch.cuda.memory_allocated()}


def test_a_step_allocates_and_launches_without_computing() -> None:
    found = call(step, EMUCUDA_COMPUTE="0", EMUCUDA_MEMORY="141G")
    assert found["parameters"] > 4 << 30
    # Parameters, gradients and two moments, with cuBLAS's workspaces beside them.
    assert 4 * found["parameters"] <= found["allocated"] <= 4 * found["parameters"] + 256 * MIB
    assert found["made"]["gemm"] == 8 + 8 + 7, "forward, weights' gradients, inputs' but the first"
    assert found["made"]["launch"] > 8
    assert found["made"]["emulated_operator"] == 0


def look_up_many() -> int:
    table = nn.Embedding(1000, 64, device="cuda")
    table(torch.zeros(16384, dtype=torch.long, device="cuda")).sum().backward()
    return table.weight.grad.numel()


def test_a_card_without_code_of_its_own_runs_that_of_an_older_one() -> None:
    """torch has code for 8.6 and 9.0; CUB sorts the indices, and knows only what it was compiled for."""
    assert call(look_up_many, EMUCUDA_COMPUTE="0", EMUCUDA_SM="8.9") == 64_000


def decide() -> dict[str, Any]:
    """Values that a program reads back, with what they depend on computed or skipped."""

    def error(read: Callable[[], object]) -> str:
        try:
            return str(read())
        except RuntimeError as refused:
            return str(refused).splitlines()[0]

    positions = torch.arange(12, device="cuda").view(3, 4)
    skipped = torch.randn(1 << 20, device="cuda")  # 4 MiB
    inputs = torch.randn(64, 16384, device="cuda", dtype=torch.bfloat16)
    router = nn.Linear(16384, 8, device="cuda", dtype=torch.bfloat16)
    return {
        "sum": positions.sum().item(), "steps": (positions.diff() != 1).sum().item(),
        "where": (positions > 9).nonzero().tolist(), "chosen by a mask": positions[positions > 9].tolist(),
        "mean": positions.float().mean().item(), "norm": skipped.norm().item(),
        "finite": skipped.norm().isfinite().item(), "experts": router(inputs).softmax(-1).topk(2).indices[:5].tolist(),
        "any": (skipped > 0).any().item(), "all": skipped.isfinite().all().item(),
        "flag": error(lambda: (skipped > 0)[0].item()), "nonzero": error(lambda: (skipped > 0).nonzero()),
        "copied": error(lambda: (skipped > 0).cpu()), "byte": error(lambda: skipped.view(torch.uint8)[0].item()),
        "bytes": error(lambda: skipped.view(torch.uint8).cpu().numel()),
    }  # fmt: skip


def test_what_a_program_decides_by_is_computed_or_refused() -> None:
    found = call(decide, EMUCUDA_COMPUTE="0")
    operators = {
        "flag": "_local_scalar_dense", "byte": "_local_scalar_dense", "nonzero": "nonzero", "copied": "copy_"
    }  # fmt: skip
    refused = {name: found.pop(name) for name in operators}
    assert found == {
        "sum": 66, "steps": 0, "where": [[2, 2], [2, 3]], "chosen by a mask": [10, 11], "mean": 5.5, "norm": 1.0,
        "finite": True, "any": False, "all": True, "experts": [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]],
        "bytes": str(4 << 20),
    }  # fmt: skip
    for name, operator in operators.items():
        assert f"aten::{operator} reads" in refused[name] and "not computed" in refused[name], refused[name]


def update_shards() -> int:
    """Bytes by which the host's memory grows in an update of 64 MiB of shards, with gradients that nobody computed."""
    shards = [nn.Parameter(torch.empty(1 << 17, device="cuda")) for _ in range(128)]  # 512 KiB each
    warm = nn.Parameter(torch.ones(4, device="cuda"))
    for parameter in (warm, *shards):
        parameter.grad = torch.randn(1 << 20, device="cuda")[: parameter.numel()]
    torch.optim.AdamW([warm]).step()
    optimizer, process = torch.optim.AdamW(shards), psutil.Process()
    before = process.memory_info().rss
    optimizer.step()
    return int(process.memory_info().rss - before)


def test_an_update_of_many_small_shards_touches_little_memory() -> None:
    """As a rank of 128 has them: second moments, zeros times a number, are computed; the rest would be 256 MiB."""
    assert call(update_shards, EMUCUDA_COMPUTE="0") < 80 * MIB


def write_and_read() -> dict[str, Any]:
    """What is written over memory that nobody computed is known again, up to a MiB."""
    numel, middle = 1 << 17, 70_001
    host = torch.arange(numel, dtype=torch.float32)
    device = torch.empty(numel, device="cuda")
    filled = torch.empty(numel, device="cuda").fill_(3)
    zeros = torch.empty(numel, device="cuda").fill_(3)
    part = zeros[5:-5].zero_()
    device.copy_(host)
    copied = torch.empty(numel, device="cuda").copy_(device)
    strided = torch.ones(512, 256, device="cuda")
    strided[:, ::2].zero_()
    torch._foreach_zero_([filled[:10], filled[-10:]])
    return {
        "copied": copied[middle].item(), "doubled": (device * 2)[middle].item(), "sum": (copied > 65535.5).sum().item(),
        "zeros": [zeros[4].item(), part.abs().sum().item(), zeros[-5].item()],
        "strided": strided.sum().item(), "filled": filled.sum().item(),
        "drawn": torch.empty(numel, device="cuda").uniform_(2, 3).mean().item(),
    }  # fmt: skip


@pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"])
def test_what_is_written_whole_is_known(allocator: str) -> None:
    numel = 1 << 17
    values = call(write_and_read, EMUCUDA_COMPUTE="0", PYTORCH_CUDA_ALLOC_CONF=allocator)
    assert 2.4 < values.pop("drawn") < 2.6
    assert values == {
        "copied": 70_001, "doubled": 140_002, "sum": numel // 2, "zeros": [3, 0, 3], "strided": numel / 2,
        "filled": 3 * (numel - 20),
    }  # fmt: skip


def copy_and_reduce(world_file: str) -> dict[str, int]:
    """How many values are not finite on the host, of floats that nobody computed, over bytes that make them NaN."""
    dist.init_process_group("nccl", f"file://{world_file}", rank=0, world_size=1)
    skipped = torch.randn(1 << 20, device="cuda")

    def over_labels(count: int) -> torch.Tensor:
        """Floats of no value in the block of labels that are ignored, of which every half is a NaN."""
        labels = torch.full((count // 2,), -100, device="cuda")
        assert labels.cpu().view(torch.float32).isnan().all()
        address = labels.data_ptr()
        del labels
        floats = skipped[:count] * 2
        assert floats.data_ptr() == address
        return floats

    def copy_over_nans(source: torch.Tensor, **options: bool) -> torch.Tensor:
        host = torch.empty(source.shape, **options).fill_(math.nan)
        host.copy_(source, non_blocking=options.get("pin_memory", False))
        torch.cuda.synchronize()
        return host

    medium = over_labels(1 << 17)
    reduced = torch.empty(1 << 17, device="cuda")
    dist.all_reduce(sent := over_labels(1 << 17))
    dist.reduce_scatter_tensor(reduced, over_labels(1 << 17))
    tensors = {
        "medium": medium.cpu(), "medium, pinned": copy_over_nans(medium, pin_memory=True), "all-reduced": sent.cpu(),
        "reduced and scattered": reduced.cpu(), "large": copy_over_nans(skipped),
        "large, pinned": copy_over_nans(skipped, pin_memory=True), "large, in part": copy_over_nans(skipped[3:-3]),
        "large, converted": copy_over_nans(skipped.double()),
        "large, transposed": copy_over_nans(skipped.view(4, -1).t()),
    }  # fmt: skip
    shared = torch.empty(1 << 20).share_memory_().fill_(math.nan)
    tensors["large, shared"] = shared.copy_(skipped)
    return {name: int((~tensor.isfinite()).sum()) for name, tensor in tensors.items()}


def test_floats_that_nobody_computed_are_finite_on_the_host(tmp_path: Path) -> None:
    """The norm of offloaded gradients would be NaN at times: a training that is sound would be told to diverge."""
    counts = call(copy_and_reduce, str(tmp_path / "world"), EMUCUDA_COMPUTE="0")
    assert counts == dict.fromkeys(counts, 0)


SIZES = [(4096, 1, 8, 8, 64), (4096, 16, 8, 2, 96), (2048, 8, 4, 4, 256)]


def attend_by_documents() -> list[list[int]]:
    """Bytes that the kernel's backward takes beside its results, and the planner's count, for each of `SIZES`."""
    from shardkit.memory.tracing.tracker import scratch
    from shardkit.parallel.compat import flash_by_documents

    found = []
    for tokens, n, heads, shared, width in SIZES:
        query, key, value = (
            torch.empty(tokens, count, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for count in (heads, shared, shared)
        )
        bounds = torch.arange(0, tokens + 1, tokens // n, dtype=torch.int32, device="cuda")
        out = flash_by_documents(query, key, value, bounds, tokens // n, 0.0, None, None)
        grad = torch.empty_like(out)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, (query, key, value), grad)
        taken = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
        counted = scratch(
            torch.ops.aten._flash_attention_backward.default, (grad, query, key, value, out, None, bounds), grads
        )
        found.append([taken, counted[1] if counted else -1])
    return found


def test_the_scratch_of_attention_by_documents_is_counted_to_the_byte() -> None:
    # In fixed segments a block may be larger than what was asked of it.
    settings = {"EMUCUDA_COMPUTE": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for size, (taken, counted) in zip(SIZES, call(attend_by_documents, **settings), strict=True):
        assert taken == counted, size


LAYOUTS = [  # (batch, query heads, key heads, sequence, width), and whether heads or positions lie outside
    ((1, 96, 8, 512, 128), "heads"), ((1, 96, 8, 512, 128), "positions"), ((2, 4, 4, 1000, 64), "heads"),
    ((2, 4, 2, 256, 40), "positions"),
]  # fmt: skip


def attend() -> list[list[int]]:
    """As `attend_by_documents`, of the kernel for whole sequences, for each of `LAYOUTS`."""
    from shardkit.memory.tracing.tracker import scratch

    found = []
    for (batch, heads, shared, length, width), outside in LAYOUTS:

        def made(count: int, sizes: tuple[int, ...] = (batch, length, width), outside: str = outside) -> torch.Tensor:
            rows, positions, columns = sizes
            shape = (rows, count, positions, columns) if outside == "heads" else (rows, positions, count, columns)
            tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            return (tensor if outside == "heads" else tensor.transpose(1, 2)).requires_grad_()

        inputs = made(heads), made(shared), made(shared)
        out = nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=heads != shared)
        grad = torch.empty_like(out)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, inputs, grad)
        taken = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        counted = scratch(backward, (grad, *inputs, out), grads)
        found.append([taken, counted[1] if counted else -1])
    return found


def test_the_scratch_of_attention_is_counted_to_the_byte() -> None:
    settings = {"EMUCUDA_COMPUTE": "0", "EMUCUDA_SM": "8.0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for size, (taken, counted) in zip(LAYOUTS, call(attend, **settings), strict=True):
        assert taken == counted, size
