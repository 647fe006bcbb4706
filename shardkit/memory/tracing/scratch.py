"""Scratch memory inside operators, which no tensor of the program shows, computed from arguments and results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from .compat import convolution_backend, schema

Count = Callable[[Any, Any], int]
"""Returns bytes from an operator's arguments and its result."""


def scratch(func: Any, args: Sequence[Any], out: Any) -> tuple[torch.device, int] | None:
    """The device and bytes of an operator's scratch memory; None if unknown.

    `func`: the `OpOverload` that dispatch received.
    """
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), None)
    count = None if device is None else _counted_by(func, device.type)
    return None if device is None or count is None else (device, count(args, out))


def may_take_scratch(func: Any) -> bool:
    """Whether an operator's scratch memory is known on some kind of device."""
    return any(_counted_by(func, kind) is not None for kind in ("cpu", "cuda"))


@functools.cache
def _counted_by(func: Any, kind: str) -> Count | None:
    name = schema(func).name
    if name in _SCRATCH:
        return _SCRATCH[name][1] if _SCRATCH[name][0] == kind else None
    if kind == "cpu" and torch.Tag.pointwise in func.tags and name not in _MASKED:
        return _promoted
    return None


def _flash_attention_backward(args: Any, out: Any) -> int:
    """FlashAttention-2's backward: row sums and an fp32 accumulator of dQ, rows rounded up to 128 and widths to 32.

    With fewer key heads than query heads, dK and dV are first made with as many heads as the query.
    Args are (grad_out, query, key, ...), each [batch, heads, sequence, head width].
    """
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    rows_up, width_up = -(-rows // 128) * 128, -(-width // 32) * 32
    n_bytes: int = 4 * batch * heads * rows_up * (1 + width_up)
    if key.shape[1] != heads:
        n_bytes += 2 * batch * key.shape[2] * heads * width * query.element_size()
    return n_bytes


def _flash_by_documents_backward(args: Any, out: Any) -> int:
    """The same by documents: rows are rounded up by adding 128 for each document.

    Args are (grad_out, query, key, value, out, logsumexp, bounds, ...), each [tokens, heads, head width].
    """
    query, key, bounds = args[1], args[2], args[6]
    tokens, heads, width = query.shape
    rows_up, width_up = tokens + 128 * (bounds.numel() - 1), -(-width // 32) * 32
    n_bytes: int = 4 * heads * rows_up * (1 + width_up)
    if key.shape[1] != heads:
        n_bytes += 2 * tokens * heads * width * query.element_size()
    return n_bytes


def _columns_summed(args: Any, out: Any) -> int:
    """The partial sums of a sum over a matrix's rows, as for a bias's gradient, that many blocks of threads share.

    After `ReduceConfig` and `setReduceConfig` in torch's Reduce.cuh: a thread sums four columns where they divide; at
    least 16 values a thread, and at most 256 where the blocks of all multiprocessors allow it. Args are (input, dims,
    ...); other layouts and dims are not counted.
    """
    matrix = args[0]
    dims = sorted(dim % matrix.dim() for dim in (args[1] if len(args) > 1 else None) or ())
    if not dims or dims != list(range(len(dims))) or len(dims) == matrix.dim() or not matrix.is_contiguous():
        return 0
    columns = math.prod(matrix.shape[len(dims) :])
    if not columns or not matrix.numel():
        return 0
    rows = matrix.numel() // columns
    at_once = next(n for n in (4, 2, 1) if columns % n == 0)
    most = 512 // at_once
    across, down = (min(1 << (n.bit_length() - 1), most) for n in (columns // at_once, rows))
    height = min(down, most // min(across, 32))
    width = min(across, most // height)
    values = -(-rows // height)
    if rows < min(height * 16, 256) or values < 256:
        return 0
    card = torch.cuda.get_device_properties(matrix.device)
    filling = card.multi_processor_count * (card.max_threads_per_multi_processor // (width * height))
    blocks = -(-(columns // at_once) // width)
    if blocks > filling:
        return 0
    parts = max(min(-(-filling // blocks), -(-values // 16)), -(-values // 256))
    return 4 * columns * parts * width * at_once if parts > 1 else 0


def _gathered(args: Any, out: Any) -> int:
    """gloo gathers into a flat copy of the output; args are (output, input, ...)."""
    return int(args[0].nbytes)


def _reduced(args: Any, out: Any) -> int:
    """gloo reduces a copy of the whole input, then keeps this rank's shard; args are (output, input, ...)."""
    return int(args[1].nbytes)


def _promoted(args: Any, out: Any) -> int:
    """Pointwise operators on CPUs copy operands, and results, that are not of the common dtype.

    See torch's `TensorIteratorBase::compute_types`; on GPUs the kernel converts as it reads and writes.
    """
    operands = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()]
    if len({operand.dtype for operand in operands}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    if out is args[0]:
        operands.append(out)
    return sum(operand.numel() * common.itemsize for operand in operands if operand.dtype != common)


def _convolution(args: Any, out: Any) -> int:
    """oneDNN's copies in its blocked layout: of the input, the weight and the result, which is then copied back.

    Its developer guide, "Understanding Memory Formats": channels in blocks of 16 with AVX-512, of 8 with AVX2; images
    of at most 3 channels are read in place. The kernel's own scratchpad is not counted. What oneDNN does not compute,
    as bf16 without AVX-512, torch computes as a product with unfolded windows. Args are (input, weight, bias, stride,
    padding, dilation, transposed, output padding, groups).
    """
    image, weight = args[0], args[1]
    backend = convolution_backend(image, weight, *args[3:9])
    if backend == _UNFOLDING:
        return _unfolded(args, out)
    lanes = _lanes(backend, image, args[8])
    if not lanes:
        return 0
    result = _blocked(out, lanes)
    elements = max(_read(image, lanes) + _blocked(weight, lanes, 0, 1) + result - out.numel(), result)
    return int(elements * image.element_size())


def _convolution_backward(args: Any, out: Any) -> int:
    """Like `_convolution`: first for the input's gradient, which is copied back, then for the weight's.

    Args are (grad_out, input, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, mask).
    """
    grad, image, weight = args[:3]
    backend = convolution_backend(image, weight, *args[4:10])
    if backend == _UNFOLDING:
        return _unfolded_backward(args, out)
    lanes = _lanes(backend, image, args[9])
    if not lanes:
        return 0
    of_input, of_weight = (0 if result is None else result.numel() for result in out[:2])
    grads, weights, inputs = _blocked(grad, lanes), _blocked(weight, lanes, 0, 1), _blocked(image, lanes)
    for_input = inputs + max(grads + weights, of_input) if of_input else 0
    for_weight = of_input + grads + _read(image, lanes) + weights if of_weight else 0
    elements = max(for_input - of_input - of_weight, for_weight - of_input - of_weight, 0)
    return int(elements * image.element_size())


def _unfolded(args: Any, out: Any) -> int:
    """The windows of all images, for one group after another; the groups' results are then concatenated."""
    image, weight, groups = args[0], args[1], args[8]
    windows = _windows(image, weight, out, *args[3:5])
    return windows if groups == 1 else max(windows + _of_group(image, groups), int(out.nbytes))


def _unfolded_backward(args: Any, out: Any) -> int:
    """The windows beside the weight's gradient, or the fp32 copy in which a bias's gradient is summed before it."""
    grad, image, weight = args[:3]
    groups = args[9]
    _, of_weight, of_bias = out
    n_bytes = 0 if of_weight is None else _windows(image, weight, grad, *args[4:6])
    if of_bias is not None and grad.itemsize < 4 and len(grad) > 1:
        allocated_later = 0 if of_weight is None else of_weight.nbytes
        n_bytes = max(n_bytes, (4 * (grad.numel() + of_bias.numel()) - allocated_later) // groups)
    if groups == 1:
        return n_bytes
    results: int = sum(tensor.nbytes for tensor in out if tensor is not None)
    return max(n_bytes + _of_group(grad, groups) + _of_group(image, groups), results)


def _windows(image: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stride: Any, padding: Any) -> int:
    """Bytes of what a kernel sees of one group of all images; 0 where that is their pixels in order."""
    if math.prod(weight.shape[2:]) == 1 and set(stride) == {1} and not any(padding):
        return 0
    return len(image) * math.prod(weight.shape[1:]) * math.prod(out.shape[2:]) * image.element_size()


def _of_group(images: torch.Tensor, groups: int) -> int:
    """Bytes of a contiguous copy of one group of channels; of one image it is contiguous as it is."""
    return images.nbytes // groups if len(images) > 1 else 0


def _lanes(backend: str, image: torch.Tensor, groups: int) -> int:
    """Channels per block of oneDNN's layout; 0 if oneDNN does not compute this, or uses the tensors' layout.

    Also 0 for groups of more than one channel: their layout is unknown.
    """
    if image.dim() == 4 and not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last):
        return 0
    if backend != "Mkldnn" or groups not in (1, image.shape[1]):
        return 0
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 0)


def _read(image: torch.Tensor, lanes: int) -> int:
    return 0 if image.shape[1] <= _PLAIN_CHANNELS else _blocked(image, lanes)


def _blocked(tensor: torch.Tensor, lanes: int, *dims: int) -> int:
    """Elements of a tensor with blocked channels: dimension 1, or those given."""
    sizes = [
        -(-size // lanes) * lanes if at in (dims or (1,)) and size > _PLAIN_CHANNELS else size
        for at, size in enumerate(tensor.shape)
    ]
    return math.prod(sizes)


_PLAIN_CHANNELS = 3
_UNFOLDING = "Slow2d"  # torch's name of its own convolution of images; transposed, dilated and 3-D ones are not counted
_MASKED = ("aten::where", "aten::masked_fill", "aten::masked_fill_")  # a mask keeps its dtype
_SCRATCH: dict[str, tuple[Literal["cuda", "cpu"], Count]] = {
    "aten::_scaled_dot_product_flash_attention_backward": ("cuda", _flash_attention_backward),
    "aten::_flash_attention_backward": ("cuda", _flash_by_documents_backward),
    "aten::sum": ("cuda", _columns_summed),
    "aten::_safe_softmax": ("cuda", lambda args, out: out.numel()),  # which values are -inf
    "aten::_softmax_backward_data": ("cuda", lambda args, out: args[0].nbytes),  # gradient times result
    "aten::convolution": ("cpu", _convolution),
    "aten::convolution_backward": ("cpu", _convolution_backward),
    "c10d::_allgather_base_": ("cpu", _gathered),
    "c10d::_reduce_scatter_base_": ("cpu", _reduced),
}
"""Operator → (the device kind it applies to, its scratch bytes)."""
