"""Fake tensors of device cuda where there is no GPU, on CUDA and CPU builds of torch alike.

`install` changes the process for good: a virtual table inside libtorch, and functions of `torch.cuda`. It is for a
child process that does nothing else; a build of torch whose tables look different may crash there, and the parent then
plans with CPU fakes. Seen to hold with torch 2.9 to 2.13 on Linux x86-64.
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...memory.state import page_locked
from .batchnorm import register_shapes
from .unplannable import refuse_value

_CUDA = 1  # c10::DeviceType::CUDA
_SLOTS = 96  # more virtual functions than CUDAHooksInterface has
_HAS_CONTEXT, _IS_BUILT = 2, 4  # its virtual functions, counted after the two destructors
_kept: list[Any] = []  # what C++ points to must live as long as the process
_current = 0


def current_stream() -> int:
    """Number of the stream that work is put on now; 0 is the default stream."""
    return _current


def install(capability: tuple[int, int], total_memory: int, name: str, n_devices: int = 8) -> None:
    """Make `FakeTensorMode` work with device cuda.

    Args:
        capability: compute capability of the GPU to stand for.
        total_memory: its bytes.
        name: what `torch.cuda.get_device_name` says.
        n_devices: GPUs of the machine to stand for.

    Raises:
        RuntimeError: a fake backward pass does not do what it should.
    """
    _install_guard()
    _install_cuda_api(capability, total_memory, name, n_devices)
    register_shapes()
    _check()


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob(f"{name}.*"))))


def _install_guard() -> None:
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        # PyTorch puts its own fake guard in where it finds one that counts no devices: give it one.
        register: Any = _library(
            "libc10"
        )._ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE
        register.argtypes, register.restype = [ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p], None
        zero = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda this: 0)
        table = (ctypes.c_void_p * 64)(*([ctypes.cast(zero, ctypes.c_void_p).value] * 64))
        guard = (ctypes.c_void_p * 2)(ctypes.addressof(table), 0)
        registrar = (ctypes.c_void_p * 2)()
        _kept.extend([zero, table, guard, registrar])
        register(ctypes.addressof(registrar), _CUDA, ctypes.addressof(guard))
    torch._C._ensureCUDADeviceGuardSet()
    hooks: Any = _library("libtorch_cpu")._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.c_void_p
    table_of_hooks = ctypes.c_void_p.from_address(hooks())
    first = (table_of_hooks.value or 0) - 16  # what lies before a virtual table belongs to it
    copied = (ctypes.c_void_p * (_SLOTS + 2)).from_buffer_copy((ctypes.c_void_p * (_SLOTS + 2)).from_address(first))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda this: True)
    for slot in (_HAS_CONTEXT, _IS_BUILT):
        copied[2 + slot] = ctypes.cast(yes, ctypes.c_void_p).value
    _kept.extend([copied, yes])
    table_of_hooks.value = ctypes.addressof(copied) + 16


class Stream:
    """Stands for `torch.cuda.Stream`: a number."""

    _made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Stream._made += 1
        self.stream_id = self.cuda_stream = Stream._made
        self.device, self.device_index = torch.device("cuda", 0), 0

    def record_event(self, event: Any = None) -> Event:
        return Event()

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class Event:
    """Stands for `torch.cuda.Event`: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    global _current
    before, _current = _current, _current if stream is None else stream.stream_id
    try:
        yield
    finally:
        _current = before


def _install_cuda_api(capability: tuple[int, int], total_memory: int, name: str, n_devices: int) -> None:
    import torch.cuda.amp.common
    from torch.optim.optimizer import _foreach_supported_types as by_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as by_utilities

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # autocast and GradScaler stay on
    for types in (by_optimizers, by_utilities):
        if FakeTensor not in types:
            types.append(FakeTensor)
    default = Stream()
    default.stream_id = default.cuda_stream = 0
    properties = SimpleNamespace(
        name=name, total_memory=total_memory, major=capability[0], minor=capability[1], multi_processor_count=132,
        gcnArchName="", warp_size=32,
    )  # fmt: skip
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": _on_stream,
        "StreamContext": _on_stream,
        "current_stream": lambda *_: default,
        "default_stream": lambda *_: default,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "device_count": lambda: n_devices,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: name,
        "_lazy_init": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (total_memory, total_memory),
        **{f"{most}memory_{what}": lambda *_: 0 for most in ("", "max_") for what in ("allocated", "reserved")},
    }
    for key, value in replaced.items():
        setattr(torch.cuda, key, value)
    for key in ("current_stream", "synchronize"):  # FSDP2 asks here when it gathered a frozen block for nothing
        setattr(torch.accelerator, key, replaced[key])
    for key in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, key, lambda *_: 0)
    for key, dtype in (("FloatTensor", torch.float32), ("ByteTensor", torch.uint8), ("IntTensor", torch.int32)):
        setattr(torch.cuda, key, lambda data, dtype=dtype: torch.tensor(data, dtype=dtype, device="cuda"))
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    F.scaled_dot_product_attention = _attention


_real_attention = F.scaled_dot_product_attention


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that a GPU would choose: on fake tensors torch's own choice is always the unfused one."""
    if query.device.type != "cuda":
        return _real_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    width, shared = query.shape[-1], enable_gqa and query.shape[1] != key.shape[1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    flash = half and attn_mask is None and width <= 256 and width == value.shape[-1] and query.dim() == 4
    if shared and not flash:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    aten: Any = torch.ops.aten
    with torch.autocast("cuda", enabled=False):
        if flash:
            padding = -width % 8
            if padding:
                query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
            out = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale or 1 / math.sqrt(width)
            )[0]
            return out[..., :width] if padding else out  # type: ignore[no-any-return]
        if query.dim() == 4:
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, bias, grad, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale
        )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the memory-efficient kernel takes it: additive, rows padded to 16 elements, whole."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    padding = -mask.shape[-1] % 16
    if padding:
        mask = F.pad(mask, (0, padding))[..., :-padding]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class ConstantItems(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what fake tensors cannot: `.item()` is 1 (False for bool); pinned memory is plain memory as large.

    Raises:
        ConfigError: code that is no library's asks for a value: its branches would be taken blindly.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and getattr(args[0], "constant", 0) is None:
            refuse_value(sys._getframe(1))
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten._pin_memory.default:
            return self._pin(args[0].clone())
        if func is torch.ops.aten.is_pinned.default:
            return args[0].untyped_storage() in self._pinned
        if kwargs and kwargs.get("pin_memory"):
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **(kwargs or {}))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storage.resize_(page_locked(storage.nbytes()))
        self._pinned.add(storage)
        return tensor


def _check() -> None:
    """A small backward pass on fake tensors: the right device, dtypes under autocast, and an accelerator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if torch.accelerator.current_accelerator() != torch.device("cuda"):
        raise RuntimeError("torch does not take cuda for its accelerator")
    items = ConstantItems()
    with FakeTensorMode(), items, torch.device("cuda"):
        layer = torch.nn.Linear(4, 4)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = layer(torch.zeros(2, 4))
        out.sum().backward()
        if out.dtype is not torch.bfloat16 or layer.weight.grad is None or layer.weight.grad.device.type != "cuda":
            raise RuntimeError("a fake backward pass on cuda gives something else")
