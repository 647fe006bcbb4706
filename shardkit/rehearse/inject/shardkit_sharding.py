"""Lets DTensor look once, and not once for each tensor of a list, whether an operator's tensors are sharded in strides.

torch 2.13 asks that of the whole list for each of its members. In the first update of a model of 8 billion parameters
it is half of what working out the optimizer's shardings costs, and it grows with the square of the number of tensors.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def look_once() -> None:
    """Wrap torch's function, if the program has imported DTensor and this release of torch has the function."""
    propagation: Any = sys.modules.get("torch.distributed.tensor._sharding_prop")
    strided = getattr(propagation, "_StridedShard", None)
    propagate = getattr(propagation, "_propagate_use_strided_shard_flag", None)
    if strided is None or propagate is None or hasattr(propagate, "__wrapped__"):
        return
    last: tuple[Any, bool] = (None, False)

    @functools.wraps(propagate)
    def propagate_if_strided(op_strategy: Any, op_schema: Any) -> None:
        nonlocal last
        schema, has_strides = last  # of any thread: read and written at once
        if schema is not op_schema:
            has_strides = any(isinstance(shard, strided) for spec in op_schema.args_spec for shard in spec.placements)
            last = (op_schema, has_strides)
        if has_strides:
            propagate(op_strategy, op_schema)

    propagation._propagate_use_strided_shard_flag = propagate_if_strided
