from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.errors import LaunchError
from shardkit.launch.ranks.env import RankEnv, detect

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}


def torchrun(rank: int = 5, world: int = 8, per_node: int = 4, **more: str) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node), "GROUP_RANK": str(rank // per_node),
        "GROUP_WORLD_SIZE": str(world // per_node), **MASTER, **more,
    }  # fmt: skip


def srun(rank: int = 3, tasks: int = 4, nodes: int = 2, **more: str) -> dict[str, str]:
    per_node = tasks // nodes
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node), "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node), "SLURM_NODEID": str(rank // per_node), **more,
    }  # fmt: skip


# What sbatch gives its script: it looks like rank 0 of 8, but is no rank.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def mpirun(rank: int = 3, size: int = 4, per_node: int = 2, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % per_node), "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node), **more,
    }  # fmt: skip


def pmi(rank: int = 3, size: int = 4, per_node: int = 2) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank % per_node),
        "MPI_LOCALNRANKS": str(per_node),
    }  # fmt: skip


def deepspeed(rank: int = 5, world: int = 8, per_node: int = 4) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % per_node), "LOCAL_SIZE": str(per_node),
        "CROSS_RANK": str(rank // per_node), "CROSS_SIZE": str(world // per_node), **MASTER,
    }  # fmt: skip


def by_hand(rank: int, world: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), **more}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


ONE = torchrun(rank=1, world=2, per_node=2)
"""A torchrun of two ranks on one node."""
MANUAL = by_hand(1, 2, LOCAL_RANK="1")
ALONE = RankEnv(0, 1, 0, 1, 0, 1, "single")
ON_TWO_NODES = RankEnv(5, 8, 1, 4, 1, 2, "torchelastic", "node1", 29400)
"""Rank 5 of 8 on two nodes."""
BY_HAND = replace(ON_TWO_NODES, source="env")
ON_ONE_NODE = RankEnv(1, 2, 1, 2, 0, 1, "torchelastic", "node1", 29400)
"""Rank 1 of 2 on one node."""
UNDER_SRUN = RankEnv(3, 4, 1, 2, 1, 2, "slurm")
"""Rank 3 of 4 on two nodes."""
UNDER_MPI = replace(UNDER_SRUN, source="mpi")
SHELL = {**BATCH, "SLURM_STEP_ID": "4294967290"}
"""salloc's shell."""
FEWER = {**torchrun(rank=4), "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
NO_COUNTS = without(srun(), "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
AGAIN = torchrun(TORCHELASTIC_RESTART_COUNT="1", SLURM_RESTART_COUNT="2")
ROUND_ROBIN = by_hand(5, 8, LOCAL_RANK="2", LOCAL_WORLD_SIZE="4", **MASTER)
FOUND: dict[str, tuple[dict[str, str], RankEnv]] = {
    "nothing": ({}, ALONE),
    "one process, LOCAL_RANK=0": ({"LOCAL_RANK": "0"}, ALONE),
    "torchrun on two nodes": (torchrun(), ON_TWO_NODES),
    "torchrun after two restarts": (torchrun(TORCHELASTIC_RESTART_COUNT="2"), replace(ON_TWO_NODES, restart_count=2)),
    "torchrun after a restart in a job requeued twice": (AGAIN, replace(ON_TWO_NODES, restart_count=3)),
    "torchrun, a node with fewer ranks": (FEWER, RankEnv(4, 5, 0, 1, 1, 2, "torchelastic", "node1", 29400)),
    "one torchrun per node under srun": ({**torchrun(), **srun(rank=1, tasks=2)}, ON_TWO_NODES),
    "c10d numbers nodes otherwise than Slurm": (
        {**torchrun(rank=1), **srun(rank=1, tasks=2)},
        RankEnv(1, 8, 1, 4, 0, 2, "torchelastic", "node1", 29400),
    ),
    "torchrun in the batch script": ({**ONE, **BATCH}, ON_ONE_NODE),
    "torchrun in srun --pty bash": ({**ONE, **srun(rank=0, tasks=1, nodes=1)}, ON_ONE_NODE),
    "torchrun in salloc's shell": ({**ONE, **SHELL}, ON_ONE_NODE),
    "deepspeed launcher": (deepspeed(), BY_HAND),
    "deepspeed launcher in every srun task": ({**deepspeed(), **srun(rank=1, tasks=2)}, BY_HAND),
    "by hand, one process": (by_hand(0, 1), RankEnv(0, 1, 0, 1, 0, 1, "env")),
    "by hand, one machine": (MANUAL, RankEnv(1, 2, 1, 2, 0, 1, "env")),
    "by hand, loopback": (by_hand(1, 2, **LOOPBACK), RankEnv(1, 2, 1, 2, 0, 1, "env", "127.0.0.1", 29400)),
    "by hand, LOCAL_RANK derived": (by_hand(5, 8, LOCAL_WORLD_SIZE="4", **MASTER), BY_HAND),
    "by hand, round-robin over nodes": (ROUND_ROBIN, RankEnv(5, 8, 2, 4, 1, 2, "env", "node1", 29400)),
    "RANK exported from SLURM_PROCID": (
        {**srun(), **by_hand(3, 4, LOCAL_RANK="1", **MASTER)},
        RankEnv(3, 4, 1, 2, 1, 2, "env", "node1", 29400),
    ),
    "plain srun": (srun(), UNDER_SRUN),
    "plain srun with a master": ({**srun(), **MASTER}, replace(UNDER_SRUN, master_addr="node1", master_port=29400)),
    "plain srun, requeued": (srun(SLURM_RESTART_COUNT="2"), replace(UNDER_SRUN, restart_count=2)),
    "plain srun, uneven nodes": (
        srun(SLURM_STEP_TASKS_PER_NODE="3,1", SLURM_LOCALID="0"),
        RankEnv(3, 4, 0, 1, 1, 2, "slurm"),
    ),
    "plain srun, no counts per node": (NO_COUNTS, UNDER_SRUN),
    "srun of one task": (srun(rank=0, tasks=1, nodes=1), ALONE),
    "the batch script itself": (BATCH, ALONE),
    "the batch script, requeued": ({**BATCH, "SLURM_RESTART_COUNT": "1"}, replace(ALONE, restart_count=1)),
    "salloc's shell": (SHELL, ALONE),
    "one process, the site sets MASTER_PORT": ({"MASTER_PORT": "29400"}, ALONE),
    "mpirun": (mpirun(), UNDER_MPI),
    "mpirun, round-robin": (mpirun(rank=1, OMPI_COMM_WORLD_LOCAL_RANK="0"), RankEnv(1, 4, 0, 2, 1, 2, "mpi")),
    "mpirun -n 1": (mpirun(rank=0, size=1, per_node=1), ALONE),
    "mpirun whose daemons are srun tasks": ({**srun(rank=1, tasks=2), **mpirun()}, UNDER_MPI),
    "srun with PMI": ({**srun(), **pmi()}, UNDER_SRUN),
    "PMI": (pmi(), UNDER_MPI),
}


@pytest.mark.parametrize(("environ", "expected"), FOUND.values(), ids=FOUND.keys())
def test_finds_rank(environ: dict[str, str], expected: RankEnv) -> None:
    assert detect(environ) == expected


NO_PORT = {**MANUAL, "MASTER_ADDR": "n1"}
RANK_2 = {**srun(), **by_hand(2, 4, **MASTER)}
REFUSED: dict[str, tuple[dict[str, str], list[str]]] = {
    "RANK alone": ({"RANK": "0"}, ["RANK='0'", "WORLD_SIZE is not"]),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE='2'", "RANK is not"]),
    "LOCAL_RANK alone": ({"LOCAL_RANK": "1"}, ["LOCAL_RANK='1'"]),
    "rank too large": (by_hand(2, 2, LOCAL_RANK="2"), ["RANK=2", "WORLD_SIZE=2"]),
    "no ranks": (by_hand(0, 0), ["RANK=0", "WORLD_SIZE=0"]),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK='-1'"]),
    "not a number": ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'"]),
    "a line break": ({"RANK": "1\n", "WORLD_SIZE": "2"}, [r"RANK='1\n'"]),
    "underscore": ({"RANK": "1_0", "WORLD_SIZE": "20"}, ["RANK='1_0'"]),
    "a number without end": ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, ["RANK='999", "..."]),
    "nodes unknown": (by_hand(1, 4, **MASTER), ["RANK=1", "WORLD_SIZE=4", "LOCAL_RANK is not set"]),
    "ranks per node unknown": (by_hand(1, 2, LOCAL_RANK="0", **MASTER), ["RANK=1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE"]),
    "ranks per node too many": (by_hand(1, 2, LOCAL_WORLD_SIZE="4"), ["LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"]),
    "local rank too large": (by_hand(1, 4, LOCAL_RANK="2", LOCAL_WORLD_SIZE="2", **MASTER), ["rank 1 of 4", "2 of 2"]),
    "master without port": (NO_PORT, ["MASTER_PORT is not set", "MASTER_ADDR='n1'"]),
    "port without master": ({**MANUAL, "MASTER_PORT": "9"}, ["MASTER_ADDR is not set", "MASTER_PORT='9'"]),
    "port out of range": ({**NO_PORT, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
    "torchelastic half set": (without(torchrun(), "RANK"), ["RANK is not set"]),
    "torchelastic, rank out of range": ({**torchrun(), "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
    "torchelastic, node out of range": ({**torchrun(), "GROUP_RANK": "2"}, ["GROUP_RANK=2", "GROUP_WORLD_SIZE=2"]),
    "four torchruns under srun": ({**ONE, **srun()}, ["SLURM_STEP_NUM_TASKS=4", "GROUP_WORLD_SIZE=1", "RUN_ID='none'"]),
    "separate torchruns under mpirun": ({**ONE, **mpirun()}, ["OMPI_COMM_WORLD_SIZE=4", "GROUP_WORLD_SIZE=1"]),
    "RANK is not SLURM_PROCID": (RANK_2, ["RANK=2", "WORLD_SIZE=4", "SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=4"]),
    "not the number of tasks": ({**srun(rank=0), **by_hand(0, 1)}, ["WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=4"]),
    "LOCAL_RANK is not SLURM_LOCALID": (srun(LOCAL_RANK="0"), ["LOCAL_RANK=0", "SLURM_LOCALID=1"]),
    "only RANK agrees": ({**srun(), **by_hand(3, 4, LOCAL_RANK="0")}, ["LOCAL_RANK=0", "SLURM_LOCALID=1"]),
    "RANK is not MPI's": ({**mpirun(), **by_hand(2, 4)}, ["RANK=2", "OMPI_COMM_WORLD_RANK=3"]),
    "mpirun in every srun task": ({**srun(), **mpirun(rank=1, size=2)}, ["SLURM_PROCID=3", "OMPI_COMM_WORLD_RANK=1"]),
    "srun half set": (without(srun(), "SLURM_LOCALID"), ["SLURM_LOCALID is not set"]),
    "srun, rank out of range": (srun(SLURM_PROCID="4"), ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"]),
    "srun, node out of range": (srun(SLURM_NODEID="2"), ["SLURM_NODEID=2", "SLURM_STEP_NUM_NODES=2"]),
    "srun, counts that do not add up": (srun(SLURM_STEP_TASKS_PER_NODE="3(x2)"), ["'3(x2)'", "4 tasks on 2 nodes"]),
    "srun, counts without end": (srun(SLURM_STEP_TASKS_PER_NODE="1(x999999999)"), ["SLURM_STEP_TASKS_PER_NODE"]),
    "mpirun half set": (without(mpirun(), "OMPI_COMM_WORLD_LOCAL_RANK"), ["OMPI_COMM_WORLD_LOCAL_RANK is not set"]),
    "mpirun, uneven nodes": (mpirun(rank=2, size=3), ["rank 2 of 3", "OMPI_COMM_WORLD_LOCAL_SIZE"]),
}
"""Environment → words that the cause must hold: both sources and both values where two disagree."""


@pytest.mark.parametrize(("environ", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    missing = [word for word in words if word not in caught.value.cause]
    assert not missing, f"{caught.value.cause!r} does not say {missing}"
    assert_one_line_each(caught.value)


def assert_one_line_each(error: LaunchError) -> None:
    for text in (error.cause, error.fix):
        assert text.isprintable(), "one line each"
        assert text
        assert len(text) < 400


@pytest.mark.parametrize("world", [1, 2, 6])
@pytest.mark.parametrize("launcher", [torchrun, srun, mpirun, pmi, deepspeed])
def test_every_rank_of_a_job_fits_together(launcher: Any, world: int) -> None:
    per_node = 1 if world == 1 else 2
    shape = {"nodes": world // per_node} if launcher is srun else {"per_node": per_node}
    ranks = [detect(launcher(rank, world, **shape)) for rank in range(world)]
    assert [env.rank for env in ranks] == list(range(world))
    assert {(env.world_size, env.local_world_size, env.n_nodes) for env in ranks} == {
        (world, per_node, world // per_node)
    }
    assert len({(env.node_rank, env.local_rank) for env in ranks}) == world


NAMES = sorted(
    {name for environ, _ in FOUND.values() for name in environ}
    | {"SLURM_NNODES", "SLURM_TASKS_PER_NODE", "OMP_NUM_THREADS"}
)
VALUES = st.one_of(
    st.integers(-1, 9).map(str),
    st.sampled_from(["2(x2)", "1,3", "localhost", "node1", "4294967290", ""]),
    st.text(max_size=5),
)
COMPLETE = st.sampled_from([environ for environ, _ in (*FOUND.values(), *REFUSED.values())])


@settings(max_examples=400, deadline=None)
@given(
    COMPLETE, st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), st.sets(st.sampled_from(NAMES), max_size=3)
)
@example({}, {"LOCAL_RANK": "\x00"}, set())
def test_always_a_valid_rank_or_a_launch_error(base: dict[str, str], more: dict[str, str], dropped: set[str]) -> None:
    environ = without({**base, **more}, *dropped)
    try:
        env = detect(environ)
    except LaunchError as error:
        assert_one_line_each(error)
        return
    assert 0 <= env.rank < env.world_size
    assert 0 <= env.local_rank < env.local_world_size <= env.world_size
    assert 0 <= env.node_rank < env.n_nodes <= env.world_size
    assert (env.master_addr is None) == (env.master_port is None)
    assert env.restart_count >= 0
