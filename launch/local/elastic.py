"""Jobs whose nodes come and go (`--nnodes MIN:MAX`): what they need, and what their ranks have to be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import ConfigError, LaunchError
from ..job import JobSpec

if TYPE_CHECKING:
    from ...config.schema import RunConfig

VARIABLE = "SHARDKIT_ELASTIC"


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this rank's job may lose and gain nodes."""
    return bool(environ.get(VARIABLE))


def check(spec: JobSpec, config: RunConfig) -> None:
    """Refuse before it starts what would go wrong when the number of nodes changes.

    Raises:
        LaunchError: no restarts, or a run that each start would delete.
        ConfigError: a batch or mesh that does not fit some number of nodes.
    """
    if not spec.is_elastic:
        return
    from ...config import capability
    from ...config.load import resolve_batch

    nodes = f"--nnodes {spec.nodes[0]}:{spec.nodes[1]}"
    if spec.max_restarts < 1:
        raise LaunchError(
            f"{nodes} with --max-restarts {spec.max_restarts}: a lost node would end the job", "pass --max-restarts 3"
        )
    if config.run.overwrite:
        raise LaunchError(
            f"{nodes} with run.overwrite=true would delete the run whenever a node joins",
            "delete run.dir yourself, or set another one: an elastic job goes on with the run that is there",
        )
    if config.train.global_batch_size is None:
        most = spec.nodes[1] * spec.nproc_per_node
        batch = config.train.micro_batch_size * (config.train.grad_accum_steps or 1) * most
        raise ConfigError(
            f"{nodes}: the samples per step would change with the nodes, train.global_batch_size is not set",
            f"set train.global_batch_size={batch} ({most} ranks' share now), and leave train.grad_accum_steps unset",
        )
    for count in range(spec.nodes[0], spec.nodes[1] + 1):
        world_size = count * spec.nproc_per_node
        try:
            resolve_batch(config, world_size)
            capability.check(
                config,
                device="cuda" if spec.on_gpus else "cpu",
                world_size=world_size,
                local_world_size=spec.nproc_per_node,
            )
        except ConfigError as error:
            raise ConfigError(f"with {count} node(s) of {nodes}: {error.cause}", error.fix) from error


def variables(spec: JobSpec) -> dict[str, str]:
    """What torchrun and its ranks have to know where nodes meet through c10d and workers may restart.

    torchrun by default shares its own store with the ranks. A node that joins later never learns its address, and keys
    of earlier rounds stay in it (https://github.com/pytorch/pytorch/issues/135712, still so in torch 2.13): there, the
    first rank makes a new store in each round.
    """
    if spec.nodes[1] == 1 or spec.max_restarts == 0:
        return {}
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **({VARIABLE: "1"} if spec.is_elastic else {})}
