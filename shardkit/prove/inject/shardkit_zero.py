"""What a rank holds under DeepSpeed's ZeRO, for the recorder of a proof: fragments of weights and gradients.

The functions of DeepSpeed that name full tensors are collective, one parameter after the other, which costs more than a
small step. Each rank's own fragment, with its place in the full tensor, takes none.
"""

from __future__ import annotations

from typing import Any

from shardkit_pieces import Fragment  # type: ignore[import-not-found]


def is_engine(module: Any) -> bool:
    return any(base.__name__ == "DeepSpeedEngine" for base in type(module).__mro__)


def is_sharded(parameter: Any) -> bool:
    """Whether ZeRO, or its optimizer for bf16, holds the parameter's numbers."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def shape_of(parameter: Any) -> tuple[int, ...]:
    """The full shape: ZeRO-3 leaves an empty tensor where the parameter was."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def weight(parameter: Any) -> Any:
    """A parameter or its fragment, in fp32 where the engine keeps it so."""
    if not is_sharded(parameter):
        return parameter
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_fp32_param

        if parameter.requires_grad and (local := safe_get_local_fp32_param(parameter)) is not None:
            return _partition(parameter, local)
        if parameter.ds_tensor.status.name == "AVAILABLE":
            return _partition(parameter, parameter.ds_tensor)
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):  # the frozen part lies on NVMe
            return parameter.detach().clone()
    mapping = parameter._hp_mapping
    if not parameter.requires_grad:
        return parameter
    numbers = parameter.new_empty(0) if mapping is None else mapping.get_hp_fragment()
    return _fragment(parameter, numbers)


def gradient(parameter: Any) -> Any:
    """A parameter's gradient or this rank's fragment of it, after a backward and before the engine's step."""
    # The optimizer for bf16 fills a buffer of its own, and leaves `.grad`.
    if not is_sharded(parameter) or (parameter.grad is not None and getattr(parameter, "_hp_grad", None) is None):
        return parameter.grad
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_grad

        return _partition(parameter, safe_get_local_grad(parameter))
    mapping = parameter._hp_mapping
    if mapping is None:
        return _fragment(parameter, parameter.new_empty(0))
    numbers = mapping.get_lp_grad_fragment(parameter._index_in_param_group).reshape(-1)
    if numbers.numel() == parameter.numel():  # the optimizer for bf16 keeps all of it on each rank
        address = mapping.lp_fragment_address
        numbers = numbers.narrow(0, address.start, address.numel)
    return _fragment(parameter, numbers)


def set_weight(parameter: Any, tensor: Any) -> None:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(tensor)
    if parameter.requires_grad and is_sharded(parameter):
        deepspeed.utils.safe_set_full_fp32_param(parameter, tensor.float())


def _fragment(parameter: Any, numbers: Any) -> Fragment:
    """Of ZeRO-1 and 2: flat partitions of all parameters, in which one may begin and end anywhere."""
    start = 0 if parameter._hp_mapping is None else int(parameter._hp_mapping.lp_fragment_address.start)
    return Fragment(numbers.reshape(-1).float(), start, tuple(parameter.shape))


def _partition(parameter: Any, numbers: Any) -> Fragment:
    """Of ZeRO-3: equal partitions of each parameter; the last ones are padded."""
    from deepspeed import comm

    start = comm.get_rank(group=parameter.ds_process_group) * int(parameter.ds_tensor.ds_numel)
    length = max(0, min(numbers.numel(), int(parameter.ds_numel) - start))
    return Fragment(numbers.reshape(-1)[:length].float(), start, tuple(parameter.ds_shape))
