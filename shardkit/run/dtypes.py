"""The dtypes of the state: the optimizer's weights are checked, and each rank's bytes by dtype are written down."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from ..config.schema import PrecisionConfig
from ..errors import ConfigError, gib
from ..memory.rows import KINDS
from ..memory.state import local_tensors
from ..parallel.precision import master_dtype
from ..parallel.world import World
from ..strategies import Strategy

_LOG = logging.getLogger(__name__)
Bytes = dict[str, dict[str, int]]
"""category → dtype → bytes on one rank."""


def check_masters(config: PrecisionConfig, strategy: Strategy) -> None:
    """Check that the optimizer updates weights in the dtype of the precision mode.

    Raises:
        ConfigError: the model was built in another dtype.
    """
    masters = [tensor for kind, tensor in strategy.state_tensors() if kind == "master_params"]
    if not masters:
        masters = [param for group in strategy.optimizer.param_groups for param in group["params"]]
    expected = master_dtype(config)
    wrong = [t for t in masters if t.is_floating_point() and t.dtype != expected]
    if wrong:
        size = sum(t.numel() * t.element_size() for t in wrong)
        raise ConfigError(
            f"precision.mode={config.mode} updates {_name(expected)} weights, but {gib(size)} of the model's trainable "
            f"parameters are {_name(wrong[0].dtype)}",
            "build the model in fp32" + (", or set precision.mode=pure_bf16" if expected == torch.float32 else ""),
        )


def count_dtypes(strategy: Strategy) -> Bytes:
    """This rank's bytes of each category of state by dtype; a storage counts once, whole."""
    n_bytes: Bytes = {}
    seen: set[int] = set()
    for kind in KINDS:
        for of, tensor in strategy.state_tensors():
            if of != kind:
                continue
            for local in local_tensors(tensor):
                storage = local.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    types = n_bytes.setdefault(kind, {})
                    types[_name(local.dtype)] = types.get(_name(local.dtype), 0) + storage.nbytes()
    return n_bytes


def audit(strategy: Strategy, world: World, run_dir: Path) -> None:
    """Write every rank's `count_dtypes` to `logs/dtypes.json` and show rank 0's in one line; collective."""
    ranks = world.gather(count_dtypes(strategy))
    if world.is_main:
        try:
            (run_dir / "logs" / "dtypes.json").write_text(json.dumps(ranks, indent=1) + "\n")
        except OSError as error:
            _LOG.warning("cannot write %s: %s", run_dir / "logs" / "dtypes.json", error.strerror)
        print(f"types on rank 0: {describe(ranks[0])}", flush=True)  # type: ignore[arg-type]


def describe(n_bytes: Bytes) -> str:
    """One line: `params float32 1.3 MiB, optimizer float32 2.6 MiB`."""
    return ", ".join(f"{kind} {name} {gib(size)}" for kind, types in n_bytes.items() for name, size in types.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
