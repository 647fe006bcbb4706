"""Private names of torch, DeepSpeed and transformers that planning uses, and the functions of theirs that it replaces.

`install_fake_cuda` changes the process for good: it patches a virtual table inside libtorch and functions of
`torch.cuda`. Use it in a child process that does nothing else: a torch build with other tables may crash it, and the
parent then plans with CPU fakes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import mmap
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from ...config.libraries import Feature

PLANS = Feature("planning")
FAKE_CUDA = Feature("planning on fake CUDA tensors")
ZERO_PLANS = Feature("planning ZeRO")
HF_PLANS = Feature("planning transformers models as they train")
_FAKES = "torch._subclasses.fake_tensor"
_FSDP = "torch.distributed.fsdp._fully_shard"
_FAKE_DEVICE = "https://github.com/pytorch/pytorch/issues/159566"

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode
else:
    DataDependentOutputException = PLANS.take(f"{_FAKES}.DataDependentOutputException")
    DynamicOutputShapeException = PLANS.take(f"{_FAKES}.DynamicOutputShapeException")
    FakeTensor = PLANS.take(f"{_FAKES}.FakeTensor")
    FakeTensorMode = PLANS.take(f"{_FAKES}.FakeTensorMode")
    UnsupportedOperatorException = PLANS.take(f"{_FAKES}.UnsupportedOperatorException")
    unset_fake_temporarily = PLANS.take(f"{_FAKES}.unset_fake_temporarily")
    DispatchMode = PLANS.take("torch.utils._python_dispatch.TorchDispatchMode")
FakeStore = PLANS.take("torch.testing._internal.distributed.fake_pg.FakeStore")
no_modes = PLANS.take("torch.utils._python_dispatch._disable_current_modes")
resolve_process_group = PLANS.take("torch.distributed.distributed_c10d._resolve_process_group")
PLANS.take("torch.ops.aten.add.Tensor._overloadpacket")
LOCAL_SCALAR = PLANS.take("torch.ops.aten._local_scalar_dense.default")
PIN_MEMORY = PLANS.take("torch.ops.aten._pin_memory.default")
ALL_GATHER = PLANS.take("torch.ops.c10d._allgather_base_.default")
WAIT = PLANS.take("torch.ops._c10d_functional.wait_tensor.default")
GROUPED_MM = PLANS.take("torch.ops.aten._grouped_mm.default")
_make_subclass = PLANS.take("torch.Tensor._make_subclass")
own_apply = PLANS.take("torch.nn.Module._apply")
PLANS.take("torch.amp.grad_scaler.GradScaler._maybe_opt_step")
_split = PLANS.use(f"{_FSDP}._fsdp_param._chunk_with_empty")
# torch 2.9 calls the function through a second module that imports it.
_moves = [PLANS.use(f"{_FSDP}._fsdp_init._move_states_to_device")]
_moves += [PLANS.use(f"{_FSDP}._fully_shard._move_states_to_device", until="2.13.0")]
# torch 2.9.0 has no kernels for collectives of fake tensors: see `register_collectives`.
_c10d = PLANS.use("torch.ops.c10d", until="2.13.0")
_key = PLANS.use("torch._C.DispatchKey", until="2.13.0")
_key_set = PLANS.use("torch._C.DispatchKeySet", until="2.13.0")
_fused_adamw = ZERO_PLANS.take("torch._fused_adamw_")

# torch 2.9.0 has no guard for machines without a GPU, and gets ours: see `_install_guard`.
_ensure_guard = FAKE_CUDA.use("torch._C._ensureCUDADeviceGuardSet", _FAKE_DEVICE, since="2.13.0")
# torch 2.9.0 creates a real tensor on the device along with the first fake one.
_init_context = FAKE_CUDA.use(f"{_FAKES}.init_gpu_context", _FAKE_DEVICE, until="2.13.0")
_cuda_hooks = FAKE_CUDA.use("torch.lib.libtorch_cpu._ZN2at6detail12getCUDAHooksEv", _FAKE_DEVICE)
_register_guard = FAKE_CUDA.use(
    "torch.lib.libc10._ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE",
    _FAKE_DEVICE,
)
_raw_stream = FAKE_CUDA.use("torch._C._cuda_getCurrentRawStream", cuda=True)
_foreach_types = [
    FAKE_CUDA.take(f"torch.{module}._foreach_supported_types") for module in ("optim.optimizer", "utils._foreach_utils")
]
_of_sync_batch_norm = FAKE_CUDA.take("torch.nn.modules._functions")
flash_attention = FAKE_CUDA.take("torch.ops.aten._scaled_dot_product_flash_attention")
efficient_attention = FAKE_CUDA.take("torch.ops.aten._scaled_dot_product_efficient_attention")
softmax_of_rows = FAKE_CUDA.take("torch._safe_softmax")
_replaced = [
    FAKE_CUDA.use(f"torch.{name}", _FAKE_DEVICE)
    for name in (
        "cuda.amp.common.amp_definitely_not_available", "cuda._lazy_init", "Tensor.record_stream",
        "nn.functional.scaled_dot_product_attention", "cuda.Stream", "cuda.Event", "Event",
        "accelerator.current_stream", "cuda.nvtx.range_push",
    )
]  # fmt: skip

_COLLECTIVES = (
    "allreduce_", "reduce_", "broadcast_", "barrier", "allgather_", "_allgather_base_", "reduce_scatter_",
    "_reduce_scatter_base_", "alltoall_", "alltoall_base_", "gather_", "scatter_",
)  # fmt: skip
_CUDA = 1  # c10::DeviceType::CUDA
_SLOTS = 96  # more virtual functions than CUDAHooksInterface has
_IS_BUILT, _HAS_CONTEXT = 2, 4  # slots of the two functions, after two destructors
_GUARD_SLOTS = 64  # more virtual functions than DeviceGuardImplInterface has
_alive: list[Any] = []  # objects that C++ points to, and registrations, must live as long as the interpreter


def copy_of_fake(meta: torch.Tensor, device: torch.device, attributes: Mapping[str, Any]) -> FakeTensor:
    """A fake tensor of a meta tensor's shape on a device, with the attributes of a new fake tensor on that device."""
    fake = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    fake.__dict__.update(attributes)
    return fake  # type: ignore[no-any-return]


def packet_of(func: Any) -> Any:
    """The operator (all overloads) that this overload belongs to."""
    return func._overloadpacket


@functools.cache
def makes_alike(func: Any) -> bool:
    """Whether an operator's results follow from its arguments' shapes, dtypes and numbers, and it changes no shapes."""
    if getattr(func, "namespace", "") not in ("aten", "prims") or func.name() in _ALIASES or "resize" in func.name():
        return False
    return not _UNLIKE.intersection(func.tags)


_ALIASES = ("aten::lift", "aten::lift_fresh", "aten::_efficientzerotensor")
_UNLIKE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


def fused_adamw(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """A fused AdamW step that changes nothing; a trace sees the tensors that it touches."""
    _fused_adamw(
        [param], [grad], [exp_avg], [exp_avg_sq], [], [], lr=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0, eps=1.0,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def call_directly(*modes: type[DispatchMode]) -> None:
    """Remove the wrapper that keeps `torch.compile`, unused here, out of modes: it costs more than the modes."""
    for mode in modes:
        mode.__torch_dispatch__ = inspect.unwrap(mode.__torch_dispatch__)  # type: ignore[method-assign]


def install_fake_cuda(cuda: Mapping[str, Any], attention: Callable[..., Any]) -> None:
    """Make torch believe in a GPU with these members of `torch.cuda` and this attention; call it once per process."""
    FAKE_CUDA.require()
    _install_guard()
    if _init_context.exists():
        resolve_name(_FAKES).init_gpu_context = lambda device: None
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # autocast and GradScaler stay on
    for types in _foreach_types:
        if FakeTensor not in types:
            types.append(FakeTensor)
    for key, value in cuda.items():
        setattr(torch.cuda, key, value)
    torch.cuda._lazy_init = lambda: None
    if not _raw_stream.exists():  # bitsandbytes, which peft imports, reads it where it sees a GPU
        torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.Event = cuda["Event"]  # type: ignore[misc]
    for key in ("current_stream", "synchronize"):  # FSDP2 calls these when it has gathered a frozen block for nothing
        setattr(torch.accelerator, key, cuda[key])
    for key in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, key, lambda *_: 0)
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    F.scaled_dot_product_attention = attention


def _install_guard() -> None:
    has_its_own = _ensure_guard.exists()
    if not (has_its_own and torch.backends.cuda.is_built()):  # type: ignore[no-untyped-call]
        # PyTorch replaces a guard that counts no devices with its own fake one. If it has none, ours stays.
        register: Any = _register_guard.find()
        register.argtypes, register.restype = [ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p], None
        none = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
        _alive.append(none)
        answer = ctypes.cast(none, ctypes.c_void_p).value if has_its_own else _function_for_one_device()
        table = (ctypes.c_void_p * _GUARD_SLOTS)(*[answer] * _GUARD_SLOTS)
        guard = (ctypes.c_void_p * 2)(ctypes.addressof(table), 0)
        registrar = (ctypes.c_void_p * 2)()
        _alive.extend([table, guard, registrar])
        register(ctypes.addressof(registrar), _CUDA, ctypes.addressof(guard))
    if has_its_own:
        _ensure_guard.find()()
    hooks: Any = _cuda_hooks.find()
    hooks.restype = ctypes.c_void_p
    table_of_hooks = ctypes.c_void_p.from_address(hooks())
    table_start = (table_of_hooks.value or 0) - 16  # two words before a virtual table belong to it
    copied = (ctypes.c_void_p * (_SLOTS + 2)).from_buffer_copy(
        (ctypes.c_void_p * (_SLOTS + 2)).from_address(table_start)
    )
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
    for slot in (_IS_BUILT, _HAS_CONTEXT):
        copied[2 + slot] = ctypes.cast(yes, ctypes.c_void_p).value
    _alive.extend([copied, yes])
    # libtorch destroys the hooks after the interpreter, which takes `copied` with it.
    atexit.register(setattr, table_of_hooks, "value", table_of_hooks.value)
    table_of_hooks.value = ctypes.addressof(copied) + 16


def _function_for_one_device() -> int:
    """Address of a function that answers every question of torch 2.9.0 to a guard about devices and streams.

    It returns 1 in the first register and 0 in the second: 1 is the device type, the device count, true, and the bytes
    of a `Device` for GPU 0; both registers are GPU 0's default `Stream`. It is machine code, since a ctypes function
    cannot return a struct, and it needs no Python lock in autograd's threads.
    """
    if platform.machine() != "x86_64":
        raise _ensure_guard.gone()
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("b801000000 31d2 c3"))  # mov eax, 1; xor edx, edx; ret
    _alive.append(code)
    return ctypes.addressof(ctypes.c_char.from_buffer(code))


class _Changed:
    def __init__(self, module: Any, **members: Any) -> None:
        self.__dict__.update(members)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def register_cuda_kernels() -> None:
    """Keep operators whole that torch has CUDA kernels for; a CPU build of torch would take them apart into others.

    These are the operators of torch 2.9 to 2.13 that have kernels for a device and otherwise a composition of other
    operators, which keeps more for backward. The kernels are never called: fake tensors come first.
    """
    library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]

    def never_called(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a real tensor was on the fake device")

    for name in ("silu_backward", "mish_backward", "_fused_rms_norm"):
        operator = getattr(torch.ops.aten, name, None)
        if operator is not None and not operator.default.has_kernel_for_dispatch_key(_key.find().CUDA):
            library.impl(name, never_called)  # type: ignore[no-untyped-call]
    _alive.append(library)


def register_batch_norm(shapes: Mapping[str, Callable[..., Any]]) -> None:
    """Let fake tensors pass a synchronised batch norm, whose kernels torch 2.9 to 2.15 has for real GPUs only."""
    library = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    for name, kernel in shapes.items():
        library.impl(name, kernel)  # type: ignore[no-untyped-call]
    _alive.append(library)
    # During graph capture it does not search for ranks without samples, which would need values.
    capturing = _Changed(torch.cuda, is_current_stream_capturing=lambda: True)
    _of_sync_batch_norm.torch = _Changed(torch, cuda=capturing)


def register_collectives() -> None:
    """Let fake tensors pass collectives if torch (2.9.0) has kernels for real ones only; call it once per process."""
    operators = [getattr(_c10d.find(), name).default for name in _COLLECTIVES]
    if operators[0].has_kernel_for_dispatch_key(_key.find().Meta):
        return
    library = torch.library.Library("c10d", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    # The CPU kernels call the process group; the fake group answers at once.
    on_cpus = _key_set.find()(_key.find().CPU)
    for operator in operators:
        kernel = partial(operator.redispatch, on_cpus)
        gathers = operator.name() == "c10d::_allgather_base_"
        library.impl(operator, partial(_gather_flat, kernel) if gathers else kernel)  # type: ignore[no-untyped-call]
    _alive.append(library)


def _gather_flat(gather: Callable[..., Any], output: torch.Tensor, shard: torch.Tensor, *options: Any) -> Any:
    """Gather into a flat view: torch 2.9.0's fake group splits the output along its first dimension, which may be 1."""
    return output, gather(output.view(-1), shard.view(-1), *options)[1]


_init_mesh = DeviceMesh.__init__


def _mesh_of_real_ranks(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
    """A mesh looks for this rank's number among real ones; FSDP2 makes one for parameters that ranks share."""
    with unset_fake_temporarily():
        _init_mesh(self, *args, **kwargs)


@contextmanager
def torch_on_fakes(
    apply: Callable[..., Any], split: type, move: Callable[..., None], step: Callable[..., Any]
) -> Iterator[None]:
    """Replace the functions of torch that do not work on fake tensors; `fake_world` says why at each replacement."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "_apply", apply))
        stack.enter_context(patch.object(GradScaler, "_maybe_opt_step", step))
        stack.enter_context(patch(_split.path, split))
        stack.enter_context(patch.object(DeviceMesh, "__init__", _mesh_of_real_ranks))
        for moves in _moves:
            if moves.exists():
                stack.enter_context(patch(moves.path, move))
        yield


_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
_STAGES = "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"
_compares = ZERO_PLANS.use(f"{_COORDINATOR}.assert_ints_same_as_other_ranks")
_overflows = [
    ZERO_PLANS.use(f"{_STAGES[0]}.DeepSpeedZeroOptimizer.has_overflow"),
    ZERO_PLANS.use(f"{_STAGES[1]}.DeepSpeedZeroOptimizer_Stage3.has_overflow"),
]
# Replaced in the optimizers' modules too, since offload_ratio and pure_bf16 check for exactly this type.
_cpu_adams = [ZERO_PLANS.use(f"{module}.DeepSpeedCPUAdam") for module in ("deepspeed.ops.adam", *_STAGES)]


@contextmanager
def deepspeed_alone(cpu_adam: type) -> Iterator[None]:
    """Turn off DeepSpeed's comparisons of ranks and overflow checks: there are no peers and no real gradients."""
    ZERO_PLANS.require()
    with ExitStack() as stack:
        stack.enter_context(patch(_compares.path, lambda ints: None))
        for overflow in _overflows:
            stack.enter_context(_never(overflow.find(), overflow.path))
        for adam in _cpu_adams:
            stack.enter_context(patch(adam.path, cpu_adam))
        yield


def _never(function: Callable[..., Any], path: str) -> Any:
    """Run a function that looks for infinities, but answer that there are none."""

    def looked(*args: Any, **kwargs: Any) -> bool:
        function(*args, **kwargs)  # called because it allocates memory
        return False

    return patch(path, looked)


# transformers mistakes fake tensors for an export trace, and builds masks that training does not need.
_AS_IN_TRAINING: dict[str, Callable[..., Any]] = {
    "is_tracing": lambda *_, **__: False,
    "is_fake_tensor": lambda *_, **__: False,
    "find_packed_sequence_indices": lambda *_, **__: None,
}
_MASKS = "transformers.masking_utils"
_masks = [HF_PLANS.use(f"{_MASKS}.is_tracing"), HF_PLANS.use(f"{_MASKS}.find_packed_sequence_indices")]


@contextmanager
def transformers_in_training() -> Iterator[None]:
    """Make the loaded modules of transformers build the same masks as in training."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers."):
                for key, value in _AS_IN_TRAINING.items():
                    if key in vars(module):
                        stack.enter_context(patch.object(module, key, value))
        yield
