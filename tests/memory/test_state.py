"""State is counted from storages: once each, whole, in the first category that claims them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit.memory.probe import count_state, module_state
from shardkit.memory.rows import StateBytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_views_of_a_flat_buffer_count_the_buffer_once_with_its_padding() -> None:
    flat = torch.zeros(100)
    state = count_state([("params", flat[:40]), ("params", flat[40:90].view(5, 10)), ("grads", flat[3:4])], CPU)
    assert state["params"] == StateBytes(400, 0)
    assert state["grads"] == StateBytes(0, 0)


def test_a_shared_storage_goes_to_the_first_category_whatever_the_order_seen() -> None:
    tensor = torch.zeros(10)
    for kinds in (("optimizer", "master_params"), ("master_params", "optimizer")):
        state = count_state([(kind, tensor) for kind in kinds], CPU)
        assert state["master_params"].device == 40
        assert state["optimizer"].device == 0


def test_two_storages_over_the_same_memory_are_one() -> None:
    tensor = torch.zeros(16)
    alias = torch.from_numpy(tensor.numpy())
    assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    assert count_state([("params", tensor), ("grads", alias)], CPU)["grads"].device == 0


def test_freed_and_meta_storages_have_no_bytes() -> None:
    freed = torch.zeros(10)
    freed.untyped_storage().resize_(0)
    state = count_state([("params", freed), ("params", torch.empty(10, device="meta"))], CPU)
    assert state["params"] == StateBytes(0, 0)


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


def test_cpu_tensors_are_host_memory_only_when_training_is_elsewhere() -> None:
    tensor = torch.zeros(10)
    assert count_state([("optimizer", tensor)], CPU)["optimizer"] == StateBytes(40, 0)
    assert count_state([("optimizer", tensor)], CUDA)["optimizer"] == StateBytes(0, 40)


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
