"""Which ranks share what, on every axis; each rank is pretended, in groups that exchange nothing."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardkit.config.load import load_config
from shardkit.launch.ranks.env import RankEnv
from shardkit.parallel.mesh import data_mesh, split_ranks
from shardkit.plan.simulate.compat import FakeStore

HSDP = "parallel.strategy=hsdp parallel.dp_replicate=2"
GROUPS: dict[str, dict[str, list[list[int]]]] = {
    "parallel.tp=2 parallel.cp=2 parallel.ep=4": {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "efsdp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "dp_shard": [[0, 2, 4, 6], [1, 3, 5, 7]],
    },
    f"{HSDP} parallel.tp=2 parallel.ep=2": {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "ep": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "efsdp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "dp_shard": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "dp_replicate": [[0, 4], [1, 5], [2, 6], [3, 7]],
    },
    "parallel.cp=4": {"cp": [[0, 1, 2, 3], [4, 5, 6, 7]], "dp_shard": [[*range(8)]]},
    HSDP: {"dp_shard": [[0, 1, 2, 3], [4, 5, 6, 7]], "dp_replicate": [[0, 4], [1, 5], [2, 6], [3, 7]]},
}  # fmt: skip


@pytest.mark.parametrize("settings", GROUPS)
def test_the_ranks_of_a_group_are_those_that_the_order_of_axes_says(settings: str) -> None:
    config = load_config(None, ["parallel.strategy=fsdp", *settings.split()]).config
    groups: dict[str, set[tuple[int, ...]]] = {}
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            env = RankEnv(rank, 8, rank, 8, 0, 1, "group")
            context, mesh, experts = split_ranks(config, "cpu", env)
            meshes = [data_mesh(config, "cpu", env, mesh), mesh, experts and experts.mesh]
            members = {} if context is None else {"cp": dist.get_process_group_ranks(context.group)}
            for one in meshes:
                for name in (one.mesh_dim_names or ()) if one is not None else ():
                    assert one is not None
                    members.setdefault(name.rstrip("0123456789"), dist.get_process_group_ranks(one.get_group(name)))
        finally:
            dist.destroy_process_group()
        for name, ranks in members.items():
            assert rank in ranks
            groups.setdefault(name, set()).add(tuple(ranks))
    expected = {name: {tuple(ranks) for ranks in parts} for name, parts in GROUPS[settings].items()}
    assert groups.items() >= expected.items()
