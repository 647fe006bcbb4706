"""Operators on the emulated device against the CPU's: values, gradients, and what only CUDA's kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation]

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "linear with bias": lambda x, w: F.linear(x, w, w[0]),
    "layer norm": lambda x, w: F.layer_norm(x, (16,), w[0], w[1]),
    "rms norm": lambda x, w: F.rms_norm(x, (16,), w[0], 1e-2),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True),
    "softmax": lambda x, w: (x * w).softmax(-1),
    "gelu": lambda x, w: F.gelu(x + w),
    "sort, gather, cumsum": lambda x, w: x.sort(-1).values.cumsum(-1) * w.gather(1, x.argsort(-1)),
    "boolean index": lambda x, w: (x * w)[x > 0],
    "index put": lambda x, w: x.index_put((torch.tensor([1, 3, 1], device=x.device),), w[:3], accumulate=True),
    "convolution": lambda x, w: F.conv2d(x.view(1, 4, 8, 8), w.view(16, 4, 2, 2), stride=2),
    "transposed convolution": lambda x, w: F.conv_transpose2d(x.view(1, 4, 8, 8), w.view(4, 16, 2, 2)),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "max pool": lambda x, w: F.max_pool2d((x * w).view(1, 1, 16, 16), 2),
    "interpolate": lambda x, w: F.interpolate((x * w).view(1, 1, 16, 16), scale_factor=2, mode="bilinear"),
    "cross entropy": lambda x, w: F.cross_entropy(x @ w, torch.arange(16, device=x.device), label_smoothing=0.1),
    "complex": lambda x, w: torch.fft.rfft(x * w).abs(),
    "cat, stack, pad": lambda x, w: F.pad(torch.cat([torch.stack([x, w])[1], x]), (1, 2)),
}


def both(function: Callable[..., Tensor], *inputs: Tensor, **kwargs: Any) -> list[list[Tensor]]:
    """Result and gradients of the sum of squares, on the CPU and on the GPU."""
    found = []
    for device in ("cpu", "cuda"):
        leaves = [value.detach().to(device).requires_grad_() for value in inputs]
        out = function(*leaves, **kwargs)
        assert out.device.type == device
        out.float().square().sum().backward()
        found.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)])
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_the_cpus(name: str) -> None:
    torch.manual_seed(0)
    cpu, gpu = both(FUNCTIONS[name], torch.randn(16, 16), torch.randn(16, 16))
    for one, other in zip(cpu, gpu, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_product_of_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    x, w = torch.randn(8, 4096).to(dtype), torch.randn(4096, 8).to(dtype)
    exact = x.double() @ w.double()
    product = (x.cuda() @ w.cuda()).cpu().double()
    torch.testing.assert_close(product, exact, rtol=torch.finfo(dtype).eps, atol=1e-3)  # rounded once, at the end
    longer = torch.mm(x.cuda(), w.cuda(), out_dtype=torch.float32)
    assert longer.dtype == torch.float32
    torch.testing.assert_close(longer.cpu().double(), exact, rtol=1e-4, atol=1e-3)


def attend(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **kwargs)


@pytest.mark.parametrize("kind", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_is_plain_attention(kind: str, causal: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads = [torch.randn(2, 4, 24, 16, dtype=torch.float16) * 2 for _ in range(3)]
    leaves = [head.cuda().requires_grad_() for head in heads]
    with sdpa_kernel(getattr(SDPBackend, kind)):
        out = attend(*leaves, is_causal=causal, scale=0.3)
    assert kind.split("_")[0].lower() in type(out.grad_fn).__name__.lower()
    out.float().square().sum().backward()
    plain = [head.double().requires_grad_() for head in heads]
    scores = plain[0] @ plain[1].mT * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(24, 24).triu(1).bool(), float("-inf"))
    wanted = scores.softmax(-1) @ plain[2]
    wanted.square().sum().backward()
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=2e-3, atol=2e-3)
    for leaf, other in zip(leaves, plain, strict=True):  # they take the forward's result, which fp16 has rounded
        torch.testing.assert_close(leaf.grad.cpu().double(), other.grad, rtol=1e-2, atol=0.1)


def test_a_part_of_the_keys_takes_the_sums_of_all_keys() -> None:
    """Ring attention's backward: with the forward's results for all keys, the gradients of a part are those of all."""
    query, key, value, grad = (torch.randn(1, 2, 16, 16, dtype=torch.float16, device="cuda") for _ in range(4))
    out, sums, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)

    def gradients(keys: slice) -> list[Tensor]:
        part = (key[:, :, keys], value[:, :, keys], out, sums)
        length = part[0].size(2)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        return list(backward(grad, query, *part, None, None, 16, length, 0.0, False, seed, offset))

    every, first, second = gradients(slice(None)), gradients(slice(0, 6)), gradients(slice(6, None))
    torch.testing.assert_close(first[0] + second[0], every[0], rtol=1e-2, atol=1e-2)
    for index in (1, 2):
        torch.testing.assert_close(torch.cat([first[index], second[index]], 2), every[index], rtol=1e-2, atol=1e-2)


def test_attentions_gradient_drops_what_its_forward_dropped() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1, 1, 32, 16, device="cuda", dtype=torch.float16) for _ in range(2))
    value = torch.eye(32, 16, device="cuda", dtype=torch.float16).view(1, 1, 32, 16).requires_grad_()
    out = attend(query, key, value, dropout_p=0.5)
    assert not torch.equal(out, attend(query, key, value, dropout_p=0.5)), "another call drops others"
    # The result is linear in the value: its gradient is the matrix of weights that the forward pass used.
    (grad,) = torch.autograd.grad(out[0, 0, :, 3].sum(), value)
    weights = grad[0, 0, :, 3]
    torch.testing.assert_close(weights[3], out[0, 0, :, 3].sum(), rtol=1e-2, atol=1e-2)


def test_the_gpus_generator_repeats_and_moves_on() -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    cpu_before = torch.get_rng_state()
    first, second = torch.rand(5, device="cuda"), torch.rand(5, device="cuda")
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), cpu_before), "the CPU's generator is another"
    torch.cuda.set_rng_state(before)
    assert torch.equal(torch.rand(5, device="cuda"), first)
    own = torch.Generator("cuda").manual_seed(3)
    assert torch.equal(torch.rand(5, device="cuda", generator=own), first)


def test_devices_do_not_mix() -> None:
    gpu = torch.ones(3, device="cuda")
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            gpu + other
    assert (gpu + torch.tensor(1.0)).tolist() == [2.0] * 3, "a CPU scalar may"
    with pytest.raises(TypeError, match="numpy"):
        gpu.numpy()


def test_lists_on_several_devices_are_taken_item_by_item() -> None:
    weights = [torch.zeros(3), torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda:1")]
    others = [torch.ones_like(weight, dtype=torch.float32) for weight in weights]
    torch._foreach_lerp_(weights, others, 0.25)
    torch._foreach_add_(weights, others)
    assert [weight.tolist() for weight in weights] == [[1.25] * 3] * 3
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch._foreach_add_(weights, [other.cpu() for other in others])


def test_a_kernel_without_emulation_fails_and_says_its_name() -> None:
    with pytest.raises(RuntimeError, match=r"a kernel was launched that is not emulated: .*fused_dropout"):
        torch.ops.aten._fused_dropout(torch.ones(64, device="cuda"), 0.5)


def test_cuda_graphs_are_refused() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="operation not supported"):
        graph.capture_begin()
