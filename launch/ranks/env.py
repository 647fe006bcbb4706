"""This process's rank, from whichever launcher started it, and this node's GPUs; without torch.

Checked in this order: torchrun (torchelastic), RANK and WORLD_SIZE (accelerate, deepspeed, by hand), a task of an srun
step, Open MPI or a PMI launcher, a pod of a Kubernetes job, a single process. Incomplete variables, and variables of
two launchers that differ, are errors: a job that guesses would train several models at once, or wait for ranks forever.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...errors import LaunchError

# Slurm numbers the batch script, salloc's interactive shell and its own helpers down from the top of the range.
_FIRST_RESERVED_STEP = 0xFFFF_FFF0
_TASKS_PER_NODE = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_MAX_NODES = 1_000_000


@dataclass(frozen=True)
class Placement:
    """A rank and its numbers from a task launcher."""

    launcher: Literal["slurm", "mpi"]
    rank_var: str  # the variable of the rank, for messages
    size_var: str  # the variable of the number of ranks
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    n_nodes: int

    def __str__(self) -> str:
        return f"{self.rank_var}={self.rank}, {self.size_var}={self.size}"


def integer(environ: Mapping[str, str], name: str) -> int:
    """The non-negative integer in variable `name`."""
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
    """(node_rank, n_nodes), for launchers that number ranks but not nodes. Assumes the same number of ranks on each
    node, numbered node after node or round-robin over nodes."""
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
    """This process as a task of an srun step with several tasks; None anywhere else. A batch script and salloc's shell
    also see SLURM_PROCID=0 and SLURM_NTASKS=N, but they are not ranks."""
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
    local_rank, local_size = integer(environ, "SLURM_LOCALID"), _tasks_on_node(environ, node_rank, n_nodes, size)
    return Placement("slurm", "SLURM_PROCID", size_var, rank, size, local_rank, local_size, node_rank, n_nodes)


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
    """This process as one of several from mpirun or mpiexec; None anywhere else."""
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


Source = Literal["torchelastic", "env", "slurm", "mpi", "kubernetes", "single", "group"]


@dataclass(frozen=True)
class RankEnv:
    """This process's place among the job's ranks."""

    rank: int  # 0 ≤ rank < world_size
    world_size: int
    local_rank: int  # position among the local_world_size ranks of this node
    local_world_size: int
    node_rank: int  # position of this node among n_nodes
    n_nodes: int
    source: Source  # the launcher that set the rank; `group` if the caller had already made a process group
    # host of rank 0; None = ranks meet through a file in the run directory (plain srun, MPI)
    master_addr: str | None = None
    master_port: int | None = None  # set if and only if master_addr is
    restart_count: int = 0  # earlier starts of these ranks: torchrun's restarts plus Slurm's requeues


SINGLE = RankEnv(0, 1, 0, 1, 0, 1, "single")


def detect(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """This process's place in the job; `environ` defaults to os.environ."""
    task = _task(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_torchelastic(environ, task)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_rank_variables(environ, task)
    if task is not None:
        return _from_task(environ, task, task.launcher)
    pod = _from_pod(environ)
    if pod is not None:
        return pod
    if environ.get("LOCAL_RANK", "0") != "0":
        raise LaunchError(
            f"LOCAL_RANK={shown(environ['LOCAL_RANK'])} is set, but neither RANK nor WORLD_SIZE is",
            "unset LOCAL_RANK for a single process, or start through torchrun",
        )
    return replace(SINGLE, restart_count=_count(environ, "SLURM_RESTART_COUNT"))


def _task(environ: Mapping[str, str]) -> Placement | None:
    """The task launcher's placement; if srun's and MPI's differ, mpirun's daemons may be the step's tasks."""
    slurm, mpi = slurm_step(environ), mpi_task(environ)
    for placement in (slurm, mpi):
        if placement is not None:
            _check_range(placement.rank, placement.size, placement.rank_var, placement.size_var)
            local_size_name = f"{placement.launcher}'s ranks on this node"
            _check_range(placement.local_rank, placement.local_size, "the local rank", local_size_name)
            _check_range(placement.local_size - 1, placement.size, "the last local rank", placement.size_var)
    if slurm is None or mpi is None:
        return slurm or mpi
    if (slurm.rank, slurm.size) == (mpi.rank, mpi.size):
        return slurm
    if mpi.size > slurm.size:  # mpirun started its daemons with srun, one task per node
        return mpi
    raise LaunchError(
        f"srun and MPI disagree: {slurm}, but {mpi}",
        "run mpirun once from the batch script, or start every rank with srun; not mpirun in every srun task",
    )


def _from_torchelastic(environ: Mapping[str, str], task: Placement | None) -> RankEnv:
    n_nodes = integer(environ, "GROUP_WORLD_SIZE")
    if task is not None and n_nodes < task.size:
        raise LaunchError(
            f"{task.size} separate torchrun jobs: {task.size_var}={task.size}, "
            f"but torchrun's GROUP_WORLD_SIZE={n_nodes} (TORCHELASTIC_RUN_ID={shown(environ['TORCHELASTIC_RUN_ID'])})",
            "start one torchrun per node (srun --ntasks-per-node=1) with --nnodes, or srun one task per rank",
        )
    rank_env = RankEnv(
        rank=integer(environ, "RANK"),
        world_size=integer(environ, "WORLD_SIZE"),
        local_rank=integer(environ, "LOCAL_RANK"),
        local_world_size=integer(environ, "LOCAL_WORLD_SIZE"),
        node_rank=integer(environ, "GROUP_RANK"),
        n_nodes=n_nodes,
        source="torchelastic",
        master_addr=_required_address(environ),
        master_port=_port(environ),
        restart_count=_count(environ, "TORCHELASTIC_RESTART_COUNT") + _count(environ, "SLURM_RESTART_COUNT"),
    )
    return _checked(rank_env, "GROUP_RANK", "GROUP_WORLD_SIZE")


def _from_rank_variables(environ: Mapping[str, str], task: Placement | None) -> RankEnv:
    for name, counterpart in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environ:
            raise LaunchError(
                f"{counterpart}={shown(environ[counterpart])} is set, but {name} is not",
                f"set both, or unset {counterpart} and start through torchrun or srun",
            )
    rank, world_size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    _check_range(rank, world_size, "RANK", "WORLD_SIZE")
    agrees = task is not None and (rank, world_size) == (task.rank, task.size)
    # deepspeed's launcher runs once in each task, for the ranks of a node, and sets CROSS_SIZE to the number of nodes.
    is_per_task = task is not None and "CROSS_SIZE" in environ and integer(environ, "CROSS_SIZE") >= task.size
    if task is not None and not agrees and not is_per_task:
        raise LaunchError(
            f"RANK={rank}, WORLD_SIZE={world_size}, but {task}",
            f"unset RANK and WORLD_SIZE to use {task.rank_var}, or start through torchrun",
        )
    if task is not None and agrees:
        return _from_task(environ, task, "env")
    local_rank, local_size = _local(environ, rank, world_size)
    if "CROSS_RANK" in environ and "CROSS_SIZE" in environ:  # from deepspeed's launcher
        node_rank, n_nodes = integer(environ, "CROSS_RANK"), integer(environ, "CROSS_SIZE")
    else:
        names = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"
        node_rank, n_nodes = node_of(rank, world_size, local_rank, local_size, names)
    places = rank, world_size, local_rank, local_size, node_rank, n_nodes
    master_addr, master_port = _master(environ, world_size)
    rank_env = RankEnv(*places, "env", master_addr, master_port, _count(environ, "SLURM_RESTART_COUNT"))
    return _checked(rank_env, "CROSS_RANK", "CROSS_SIZE")


def _from_task(environ: Mapping[str, str], task: Placement, source: Source) -> RankEnv:
    if "LOCAL_RANK" in environ and integer(environ, "LOCAL_RANK") != task.local_rank:
        name = "SLURM_LOCALID" if task.launcher == "slurm" else "MPI's local rank"
        raise LaunchError(
            f"LOCAL_RANK={environ['LOCAL_RANK']}, but {name}={task.local_rank}",
            f"unset LOCAL_RANK to use {name}",
        )
    places = task.rank, task.size, task.local_rank, task.local_size, task.node_rank, task.n_nodes
    master_addr, master_port = _master(environ, task.size)
    rank_env = RankEnv(*places, source, master_addr, master_port, _count(environ, "SLURM_RESTART_COUNT"))
    return _checked(rank_env, "CROSS_RANK", "CROSS_SIZE")


def _from_pod(environ: Mapping[str, str]) -> RankEnv | None:
    """The one rank of a pod, from the variables of Kubeflow's torch runtime; None for a single process."""
    if not environ.get("PET_NNODES") or not environ.get("PET_MASTER_ADDR"):
        return None
    n_nodes, ranks_per_node = integer(environ, "PET_NNODES"), environ.get("PET_NPROC_PER_NODE") or "1"
    if n_nodes == 1 and not (ranks_per_node.isdigit() and int(ranks_per_node) > 1):
        return None
    rank_var = "PET_NODE_RANK" if "PET_NODE_RANK" in environ else "JOB_COMPLETION_INDEX"
    rank = integer(environ, rank_var)
    _check_range(rank, n_nodes, rank_var, "PET_NNODES")
    if ranks_per_node != "1":
        raise LaunchError(
            f"PET_NNODES={n_nodes}, PET_NPROC_PER_NODE={shown(ranks_per_node)}, but no launcher started ranks in pod "
            f"{rank}",
            f"start through `shardkit launch --nnodes {n_nodes} --nproc-per-node N`, or torchrun",
        )
    port = integer(environ, "PET_MASTER_PORT")
    return RankEnv(rank, n_nodes, 0, 1, rank, n_nodes, "kubernetes", environ["PET_MASTER_ADDR"], port)


def _local(environ: Mapping[str, str], rank: int, world_size: int) -> tuple[int, int]:
    """(local_rank, local_world_size), if only RANK and WORLD_SIZE are sure to be set."""
    size_var = first_set(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # deepspeed's launcher sets LOCAL_SIZE
    local_rank = integer(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else None
    if size_var is not None:
        local_size = integer(environ, size_var)
        if not 1 <= local_size <= world_size:
            raise LaunchError(f"{size_var}={local_size}, but WORLD_SIZE={world_size}", f"correct or unset {size_var}")
        return (rank % local_size if local_rank is None else local_rank), local_size
    address = environ.get("MASTER_ADDR", "")
    is_loopback = address in ("localhost", "::1") or address.startswith("127.")
    if local_rank == rank or world_size == 1 or (local_rank is None and is_loopback):
        return rank if local_rank is None else local_rank, world_size
    if local_rank is None:
        cause = f"RANK={rank}, WORLD_SIZE={world_size}, but LOCAL_RANK is not set, and ranks may be on several nodes"
        raise LaunchError(cause, "set LOCAL_RANK and LOCAL_WORLD_SIZE, or start through torchrun")
    cause = f"RANK={rank} and LOCAL_RANK={local_rank} differ, but LOCAL_WORLD_SIZE is not set"
    raise LaunchError(cause, "set LOCAL_WORLD_SIZE to the number of ranks on this node, or start through torchrun")


def _checked(rank_env: RankEnv, node_var: str, nodes_var: str) -> RankEnv:
    _check_range(rank_env.rank, rank_env.world_size, "RANK", "WORLD_SIZE")
    _check_range(rank_env.local_rank, rank_env.local_world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    _check_range(rank_env.local_world_size - 1, rank_env.world_size, "LOCAL_WORLD_SIZE - 1", "WORLD_SIZE")
    _check_range(rank_env.node_rank, rank_env.n_nodes, node_var, nodes_var)
    _check_range(rank_env.n_nodes - 1, rank_env.world_size, f"{nodes_var} - 1", "WORLD_SIZE")
    return rank_env


def _check_range(index: int, size: int, index_name: str, size_name: str) -> None:
    if not 0 <= index < size:
        raise LaunchError(
            f"{index_name}={index} does not fit {size_name}={size}",
            "correct them (ranks count from 0), or unset them and start through torchrun",
        )


def _master(environ: Mapping[str, str], world_size: int) -> tuple[str | None, int | None]:
    """(MASTER_ADDR, MASTER_PORT); neither for one process or when both are unset."""
    address, port = environ.get("MASTER_ADDR") or None, environ.get("MASTER_PORT") or None
    if world_size == 1 or (address is None and port is None):
        return None, None
    return _required_address(environ), _port(environ)


def _required_address(environ: Mapping[str, str]) -> str:
    for name, counterpart in (("MASTER_ADDR", "MASTER_PORT"), ("MASTER_PORT", "MASTER_ADDR")):
        if not environ.get(name):
            raise LaunchError(
                f"{name} is not set ({counterpart}={shown(environ.get(counterpart, ''))})",
                "set both to rank 0's address, or neither to meet through the run directory",
            )
    return environ["MASTER_ADDR"]


def _port(environ: Mapping[str, str]) -> int:
    port = integer(environ, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise LaunchError(f"MASTER_PORT={port} is not a port", "set it between 1 and 65535, or unset MASTER_ADDR too")
    return port


def _count(environ: Mapping[str, str], name: str) -> int:
    return integer(environ, name) if name in environ else 0


# This node's GPUs, without torch.


def visible_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """GPUs that a process started here would see: CUDA_VISIBLE_DEVICES, else the driver's devices. The emulated GPUs of
    a rehearsal have no device files: there their number is a variable."""
    emulated = environ.get("SHARDKIT_REHEARSAL") or environ.get("SHARDKIT_COMPUTED")
    if emulated and environ.get("EMUCUDA_DEVICES", "").isdecimal():
        return int(environ["EMUCUDA_DEVICES"])
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    present = len([path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    if listed is None:
        return present
    named = itertools.takewhile(lambda entry: _is_device(entry.strip(), present), listed.split(","))
    return min(present, len(list(named)))


def _is_device(entry: str, present: int) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES can be a device: CUDA ignores entries from the first invalid one on."""
    return int(entry) < present if entry.isdigit() else entry.startswith(("GPU-", "MIG-"))


def grow_segments(environ: MutableMapping[str, str], root: Path = Path("/")) -> None:
    """Let the segments of torch's CUDA allocator grow, against fragmentation, unless the user set the allocator up.
    Call it before torch is imported. Does nothing without a GPU."""
    if visible_gpus(environ, root) and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def pci_addresses(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """PCI addresses of the GPUs that a process started here would see, in order; empty if the driver does not say.
    CUDA's default order is by speed: on machines with different GPUs this order may differ."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [folder.name for folder in folders]
    addresses = []
    for entry in (entry.strip() for entry in listed.split(",")):
        if entry.isdigit() and int(entry) < len(folders):
            addresses.append(folders[int(entry)].name)
        elif entry.startswith("GPU-"):
            addresses += [folder.name for folder in folders if f" {entry}" in _information(folder)]
    return addresses


def model_names(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """The driver's names of the GPUs of `pci_addresses`; torch uses the same names."""
    names = []
    for address in pci_addresses(environ, root):
        information = _information(root / "proc/driver/nvidia/gpus" / address)
        names += re.findall(r"^Model:\s*(.+?)\s*$", information, re.MULTILINE)
    return names


def _information(folder: Path) -> str:
    try:
        return (folder / "information").read_text().replace("\t", " ")
    except OSError:
        return ""


def flight_recorder(run_dir: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Settings that make NCCL's last collectives readable after a timeout, unless the user has set them. torch 2.9 and
    later read them, and also the older names; it writes a file per rank, for `torchfrtrace`."""
    defaults = {
        "TORCH_FR_BUFFER_SIZE": ("2000", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", ""),
        "TORCH_FR_DUMP_TEMP_FILE": (
            str(Path(run_dir).absolute() / "logs" / "nccl_rank_"), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        ),
    }  # fmt: skip
    return {
        name: value
        for name, (value, older) in defaults.items()
        if name not in environ and (not older or older not in environ)
    }


def ranks_per_node(option: str, device: str, environ: Mapping[str, str] = os.environ) -> int:
    """`auto` → one rank per visible GPU; a number stays."""
    if re.fullmatch(r"[0-9]{1,5}", option) and int(option) > 0:
        return int(option)
    if option != "auto":
        raise LaunchError(f"--nproc-per-node {option!r} is not a number of ranks", "pass a number from 1, or auto")
    count = 0 if device == "cpu" else visible_gpus(environ)
    if count == 0:
        cause = "run.device=cpu" if device == "cpu" else "this machine has no GPU"
        raise LaunchError(f"--nproc-per-node auto means one rank per GPU, but {cause}", "pass --nproc-per-node N")
    return count
