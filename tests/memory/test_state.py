"""State is counted from storages: once each, whole, in the first category that claims them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit.memory.probe import count_state, module_state
from shardkit.memory.rows import StateBytes, StateKind

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


FLAT, TENSOR, FREED = torch.zeros(100), torch.zeros(10), torch.zeros(10)
FREED.untyped_storage().resize_(0)
ALIAS = torch.from_numpy(TENSOR.numpy())  # another storage over the same memory
CASES: dict[str, tuple[list[tuple[StateKind, torch.Tensor]], torch.device, dict[StateKind, StateBytes]]] = {
    "views of a flat buffer with padding": (
        [("params", FLAT[:40]), ("params", FLAT[40:90].view(5, 10)), ("grads", FLAT[3:4])], CPU,
        {"params": StateBytes(400, 0), "grads": StateBytes(0, 0)},
    ),
    "shared, seen last": ([("optimizer", TENSOR), ("master_params", TENSOR)], CPU,
                          {"master_params": StateBytes(40, 0), "optimizer": StateBytes(0, 0)}),
    "shared, seen first": ([("master_params", TENSOR), ("optimizer", TENSOR)], CPU,
                           {"master_params": StateBytes(40, 0), "optimizer": StateBytes(0, 0)}),
    "alias": ([("params", TENSOR), ("grads", ALIAS)], CPU, {"params": StateBytes(40, 0), "grads": StateBytes(0, 0)}),
    "freed, meta": ([("params", FREED), ("params", torch.empty(10, device="meta"))], CPU, {"params": StateBytes(0, 0)}),
    "trained on the CPU": ([("optimizer", TENSOR)], CPU, {"optimizer": StateBytes(40, 0)}),
    "trained elsewhere": ([("optimizer", TENSOR)], CUDA, {"optimizer": StateBytes(0, 40)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_storage_counts_once_in_the_first_category_that_claims_it(case: str) -> None:
    tensors, device, counted = CASES[case]
    state = count_state(tensors, device)
    assert {kind: state[kind] for kind in counted} == counted


def test_a_list_that_hides_a_modules_function_hides_no_state() -> None:
    """Megatron's DDP calls its gradients `buffers`."""
    layer = nn.BatchNorm1d(4)
    state = count_state(module_state(layer), CPU)
    layer.buffers = []
    assert state["buffers"].device > 0 and count_state(module_state(layer), CPU) == state


def test_packed_weights_are_a_category_of_their_own_with_their_scales() -> None:
    model = nn.Linear(4, 8)
    model.register_parameter("packed", nn.Parameter(torch.zeros(16, dtype=torch.uint8), requires_grad=False))
    state = count_state(module_state(model), CPU)
    assert (state["params"].device, state["quantized"].device) == (4 * (32 + 8), 16)


@pytest.mark.parametrize(("storage", "double"), [(torch.uint8, True), (torch.bfloat16, True), (torch.uint8, False)])
def test_bitsandbytes_own_parameters_count_as_quantized_with_their_state(storage: torch.dtype, double: bool) -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(64, 128, bias=True, compress_statistics=double, quant_storage=storage).to("cpu")
    packed, n_blocks = 64 * 128 // 2, 64 * 128 // 64
    scales = n_blocks + 4 + 4 + 256 * 4 if double else 4 * n_blocks  # a byte each, their block's scale, mean and levels
    state = count_state(module_state(layer), CPU)
    assert state["params"].device == 4 * 128
    assert state["quantized"].device == packed + scales + 16 * 4


def test_module_with_adamw_to_the_byte() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    n_params = 7 * 5 + 5 + 5 + 5
    state = count_state(module_state(model, optimizer), CPU)
    assert state["params"].device == state["grads"].device == 4 * n_params
    assert state["optimizer"].device == 8 * n_params + 4 * 4  # two moments, and a step counter per parameter tensor
    assert state["buffers"].device == 4 * 5 * 2 + 8  # running mean and variance, and the batch counter
    assert state["master_params"] == StateBytes(0, 0)


def test_parameters_that_only_the_optimizer_knows_are_masters() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    master = nn.Parameter(model.weight.detach().float())
    master.grad = torch.zeros_like(master)
    state = count_state(module_state(model, torch.optim.SGD([master], lr=0.1)), CPU)
    assert (state["params"].device, state["master_params"].device, state["grads"].device) == (32, 64, 64)


def test_pinned_memory_counts_as_torch_rounds_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, plain = torch.zeros(10), torch.zeros(10)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self is pinned)
    assert count_state([("optimizer", pinned), ("grads", plain)], CUDA)["optimizer"] == StateBytes(0, 64)
    assert count_state([("optimizer", pinned), ("grads", plain)], CUDA)["grads"] == StateBytes(0, 40)
    assert count_state([("optimizer", pinned)], CPU)["optimizer"] == StateBytes(40, 0)
