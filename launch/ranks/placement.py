"""This process's placement by a task launcher (Slurm's srun, Open MPI, a PMI launcher), read from its variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...errors import LaunchError

# Slurm numbers the batch script, salloc's interactive shell and its own helpers down from the top of the range.
_FIRST_RESERVED_STEP = 0xFFFF_FFF0
_TASKS_PER_NODE = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_MAX_NODES = 1_000_000


@dataclass(frozen=True)
class Placement:
    """A rank and its numbers from a task launcher.

    Attributes:
        rank_var: the variable of the rank, for messages.
        size_var: the variable of the number of ranks.
    """

    launcher: Literal["slurm", "mpi"]
    rank_var: str
    size_var: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    n_nodes: int

    def __str__(self) -> str:
        return f"{self.rank_var}={self.rank}, {self.size_var}={self.size}"


def integer(environ: Mapping[str, str], name: str) -> int:
    """The non-negative integer in variable `name`.

    Raises:
        LaunchError: the variable is not set, or holds anything else.
    """
    value = environ.get(name)
    if value is None:
        raise LaunchError(f"{name} is not set", "set every rank variable, or none and let a launcher do it")
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise LaunchError(f"{name}={shown(value)} is not a non-negative integer", f"correct or unset {name}")
    return int(value)


def shown(value: str) -> str:
    """A variable's value as one short line."""
    return repr(value if len(value) <= 60 else value[:57] + "...")


def first_set(environ: Mapping[str, str], *names: str) -> str | None:
    """The first of `names` that is set; None if none is."""
    return next((name for name in names if name in environ), None)


def node_of(rank: int, size: int, local_rank: int, local_size: int, names: str) -> tuple[int, int]:
    """(node_rank, n_nodes), for launchers that number ranks but not nodes.

    Assumes the same number of ranks on each node, numbered node after node or round-robin over nodes.

    Raises:
        LaunchError: the numbers fit neither; the message names their variables (`names`).
    """
    n_nodes, remainder = divmod(size, local_size)
    if not remainder:
        if rank % local_size == local_rank:
            return rank // local_size, n_nodes
        if rank // n_nodes == local_rank:
            return rank % n_nodes, n_nodes
    raise LaunchError(
        f"cannot tell nodes apart: rank {rank} of {size} is number {local_rank} of {local_size} on its node ({names})",
        "start the same number of ranks on every node, numbered node after node, or use torchrun",
    )


def slurm_step(environ: Mapping[str, str]) -> Placement | None:
    """This process as a task of an srun step with several tasks; None anywhere else.

    A batch script and salloc's shell also see SLURM_PROCID=0 and SLURM_NTASKS=N, but they are not ranks.

    Raises:
        LaunchError: the step's variables are incomplete or not integers.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if not re.fullmatch(r"[0-9]{1,10}", step) or int(step) >= _FIRST_RESERVED_STEP:
        return None
    size_var = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size_var is None or (size := integer(environ, size_var)) <= 1:
        return None
    rank = integer(environ, "SLURM_PROCID")
    node_rank = integer(environ, "SLURM_NODEID")
    nodes_var = first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or "SLURM_STEP_NUM_NODES"
    n_nodes = integer(environ, nodes_var)
    if node_rank >= n_nodes:
        raise LaunchError(f"SLURM_NODEID={node_rank}, but {nodes_var}={n_nodes}", "unset them, or start through srun")
    return Placement(
        launcher="slurm",
        rank_var="SLURM_PROCID",
        size_var=size_var,
        rank=rank,
        size=size,
        local_rank=integer(environ, "SLURM_LOCALID"),
        local_size=_tasks_on_node(environ, node_rank, n_nodes, size),
        node_rank=node_rank,
        n_nodes=n_nodes,
    )


def _tasks_on_node(environ: Mapping[str, str], node_rank: int, n_nodes: int, size: int) -> int:
    """Entry `node_rank` of a list such as `2(x3),1`, four nodes with 2, 2, 2 and 1 tasks."""
    name = first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None:
        if size % n_nodes:
            raise LaunchError(
                f"{size} tasks on {n_nodes} nodes, and SLURM_STEP_TASKS_PER_NODE is not set",
                "start through srun, which sets it",
            )
        return size // n_nodes
    counts: list[int] = []
    for entry in environ[name].split(","):
        match = _TASKS_PER_NODE.fullmatch(entry)
        repeat = int(match[2] or 1) if match else 0
        if match is None or len(counts) + repeat > _MAX_NODES:
            raise LaunchError(f"{name}={shown(environ[name])} is not a list of tasks per node", f"unset {name}")
        counts += [int(match[1])] * repeat
    if len(counts) != n_nodes or sum(counts) != size:
        raise LaunchError(
            f"{name}={shown(environ[name])}, but the step has {size} tasks on {n_nodes} nodes",
            f"unset {name}, or start through srun",
        )
    return counts[node_rank]


def mpi_task(environ: Mapping[str, str]) -> Placement | None:
    """This process as one of several from mpirun or mpiexec; None anywhere else.

    Raises:
        LaunchError: the variables are incomplete or not integers, or nodes cannot be told apart.
    """
    families = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    )
    for rank_var, size_var, local_rank_var, local_size_var in families:
        if rank_var not in environ and size_var not in environ:
            continue
        rank, size = integer(environ, rank_var), integer(environ, size_var)
        if size <= 1:
            return None
        local_rank, local_size = integer(environ, local_rank_var), integer(environ, local_size_var)
        if local_size < 1:
            raise LaunchError(f"{local_size_var}=0", f"unset the {rank_var.split('_')[0]} variables, or use torchrun")
        names = f"{rank_var}, {size_var}, {local_rank_var}, {local_size_var}"
        node_rank, n_nodes = node_of(rank, size, local_rank, local_size, names)
        return Placement("mpi", rank_var, size_var, rank, size, local_rank, local_size, node_rank, n_nodes)
    return None


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """A name that all ranks of this start share, and that differs from other starts' as far as the launcher tells."""
    slurm = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
    mpi = first_set(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
    parts = [environ.get(name, "0") for name in slurm] + ([environ[mpi]] if mpi else [])
    return re.sub(r"[^0-9A-Za-z.-]", "_", ".".join(parts))
