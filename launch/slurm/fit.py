"""Whether a config works on the nodes, ranks and GPUs that were asked for; said before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from ...config.schema import RunConfig


def check(config: RunConfig, nodes: int, ranks_per_node: int, gpus_per_node: int) -> None:
    """Refuse what the ranks would refuse.

    Raises:
        ConfigError: the strategy, its mesh or the batch does not fit the ranks, or there is no GPU for run.device=cuda.
        LaunchError: no ranks, or more on a node than GPUs.
    """
    from ...config import capability
    from ...config.load import resolve_batch

    wanted, world_size = config.run.device, nodes * ranks_per_node
    if nodes < 1 or ranks_per_node < 1:
        raise LaunchError(f"--nodes {nodes} with {ranks_per_node} rank(s) per node", "ask for at least one of each")
    if wanted == "cuda" and not gpus_per_node:
        raise ConfigError("run.device=cuda, but the job asks for no GPU", "pass --gpus-per-node N, or run.device=cpu")
    if wanted != "cpu" and 0 < gpus_per_node < ranks_per_node:
        raise LaunchError(
            f"{ranks_per_node} ranks on each node, but {gpus_per_node} GPU(s)",
            f"ask for {ranks_per_node} GPUs or {gpus_per_node} ranks per node, or set run.device=cpu",
        )
    device = "cuda" if gpus_per_node and wanted != "cpu" else "cpu"
    capability.check(config, device=device, world_size=world_size, local_world_size=ranks_per_node)
    resolve_batch(config, world_size)
