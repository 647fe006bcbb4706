"""Private names of torch and transformers that training uses, and functions of theirs that it replaces.

If a name is missing, the feature that needs it is off or works in another way, and logs one line. The one exception: a
transformers model cannot be built without transformers' own rules for its weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.libraries import Feature, NameGone, Private

_PYTREE = "https://github.com/pytorch/pytorch/issues/65761"

TREES = Feature("nested outputs in fp32 (precision.output_dtype)")
PRODUCTS = Feature("activation.policy=selective_op")
KEEP_RESULTS = Feature("keeping this operator's results under activation.policy=selective_op")
BUDGET = Feature("activation.policy=budget")
BREAKS = Feature("the warning of graph breaks under compile.enabled")
CHANGED = Feature("recomputing blocks that change their buffers (activation.policy)")
OFFLOAD = Feature("activation.offload")
TIMEOUT = Feature("run.init_timeout_s and run.step_timeout_s in every group")
ABORT = Feature("leaving a failed job without waiting for its ranks")
EMA = Feature("train.ema_decay in one kernel")
FP8_SPEED = Feature("fp8 in shardkit doctor --calibrate")
FLIGHT = Feature("NCCL's last collectives in the report of a hang")
META = Feature("building models without memory (init_parameter)")
HF = Feature("the tasks on transformers models")
BUFFERS = Feature("leaving non-persistent buffers out of checkpoints")
UNUSED = Feature("parameters that a step does not use, under parallel.strategy=ddp")
GRAD_HOOKS = Feature("a model's own hooks of its parameters where these are built anew")
EXPERTS = Feature("experts in 4 bits (model.quantize.experts)")
PACKING = Feature("data.packing with transformers models")
FLASH = Feature("fused attention by documents on GPUs (data.packing)")
CONTEXT = Feature("parallel.tp, parallel.cp and parallel.ep")
ONE_SHARD = Feature("computing with whole parameters where they lie, under fsdp and hsdp with dp_shard=1")
PROGRESS = Feature("the group in which ranks hang, named by the watchdog")

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode
    from torch._C._distributed_c10d import FileStore as FileStore
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
else:
    # These names are public, but torch hides them from type checkers.
    from torch.distributed import FileStore as FileStore
    from torch.distributed import GradBucket as GradBucket
    from torch.distributed import HashStore as HashStore
    from torch.distributed import PrefixStore as PrefixStore
    from torch.distributed import Store as Store
    from torch.distributed import TCPStore as TCPStore

    # In eager mode torch's own contexts return a kept product with later writes (see activation/checkpoint.py).
    DispatchMode = PRODUCTS.take(
        "torch.utils._python_dispatch.TorchDispatchMode", "https://github.com/pytorch/pytorch/issues/119590"
    )
    tree_map_only = PRODUCTS.take("torch.utils._pytree.tree_map_only", _PYTREE)
    tree_map = TREES.take("torch.utils._pytree.tree_map", _PYTREE)
    tree_leaves = PRODUCTS.take("torch.utils._pytree.tree_leaves", _PYTREE)
PRODUCTS.take("torch.ops.aten.add.Tensor._schema")
CHANGED.take("torch.Tensor._version")
OFFLOAD.take("torch.Tensor._version")
CHANGED.take("torch._C._autograd._top_saved_tensors_default_hooks")
OFFLOAD.take("torch.Tensor._base")

_budget = BUDGET.use("torch._functorch.config.activation_memory_budget")
_counters = BREAKS.use("torch._dynamo.utils.counters")
_set_pg_timeout = TIMEOUT.take("torch.distributed.distributed_c10d._set_pg_timeout")
_groups = TIMEOUT.use("torch.distributed.distributed_c10d._world.pg_map")
_sequence_number = PROGRESS.use("torch.distributed.ProcessGroup._get_sequence_number_for_group")
_abort_process_group = ABORT.take("torch.distributed.distributed_c10d._abort_process_group")
_foreach_lerp = EMA.take("torch._foreach_lerp_")
_scaled_mm = FP8_SPEED.take("torch._scaled_mm")
_trace_nccl = FLIGHT.use("torch._C._distributed_c10d._dump_nccl_trace", cuda=True)
META.take("torch.nn.Module.register_parameter")  # replaced in weights.py
_truncated = META.use("torch.nn.init._no_grad_trunc_normal_")
META.take("torch.Generator._cdata")
HF.use("transformers.PreTrainedModel._from_config")
HF.use("transformers.PreTrainedModel._init_weights")
# Under ZeRO-3 parameters are empty when transformers would draw weights into them.
HF.use("transformers.PreTrainedModel.init_weights", "https://github.com/huggingface/transformers/pull/43847")
EXPERTS.use("transformers.models.mixtral.modeling_mixtral.MixtralExperts._apply_gate")
PACKING.use("transformers.PreTrainedModel._supports_flash_attn")
PACKING.use("transformers.PreTrainedModel._is_stateful")
# The public varlen_attn has no dropout, and in torch 2.9 no windows and no shared heads.
_flash_varlen = FLASH.take("torch.ops.aten._flash_attention_forward")
_check_reduced = UNUSED.use("torch.nn.parallel.DistributedDataParallel._check_reducer_finalized")
_grad_hooks = GRAD_HOOKS.use("torch.Tensor._backward_hooks")
_accumulated_hooks = GRAD_HOOKS.use("torch.Tensor._post_accumulate_grad_hooks")
_not_persistent = BUFFERS.use("torch.nn.Module._non_persistent_buffers_set")

# The functional collectives, unlike the public ones, can be kept by activation.policy=selective_op, and compiled.
_all_reduce = CONTEXT.take("torch.ops._c10d_functional.all_reduce")
_exchange = CONTEXT.take("torch.ops._c10d_functional.all_to_all_single")
_wait = CONTEXT.take("torch.ops._c10d_functional.wait_tensor")

_products = [
    KEEP_RESULTS.use("torch.ops.aten._scaled_mm"),
    KEEP_RESULTS.use("torch.ops._c10d_functional.all_to_all_single"),
]
_attentions = [
    KEEP_RESULTS.use(f"torch.ops.aten.{name}")
    for name in (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_flash_attention_forward",
    )
]  # fmt: skip


def _found(feature: Feature, private: Private, part: str = "", instead: str = "") -> Any:
    """The object of that name; None if it is gone, which is said once, as in `Feature.lost`."""
    try:
        return private.find()
    except NameGone:
        feature.lost(private, part, instead)
        return None


def products() -> set[Any]:
    """The private operators that compute matrix products (fp8)."""
    return _operators(_products)


def attentions() -> set[Any]:
    """The fused-attention operators that this torch has."""
    return _operators(_attentions)


def _operators(names: Sequence[Private]) -> set[Any]:
    found = (_found(KEEP_RESULTS, private, f"keeping {private.path}") for private in names)
    return {op.default for op in found if op is not None}


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
        ctx.call = sent, received, group
        exchanged: torch.Tensor = _wait(_exchange(rows, received, sent, group))
        return exchanged

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.call
        return _wait(_exchange(grad.contiguous(), sent, received, group)), None, None, None


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send `parts[i]` to rank i of the group; returns [size, …], what each rank sent. Differentiable."""
    return exchange_rows(parts, [1] * parts.shape[0], [1] * parts.shape[0], group)


def exchange_rows(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send the next `sent[i]` rows to rank i of the group; returns the `received[i]` rows of each rank, in order.
    Differentiable; any number may be 0."""
    exchanged: torch.Tensor = _AllToAll.apply(rows, sent, received, group.group_name)  # type: ignore[no-untyped-call]
    return exchanged


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: str) -> torch.Tensor:
        total: torch.Tensor = _wait(_all_reduce(part, "sum", group))
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _wait(_all_reduce(grad.contiguous(), "sum", ctx.group)), None


def sum_over(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the tensors of a group's ranks, which all use it alike: its gradient is that of each part."""
    total: torch.Tensor = _Sum.apply(part, group.group_name)  # type: ignore[no-untyped-call]
    return total


def used_in_parts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor that a group's ranks have alike and each uses for a part of a result: their gradients are summed."""
    same: torch.Tensor = _SumOfGradients.apply(x, group.group_name)  # type: ignore[no-untyped-call]
    return same


def schema(op: Any) -> Any:
    """An operator's schema: its name, arguments and results."""
    return op._schema


def version_of(tensor: torch.Tensor) -> int:
    """The number of times that a tensor's memory was written in place."""
    return tensor._version


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: the fake ones on which planning traces have none."""
    return not isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


def caller_recomputes() -> bool:
    """Whether the code that runs now is inside a region that the caller recomputes with torch.utils.checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def owner_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which `tensor` is a view; the tensor itself if it is not a view."""
    base = tensor._base
    return tensor if base is None else base


def set_memory_budget(share: float) -> bool:
    """Set the share of activations that torch.compile may keep; returns whether the share changed."""
    try:
        if _budget.find() == share:
            return False
    except NameGone:
        if share < 1:
            BUDGET.lost(_budget)
        return False
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = share
    return True


def graph_breaks() -> dict[str, int]:
    """The number of graph breaks that torch.compile has made in this process, by reason.

    It includes functions that torch.compile gave up, for example because of a break in a loop; torch counts these
    separately.
    """
    counted = _found(BREAKS, _counters)
    if counted is None:
        return {}
    breaks = dict(counted["graph_break"])
    if counted["frames"]["total"] > counted["frames"]["ok"]:
        breaks |= {reason: number for reason, number in counted["unimplemented"].items() if reason not in breaks}
    named: Counter[str] = Counter()
    for reason, number in breaks.items():
        named[reason.strip().partition("\n")[0]] += number
    return dict(named)


def not_reduced(wrapped: nn.Module) -> list[int]:
    """Indices of the trained parameters to which the backward that just ended gave no gradient; DDP waits for them."""
    try:
        _check_reduced.find()(wrapped)
    except NameGone:
        UNUSED.lost(_check_reduced)
    except RuntimeError as error:
        indices = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
        if indices is None:
            raise
        return [int(index) for index in indices[1].split()]
    return []


def groups() -> Sequence[dist.ProcessGroup]:
    """All process groups of this process, including those that libraries made."""
    return list(_found(TIMEOUT, _groups) or ())


def progress_of_groups() -> list[tuple[str, list[int], int]]:
    """(name, ranks, number of collectives that this rank has begun) of each of its groups that has a name."""
    progress = []
    for group in groups():
        name = group.group_desc.removeprefix("mesh_")
        if name == "undefined":
            continue
        try:
            begun = _sequence_number.find()(group)
        except NameGone:
            PROGRESS.lost(_sequence_number)
            return []
        except RuntimeError:  # its backend does not count
            continue
        progress.append((name.replace("default_pg", "the whole job"), dist.get_process_group_ranks(group), int(begun)))
    return progress


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of this group fail after `timeout` if they start from now on."""
    if TIMEOUT.works():
        _set_pg_timeout(timeout, group)


def abort_groups() -> None:
    """Leave every group without waiting for its pending collectives."""
    if ABORT.works(instead="the default group alone is aborted"):
        _abort_process_group()
    elif dist.group.WORLD is not None:
        dist.group.WORLD.abort()


def hooks_of(param: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks that change a parameter's gradient, in the order in which they run."""
    return list((getattr(param, "_backward_hooks", None) or {}).values())


def accumulated_hooks_of(param: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks that run when a parameter's gradient is complete."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def lerp_all(averages: list[torch.Tensor], values: list[torch.Tensor], weight: float) -> None:
    """Move each average towards its value, in place."""
    if EMA.works(instead="one kernel each"):
        _foreach_lerp(averages, values, weight)
        return
    for average, value in zip(averages, values, strict=True):
        average.lerp_(value, weight)


def scaled_product(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A product of fp8 matrices, in bf16."""
    product: torch.Tensor = _scaled_mm(x, y, scale, scale, out_dtype=torch.bfloat16)
    return product


def nccl_trace() -> bytes | None:
    """The last collectives from NCCL's flight recorder, pickled; None in builds of torch without NCCL."""
    try:
        trace: bytes = _trace_nccl.find()()
    except NameGone:
        return None
    return trace


def copy_grad_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Register the gradient hooks of `source` on `target` too."""
    for private, register in (
        (_grad_hooks, target.register_hook),
        (_accumulated_hooks, target.register_post_accumulate_grad_hook),
    ):
        try:
            hooks = getattr(source, private.path.rpartition(".")[2])
        except AttributeError:
            GRAD_HOOKS.lost(private)
            continue
        for hook in (hooks or {}).values():
            register(hook)  # type: ignore[no-untyped-call]


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer is part of its module's `state_dict`."""
    try:
        return buffer not in module._non_persistent_buffers_set
    except AttributeError:
        BUFFERS.lost(_not_persistent, instead="the modules' state_dict is asked")
        return buffer in module.state_dict()


def from_config(model_class: Any, config: Any, **options: Any) -> nn.Module:
    """Build a transformers model in fp32; its own code draws its weights."""
    model: nn.Module = model_class._from_config(config, dtype=torch.float32, **options)
    return model


def gated(experts: Any, projected: torch.Tensor) -> torch.Tensor:
    """What a transformers module of experts makes of its gate and up projections: [n, 2 · intermediate] to
    [n, intermediate]."""
    output: torch.Tensor = experts._apply_gate(projected)
    return output


def declares_no_masks(model: Any) -> bool:
    """Whether a transformers model declares that it keeps no state along the sequence and needs no attention mask.

    A model that supports flash attention passes all that its attention needs as arguments.
    """
    return bool(model._supports_flash_attn) and not getattr(model, "_is_stateful", False)


def flash_by_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    dropout: float,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal variable-length flash attention on CUDA, of tensors [tokens, heads, width].

    `bounds`: int32 [documents + 1], the index of each document's first token, and the end. `longest`: tokens of the
    longest document. `window`: most tokens that a token attends to, itself included; None = no limit.
    """
    out: torch.Tensor = _flash_varlen(
        query, key, value, bounds, bounds, longest, longest, dropout, True, False, scale=scale,
        window_size_left=None if window is None else window - 1, window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return out


def init_weights_of(model: Any, module: nn.Module) -> None:
    """Initialise the weights of one of a transformers model's modules by the model's rule."""
    model._init_weights(module)


@contextmanager
def ties_only() -> Iterator[None]:
    """Inside, transformers models that are built tie their weights and do not initialise them."""
    from transformers import PreTrainedModel

    init_weights = PreTrainedModel.init_weights
    PreTrainedModel.init_weights = lambda self: self.tie_weights(recompute_mapping=False)
    try:
        yield
    finally:
        PreTrainedModel.init_weights = init_weights


@contextmanager
def replaced_truncated_normal(stand_in: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Inside, `nn.init.trunc_normal_` calls `stand_in(torch's own function, tensor, mean, std, a, b, generator=…)`.

    From torch 2.13 on, torch's function draws rejected values again, so its operators depend on values and cannot be
    recorded one by one.
    """
    part, instead = "drawing a part of nn.init.trunc_normal_", "each rank draws such parameters whole"
    original = _found(META, _truncated, part, instead)
    if original is None:
        yield
        return
    torch.nn.init._no_grad_trunc_normal_ = partial(stand_in, original)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


def is_same_generator(a: torch.Generator, b: torch.Generator) -> bool:
    """Whether two objects are the same generator: torch makes a new object for each operator that it dispatches."""
    return bool(a._cdata == b._cdata)  # type: ignore[attr-defined]


# Private names of FSDP2 that training uses; see `compat` for torch's other ones.

GATHERED = Feature("gathered parameters and unreduced gradients of FSDP2 in memory's categories")
REACH = Feature("FSDP2 with parameters that are used outside of their unit's forward")
PACKED = Feature("FSDP2 over weights in 4 bits")

_FSDP = "torch.distributed.fsdp._fully_shard"
_fsdp = [
    GATHERED.use("torch.distributed.fsdp.FSDPModule._get_fsdp_state"),
    GATHERED.use(f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_group"),
    GATHERED.use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params"),
    GATHERED.use(f"{_FSDP}._fsdp_param.FSDPParam.all_gather_outputs"),
    GATHERED.use(f"{_FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad"),
]
_reach = [
    REACH.use(f"{_FSDP}._fsdp_state.FSDPState._training_state"),
    REACH.use(f"{_FSDP}._fsdp_state.FSDPState._state_ctx"),
    REACH.use(f"{_FSDP}._fsdp_state.FSDPStateContext.post_backward_final_callback_queued"),
    REACH.use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup._training_state"),
    REACH.use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup.post_backward"),
    REACH.use(f"{_FSDP}._fsdp_param_group.FSDPParamGroup.finalize_backward"),
]
_INTEGERS = "https://github.com/pytorch/pytorch/issues/177844"
_nn_of_fsdp = PACKED.use(f"{_FSDP}._fsdp_param.nn", _INTEGERS, until="2.13.0")
PACKED.use(f"{_FSDP}._fsdp_param.FSDPParam.init_dtype_attrs", _INTEGERS, until="2.13.0")
REACH.use(f"{_FSDP}._fsdp_param.FSDPParam._unsharded_param")
REACH.use(f"{_FSDP}._fsdp_param.FSDPParam.sharded_param")
_one_shard = [
    ONE_SHARD.use(f"{_FSDP}._fsdp_param.FSDPParam.{name}")
    for name in (
        "_get_grad_inner_tensor", "_sharded_param_data", "free_unsharded_param", "init_all_gather_outputs",
        "to_sharded_dtensor",
    )
]  # fmt: skip


def shard(modules: Any, **options: Any) -> None:
    """torch's `fully_shard`. Integer parameters before torch 2.13, too: it would ask for their gradients and cast them.

    `modules`: a module, or several that become one unit.
    """
    from unittest.mock import patch

    # FSDP2 takes 0.4 s, and other engines do not need it.
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    unit = modules[0] if isinstance(modules, list) else modules
    if not _nn_of_fsdp.needed():
        fully_shard(modules, **options)
    else:
        _nn_of_fsdp.find()
        with patch(f"{_FSDP}._fsdp_param.nn", _NnWithIntegerParameters()):
            fully_shard(modules, **options)
        for param in _fsdp_params(unit):
            if not param.sharded_param.is_floating_point():
                param.init_dtype_attrs = partial(_init_without_cast, param, param.init_dtype_attrs)
    mesh = options["mesh"]
    if mesh.size(-1) == 1 and not isinstance(options["offload_policy"], CPUOffloadPolicy):
        _compute_in_place(unit, is_replicated=mesh.ndim == 2)


def _compute_in_place(unit: Any, is_replicated: bool) -> None:
    """Let a rank that has all of a unit's parameters compute with them where they lie, if not in another type, and keep
    gradients where backward left them: torch copies both, as it must where ranks have shards."""
    gone = next((name for name in _one_shard if not name.exists()), None)
    if gone is not None:
        ONE_SHARD.lost(gone, instead="they are copied")
        return
    for param in _fsdp_params(unit):
        param.init_all_gather_outputs = partial(_init_in_place, param, param.init_all_gather_outputs)
        param.free_unsharded_param = partial(_free_copy, param, param.free_unsharded_param)
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None and not is_replicated:
        group.post_backward = partial(_keep_gradients, group, group.post_backward)


def _init_in_place(param: Any, init: Callable[..., None], *args: Any) -> None:
    if param.param_dtype is None:
        param.all_gather_outputs = [param._sharded_param_data]  # to copy a tensor to itself is nothing
    else:
        init(*args)


def _free_copy(param: Any, free: Callable[[], None]) -> None:
    if param.param_dtype is not None:
        free()


def _keep_gradients(group: Any, reduce: Callable[..., None], *args: Any) -> None:
    """The end of a unit's backward."""
    if not group.reduce_grads or group.gradient_divide_factor is not None:
        reduce(*args)
        return
    group.reduce_grads = False
    reduce(*args)
    group.reduce_grads = True
    for param in group.fsdp_params:
        computed, so_far = getattr(param, "_unsharded_param", None), param.sharded_param.grad
        if computed is None:
            continue
        grad, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad, None
        if grad is None:
            grad, computed.grad = computed.grad, None
        counts_as_zero = getattr(group, "reduce_scatter_unused_params", False)  # since torch 2.13
        if grad is None and so_far is None and counts_as_zero and computed.requires_grad:
            grad = torch.zeros_like(computed)
        if grad is None:
            continue
        # Contiguous as the parameter is: torch's fused optimizers on CPUs read both in the order of their bytes.
        local = param._get_grad_inner_tensor(grad).to(param.orig_dtype).contiguous()
        if so_far is None:
            param.sharded_param.grad = param.to_sharded_dtensor(local)
        else:
            so_far._local_tensor += local


def _init_without_cast(param: Any, init: Callable[[Any], None], policy: Any) -> None:
    init(policy)
    param.param_dtype = None


class _NnWithIntegerParameters:
    """`torch.nn`, whose parameters need no gradient where their type has none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(tensor: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(tensor, requires_grad and (tensor.is_floating_point() or tensor.is_complex()))


def is_one_unit(module: Any, other: Any) -> bool:
    """Whether two modules were sharded together, as one unit of FSDP2."""
    return module._get_fsdp_state() is other._get_fsdp_state()


def gathered_params(module: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors into which FSDP2 gathers a module's parameters; their storages have bytes only while needed."""
    for param in _fsdp_params(module):
        outputs = getattr(param, "all_gather_outputs", ())
        yield from (tensor for tensor in outputs if tensor is not param._sharded_param_data)


def unreduced_grads(module: Any) -> Iterator[torch.Tensor]:
    """Yield the unsharded gradients that FSDP2 keeps while gradient synchronisation is off."""
    for param in _fsdp_params(module):
        grad = getattr(param, "unsharded_accumulated_grad", None)
        if grad is not None:
            yield grad


def reduce_gradients(module: Any) -> None:
    """Reduce the gradients of FSDP2's unit `module` and free its parameters, as the end of its backward does."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        group.post_backward()
        group.finalize_backward()


def before_reduction(module: Any, note: Callable[[list[Any]], None]) -> None:
    """Call `note` each time FSDP2 is about to reduce the gradients of its unit `module`.

    `note`: takes the trained parameters, sharded, that have no gradient to reduce.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    reduce = group.post_backward

    def noted(*unused: Any) -> Any:
        if group.reduce_grads:
            note([param.sharded_param for param in group.fsdp_params if _lacks_gradient(param)])
        return reduce(*unused)

    group.post_backward = noted


def _lacks_gradient(param: Any) -> bool:
    if param.unsharded_accumulated_grad is not None or not param.sharded_param.requires_grad:
        return False
    gathered = getattr(param, "_unsharded_param", None)
    return gathered is None or gathered.grad is None


def was_gathered(module: Any) -> bool:
    """Whether FSDP2's unit `module` has been gathered yet. Before that, its missing gradients cannot count as zero."""
    return all(getattr(param, "_unsharded_param", None) is not None for param in _fsdp_params(module))


def has_gradients(module: Any) -> bool:
    """Whether FSDP2's unit `module` has gradients of gathered parameters that are not reduced yet."""
    params = (getattr(param, "_unsharded_param", None) for param in _fsdp_params(module))
    return any(param is not None and param.grad is not None for param in params)


@contextmanager
def backward_inside_forward(root: Any, units: Sequence[Any]) -> Iterator[list[Any]]:
    """Inside, a backward leaves the state of FSDP2 as it was.

    Otherwise torch would take the end of that backward for the end of the step, and free the root's parameters in the
    middle of forward.

    Yields:
        A list, which at the end holds those of `units` through which the backward went.
    """
    entered: list[Any] = []
    states = [unit._get_fsdp_state() for unit in units]
    parts = [(state, *([state._fsdp_param_group] if state._fsdp_param_group else [])) for state in states]
    before = [[part._training_state for part in group_states] for group_states in parts]
    context = root._get_fsdp_state()._state_ctx
    queued, context.post_backward_final_callback_queued = context.post_backward_final_callback_queued, True
    try:
        yield entered
    finally:
        context.post_backward_final_callback_queued = queued
        for unit, group_states, earlier in zip(units, parts, before, strict=True):
            if [part._training_state for part in group_states] != earlier:
                entered.append(unit)
            for part, state in zip(group_states, earlier, strict=True):
                part._training_state = state


def _fsdp_params(module: Any) -> Sequence[Any]:
    try:
        group = module._get_fsdp_state()._fsdp_param_group
        params: Sequence[Any] = () if group is None else group.fsdp_params
        if params:
            _ = params[0].all_gather_outputs, params[0].unsharded_accumulated_grad
    except AttributeError:
        gone = next((name for name in _fsdp if not name.exists()), None)
        if gone is None:
            raise
        GATHERED.lost(gone)
        return ()
    return params
