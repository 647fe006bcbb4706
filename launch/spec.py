"""The description of a job, from which torchrun's command and Slurm's script are made."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import ConfigError, LaunchError
from ..files import RUN_MODULE
from .script import Script

if TYPE_CHECKING:
    from ..config.schema import RunConfig


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of one torchrun job meet."""

    endpoint: str | None = None  # HOST:PORT of the store; None = one node, whose store is a file
    node_rank: int | None = None  # this node's number, if Slurm or the user numbers nodes; None = torchrun numbers them
    is_host: bool | None = None  # whether this node holds the store; None = torchrun compares host names
    run_id: str = "shardkit"  # the same on every node, and different for every job that uses the endpoint
    conf: str = ""  # more entries for torchrun's `--rdzv-conf`, `key=value,…`
    folder: str = ""  # private folder of that file; empty = torchrun makes one for itself


@dataclass(frozen=True)
class SlurmOptions:
    """Options for Slurm; None leaves the choice to the cluster."""

    style: str = "torchrun"  # `torchrun` starts one torchrun per node, `srun` one task per rank
    time: str | None = None  # time limit in Slurm's format, `4:00:00`
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    array: str | None = None
    dependency: str | None = None
    constraint: str | None = None
    mem: str | None = None
    exclude: str | None = None
    cpus_per_task: int | None = None
    container: str | None = None  # an image for srun's --container-image (pyxis)
    container_mounts: str | None = None  # mounts in pyxis' format, besides the working and the run directory
    # seconds before the time limit at which the job is told to save; None = preemption_warning.DEFAULT_S
    signal_s: int | None = None
    max_requeues: int = 100  # the job is not requeued after this many preemptions and time limits
    extra: tuple[str, ...] = ()  # raw `--key=value` options for sbatch


@dataclass(frozen=True)
class KubernetesOptions:
    """Options for Kubernetes."""

    image: str | None = None  # the pods' image
    volumes: tuple[str, ...] = ()  # `CLAIM:/PATH`, PersistentVolumeClaims and where they are mounted
    cpus: str | None = None  # CPUs of each pod, as Kubernetes writes them
    memory: str | None = None  # host memory of each pod, as Kubernetes writes it
    limit_s: int | None = None  # the job's time limit in seconds
    max_restarts: int = 0  # how often a JobSet starts again after a failure; disruptions do not count


@dataclass(frozen=True)
class JobSpec:
    """A training job."""

    config: str | None  # the YAML file; None = defaults
    run_dir: str  # directory of the run's files
    nproc_per_node: int  # ranks on each node
    overrides: tuple[str, ...] = ()  # `section.key=value`, applied after the file
    nodes: tuple[int, int] = (1, 1)  # (min, max); they differ for an elastic job
    gpus_per_node: int = 0  # GPUs to ask the cluster for; 0 = none
    max_restarts: int = 0
    python: str = "python3"  # the interpreter that ranks run in
    cwd: str = "."  # base directory of the config's relative paths
    log_dir: str = ""  # torchrun's directory for each rank's output
    bind_cpus: bool = True  # whether each rank is bound to its own CPUs
    on_gpus: bool = False  # whether ranks use GPUs
    name: str = "shardkit"
    rendezvous: Rendezvous = Rendezvous()
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    kubernetes: KubernetesOptions = KubernetesOptions()
    # the program that the ranks run instead of shardkit's own; None = `shardkit.train` with the config
    script: Script | None = None
    # seconds that the ranks of a config have to save and end after SIGTERM; None = the environment's
    # (`restart.grace_s`) for a launcher, `kubernetes.GRACE_S` for a pod
    grace_s: float | None = None
    # whether Python starts modules by the path of a file, since `-m` would search the current directory
    # (`shardkit/files/run_module.py`)
    starts_by_file: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may leave and join while the job runs."""
        return self.nodes[0] != self.nodes[1]

    @property
    def program(self) -> list[str]:
        """The words after `python` that start a rank."""
        if self.script is not None:
            return list(self.script.argv)
        config = [] if self.config is None else ["--config", self.config]
        return [*self.module("shardkit.train"), *config, *self.overrides]

    def module(self, name: str) -> list[str]:
        """The words after `python` that run a module."""
        return [str(RUN_MODULE), name] if self.starts_by_file else ["-m", name]


def parse_nnodes(text: str) -> tuple[int, int]:
    """`2` → (2, 2), `1:2` → (1, 2)."""
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise LaunchError(f"--nnodes {text!r} is not a number of nodes", "pass N, or MIN:MAX with 1 <= MIN <= MAX")
    return low, high


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`host:29500` → (host, 29500)."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or "/" in host or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise LaunchError(
            f"--rdzv-endpoint {endpoint!r} is not HOST:PORT",
            "name a host that all nodes reach and a free port on it, e.g. node0:29500",
        )
    return host, int(port)


def check_fits(config: RunConfig, nodes: int, ranks_per_node: int, gpus_per_node: int) -> None:
    """Refuse a job that its ranks would refuse."""
    device_setting, world_size = config.run.device, nodes * ranks_per_node
    if nodes < 1 or ranks_per_node < 1:
        raise LaunchError(f"--nodes {nodes} with {ranks_per_node} rank(s) per node", "ask for at least one of each")
    if device_setting == "cuda" and not gpus_per_node:
        raise ConfigError("run.device=cuda, but the job asks for no GPU", "pass --gpus-per-node N, or run.device=cpu")
    if device_setting != "cpu" and 0 < gpus_per_node < ranks_per_node:
        raise LaunchError(
            f"{ranks_per_node} ranks on each node, but {gpus_per_node} GPU(s)",
            f"ask for {ranks_per_node} GPUs or {gpus_per_node} ranks per node, or set run.device=cpu",
        )
    device = "cuda" if gpus_per_node and device_setting != "cpu" else "cpu"
    check_world(config, device, world_size, ranks_per_node)


def check_world(config: RunConfig, device: str, world_size: int, ranks_per_node: int) -> None:
    """Refuse a config that does not fit the ranks."""
    from ..config import capability
    from ..config.load import resolve_batch

    capability.check(config, device=device, world_size=world_size, local_world_size=ranks_per_node)
    capability.check_model(config)
    resolve_batch(config, world_size)
