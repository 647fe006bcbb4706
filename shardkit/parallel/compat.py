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

_products = [KEEP_RESULTS.use("torch.ops.aten._scaled_mm")]
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
