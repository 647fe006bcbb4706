"""Which ranks hold what: the meshes and groups of a job, on every axis.

A rank's number counts along tp first, then cp, dp_shard and dp_replicate, so that ranks that exchange most are
neighbours. Eight ranks under fsdp with tp 2, cp 2 and ep 4:

    rank      0  1  2  3  4  5  6  7    holds
    dp_shard  0  0  0  0  1  1  1  1    samples
    cp        0  0  1  1  0  0  1  1    every second position of these
    tp        0  1  0  1  0  1  0  1    half of each layer's columns or rows
    ep        0  1  2  3  0  1  2  3    a quarter of each layer's experts

FSDP2 shards what is no expert over dp_shard and cp, which are one dimension of its mesh: these four ranks have the same
tp. Experts lie in a mesh of their own, whose last dimension is ep and counts through all ranks, tp's first; FSDP2
shards them over the ranks that have the same ones (efsdp).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.capability import mesh_shape
from ..config.schema import RunConfig
from ..launch.ranks.env import RankEnv
from .context import ContextParallel

if TYPE_CHECKING:
    from .experts import ExpertParallel

_jobs = itertools.count()


def split_ranks(
    config: RunConfig, device_type: str, env: RankEnv
) -> tuple[ContextParallel | None, DeviceMesh | None, ExpertParallel | None]:
    """The ranks that share sequences with this one, the mesh (dp_replicate, dp_shard, tp) where ranks share layers, and
    the ranks that share experts; collective."""
    parallel, context, mesh, experts = config.parallel, None, None, None
    replicate, shard = mesh_shape(config, env.world_size, env.local_world_size)
    # DTensor takes meshes of equal sizes and names for one, whose groups an earlier job of this process may have
    # destroyed: another job has other names.
    job = next(_jobs) or ""
    if parallel.tp > 1:
        names = tuple(f"{name}{job}" for name in ("dp_replicate", "dp_shard", "tp"))
        mesh = init_device_mesh(device_type, (replicate, shard, parallel.tp), mesh_dim_names=names)
    if parallel.cp > 1:
        context = new_group(env.rank, env.world_size, parallel.cp, parallel.tp)
    if parallel.ep > 1:
        from .experts import ExpertParallel  # DTensor takes 0.4 s to import

        names = tuple(f"{name}{job}" for name in ("dp_replicate", "efsdp", "ep"))
        sizes, outer = (replicate, shard * parallel.tp // parallel.ep, parallel.ep), 0 if replicate > 1 else 1
        expert_mesh = init_device_mesh(device_type, sizes[outer:], mesh_dim_names=names[outer:])
        experts = ExpertParallel(expert_mesh, parallel.ep_imbalance, None if mesh is None else dimensions(mesh, 2))
    return context, mesh, experts


def new_group(rank: int, world_size: int, size: int, tp: int = 1) -> ContextParallel:
    """This rank's group, of `size` ranks that are `tp` apart: neighbours, unless these share layers; collective."""
    span = size * tp
    groups = [list(range(start + part, start + span, tp)) for start in range(0, world_size, span) for part in range(tp)]
    group, _ = dist.new_subgroups_by_enumeration(groups, group_desc="cp")  # type: ignore[no-untyped-call]
    assert group is not None
    return ContextParallel(rank // tp % size, size, group)


def data_mesh(config: RunConfig, device_type: str, env: RankEnv, mesh: DeviceMesh | None) -> DeviceMesh:
    """The ranks over which FSDP2 shards: one dimension for fsdp, two (replicas × shards) for hsdp. `mesh`: of ranks
    that share layers."""
    is_hsdp = config.parallel.strategy == "hsdp"  # the one difference from fsdp
    if mesh is not None:
        return dimensions(mesh, *([0, 1] if is_hsdp else [1]))
    if is_hsdp:
        shape = mesh_shape(config, env.world_size, env.local_world_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(device_type, (env.world_size,), mesh_dim_names=("dp_shard",))


def dimensions(mesh: DeviceMesh, *numbers: int) -> DeviceMesh:
    """The part of a mesh that has these of its dimensions."""
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[tuple(names[number] for number in numbers)]
